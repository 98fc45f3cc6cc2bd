"""The script experiments/whole_model.py on tiny models: active units, and no times if wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import sparse_decoder
import torch
import whole_model
from sparse_decoder import Forward, Model, Shape, Weights

from sparsebench.errors import SparsebenchError
from sparsebench.kernels._kernel import Launch
from sparsebench.results.model_files import read_whole
from tests.tools.devices import CPU

SHAPE = Shape(layers=2, width=64, hidden=128, heads=2, vocab=50, sequences=2, context=64, active=6)


@pytest.mark.parametrize("active", [1.5, 40])
def test_calibration_sets_the_active_units_of_every_layer(active: float) -> None:
    shape = replace(SHAPE, layers=4, active=active)
    weights = Weights.draw(shape, CPU, torch.float32)
    run = Forward(shape, weights, torch.randint(shape.vocab, (shape.sequences, shape.context)))
    run.calibrate()
    logits, units = run.count_units()
    assert logits.shape == (2, 64, 50)
    assert units == [pytest.approx(active, rel=0.04)] * 4
    weights.gains[1, 0] = 0
    assert run.count_units()[1][1] == pytest.approx(64, rel=0.1)


def test_a_step_of_sparse_mlps_has_the_gradients_of_the_plain_model() -> None:
    weights = Weights.draw(SHAPE, CPU, torch.float32)
    tokens = torch.randint(50, (2, 65))
    plain, sparse = (
        Model(SHAPE, weights, kind, False).loss_and_gradients(tokens)
        for kind in (sparse_decoder.PLAIN, sparse_decoder.SPARSE)
    )
    assert len(plain) == 3
    for expected, actual in zip(plain, sparse, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6)


def test_wrong_or_unsupported_kernels_have_no_times(monkeypatch, tmp_path: Path) -> None:
    prepare = whole_model.launch

    def launch(name: str, run: Forward) -> Launch:
        dense = prepare("torch_dense", run)
        match name:
            case "twice":
                return Launch(lambda: 2 * dense.run())  # type: ignore[operator]
            case "losing":
                return Launch(dense.run, lost=lambda: 3)
            case "not_a_number":
                return Launch(lambda: torch.nan * dense.run())  # type: ignore[operator]
            case "breaks":
                raise RuntimeError("an illegal address\nand more")
        return prepare(name, run)

    monkeypatch.setattr(whole_model, "launch", launch)
    names = ["breaks", "twice", "losing", "not_a_number", "ffn_sparse", "torch_dense"]
    file = tmp_path / "whole.json"
    whole_model.measure(SHAPE, names, CPU, dtype="fp32", steps=0, to=file)
    ways = {way.mlp: way for way in read_whole(file).ways}
    assert len(ways["torch_dense"].times_us) == whole_model.ROUNDS
    assert ways["torch_dense"].error == 0
    assert ways["twice"].detail.startswith("wrong: a relative error")
    assert "6 values lost in 2 layers" in ways["losing"].detail
    assert ways["not_a_number"].error is None
    assert ways["breaks"].detail == "failed: RuntimeError: an illegal address"
    assert "cuda" in ways["ffn_sparse"].detail
    assert not any(ways[name].times_us for name in names[:-1])


def test_the_script_writes_passes_and_steps(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(whole_model, "STEPS", ("plain", "SparseGatedMLP"))  # compiling takes long
    file = tmp_path / "whole.json"
    sizes = {"layers": 1, "width": 32, "hidden": 64, "heads": 2, "vocab": 20, "context": 16}
    options = {"sequences": 1, "active": 4, "training": 1, "device": "cpu"}
    whole_model.main(mlp="reference", **sizes, **options, out=file)
    report = json.loads(file.read_text())
    assert report == json.loads(capsys.readouterr().out)
    read_whole(file)
    assert [(way["what"], way["mlp"]) for way in report["ways"]] == [
        ("forward", "plain"),
        ("forward", "reference"),
        *(("step", kind) for kind in whole_model.STEPS),
    ]
    assert report["active_by_layer"] == [report["active"]] == [pytest.approx(4, rel=0.1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mlp": "cublass"}, r"did you mean cublas\?"),
        ({"heads": 3}, "--heads: expected"),
        ({"energy": 30.0}, "energy: expected"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_made(options, message, tmp_path) -> None:
    with pytest.raises(SparsebenchError, match=message):
        whole_model.main(device="cpu", out=tmp_path / "whole.json", **options)
    assert not [*tmp_path.iterdir()]
