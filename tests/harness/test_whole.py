"""Tests of whole models: active units, wrong results without times, errors in one line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from sparsebench.harness.bench import energy
from sparsebench.harness.models.whole import measure as measuring
from sparsebench.harness.models.whole import step
from sparsebench.harness.models.whole.measure import measure, table
from sparsebench.harness.models.whole.model import (
    Pass,
    Shape,
    Weights,
    calibrate,
    count_units,
    draw_weights,
    forward,
)
from sparsebench.kernels._kernel import Launch
from sparsebench.results.model_files import read_whole
from tests.tools.command_line import output, refusal, sparsebench

CPU = torch.device("cpu")
SHAPE = Shape(layers=2, width=64, hidden=128, heads=2, vocab=50, sequences=2, context=64, active=6)


def calibrated(shape: Shape) -> tuple[Weights, torch.Tensor, Pass]:
    weights = draw_weights(shape, CPU, torch.float32)
    torch.manual_seed(1)
    tokens = torch.randint(shape.vocab, (shape.sequences, shape.context))
    z = torch.empty(shape.tokens, shape.width)
    run = forward(shape, weights, tokens, z, False)
    calibrate(run, shape, weights, z)
    return weights, z, run


@pytest.mark.parametrize("active", [1.5, 6, 40])
def test_calibration_sets_the_active_units_of_every_layer(active: float) -> None:
    shape = replace(SHAPE, layers=5, active=active)
    weights, z, run = calibrated(shape)
    logits, units = count_units(run, weights, z)
    assert logits.shape == (2, 64, 50)
    assert units == [pytest.approx(active, rel=0.04)] * 5


def test_units_are_counted_per_layer() -> None:
    shape = replace(SHAPE, layers=3)
    weights, z, run = calibrated(shape)
    weights.gains[1, 0] = 0
    _, units = count_units(run, weights, z)
    assert units[0] == pytest.approx(6, rel=0.02)
    assert units[1] == pytest.approx(64, rel=0.1)


def test_no_layer_writes_column_0_of_the_stream() -> None:
    weights = draw_weights(SHAPE, CPU, torch.float32)
    assert (weights.embedding[:, 0] == 1).all()
    assert not weights.out[0].any()
    assert not weights.wd[0].any()


@pytest.mark.parametrize("kind", step.MLPS[:2])
def test_step_matches_the_plain_model(kind: step.Mlp) -> None:
    weights = draw_weights(SHAPE, CPU, torch.float32)
    tokens = torch.randint(50, (2, 65))
    plain, other = (
        step.step(SHAPE, weights, tokens, k, False).loss_and_gradients() for k in ("plain", kind)
    )
    assert len(plain) == len(other) == 3
    for expected, actual in zip(plain, other, strict=True):
        assert torch.allclose(expected, actual, rtol=1e-3, atol=1e-6)


def test_step_with_wrong_gradients_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    original = step.mlp
    monkeypatch.setattr(step, "MLPS", ("plain", "SparseGatedMLP"))
    monkeypatch.setattr(measuring, "MLPS", ("plain", "SparseGatedMLP"))
    calls = []

    def detached(z: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return original(z.detach(), *weights)

    monkeypatch.setattr(step, "mlp", detached)
    report = measure(SHAPE, [], CPU, dtype="fp32", steps=1)
    assert calls
    sparse = report.ways[-1]
    assert sparse.detail.startswith("wrong")
    assert not sparse.times_us


def test_wrong_or_unsupported_kernels_have_no_times(monkeypatch, tmp_path) -> None:
    prepare = measuring._launch

    def launch(name: str, *arguments: object) -> Launch:
        dense = prepare("torch_dense", *arguments)  # type: ignore[arg-type]
        if name == "twice":
            return Launch(lambda: 2 * dense.run())  # type: ignore[operator]
        if name == "losing":
            return Launch(dense.run, lost=lambda: 3)
        if name == "not_a_number":
            return Launch(lambda: torch.nan * dense.run())  # type: ignore[operator]
        if name == "breaks":
            raise RuntimeError("an illegal address\nand more")
        return prepare(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "_launch", launch)
    names = ["breaks", "twice", "losing", "not_a_number", "ffn_sparse", "torch_dense"]
    report = measure(SHAPE, names, CPU, dtype="fp32", steps=0, to=tmp_path / "whole.json")
    by_name = {way.mlp: way for way in report.ways}
    assert len(by_name["torch_dense"].times_us) == measuring.ROUNDS
    assert by_name["torch_dense"].error == 0
    assert by_name["twice"].detail.startswith("wrong")
    assert "6 values lost in 2 layers" in by_name["losing"].detail
    assert by_name["losing"].error == 0
    assert "nan" in by_name["not_a_number"].detail
    assert by_name["not_a_number"].error is None
    assert by_name["breaks"].detail == "failed: RuntimeError: an illegal address"
    assert [way.detail for way in read_whole(tmp_path / "whole.json").ways] == [
        way.detail for way in report.ways
    ]
    assert "cuda" in by_name["ffn_sparse"].detail
    assert not any(by_name[name].times_us for name in names[:-1])
    assert len(table(report).rows) == 7


def test_energy_is_the_median_over_pieces_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake NVML with 300 W and a clock that advances by 50 ms at each reading."""
    ticks, calls = count(), [0]
    now = [0.0]

    def clock() -> float:
        now[0] = 0.05 * next(ticks)
        return now[0]

    class Counter:
        def energy_j(self) -> float:
            return 300 * now[0]

    @contextmanager
    def board(uuid: str) -> Iterator[Counter]:
        assert uuid == "GPU-fake"
        yield Counter()

    monkeypatch.setattr(energy, "perf_counter", clock)
    monkeypatch.setattr(energy, "board", board)
    for module in (energy, measuring):
        monkeypatch.setattr(module, "identity", lambda device: "GPU-fake")
    original = measuring.pieces

    def pieces(run: object, device: object, window_s: float, many: int) -> object:
        calls[0] += 1
        measured = original(run, device, window_s, many)  # type: ignore[arg-type]
        assert len(measured) == 5
        assert sum(piece.window_s for piece in measured) >= 15
        return measured

    monkeypatch.setattr(measuring, "pieces", pieces)
    tiny = replace(SHAPE, layers=1, width=8, hidden=8, vocab=8, sequences=1, context=4, active=2)
    report = measure(tiny, ["torch_dense"], CPU, dtype="fp32", steps=0, window_s=30.0)
    assert calls[0] == 2
    assert [way.energy_j for way in report.ways] == [None, pytest.approx(300 * 0.05, rel=0.2)]
    alone = measure(tiny, [], CPU, dtype="fp32", steps=0, window_s=30.0)
    assert alone.ways[0].energy_j == pytest.approx(300 * 0.05, rel=0.2)


def test_energy_without_a_meter_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "whole.json"
    done = sparsebench("whole", "--energy", "30", "--device", "cpu", "--out", file)
    assert done.returncode != 0
    assert "energy" in done.stderr
    assert not file.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--mlp", "cublass"], "did you mean cublas?"), (["--heads", 3], "--heads: expected")],
)
def test_bad_input_is_refused_before_the_model_is_made(flags, message) -> None:
    assert message in refusal("whole", "--device", "cpu", *flags)


def test_command_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "whole.json"
    sizes = "--layers 1 --width 32 --hidden 64 --heads 2 --vocab 20 --sequences 1 --context 16"
    options = f"{sizes} --active 4 --training 0 --mlp reference --device cpu"
    shown = output("whole", *options.split(), "--out", file, "--json")
    report = json.loads(file.read_text())
    assert report == json.loads(shown)
    assert report["schema"] == "sparsebench/whole@1"
    assert [way["mlp"] for way in report["ways"]] == ["plain", "reference"]
    assert report["model"]["active"] == 4
    assert report["active_by_layer"] == [report["active"]] == [pytest.approx(4, rel=0.1)]
