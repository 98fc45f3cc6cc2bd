"""A whole model around kernels of its MLP: units on, right answers alone, errors in one line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from sparsebench.harness.bench import energy
from sparsebench.harness.models.whole import command, step
from sparsebench.harness.models.whole.command import measure, table
from sparsebench.harness.models.whole.model import (
    Pass,
    Shape,
    Weights,
    calibrate,
    counted,
    drawn,
    forward,
)
from sparsebench.kernels._kernel import Launch
from sparsebench.results.model_files import read_whole
from tests.tools.command_line import sparsebench

CPU = torch.device("cpu")
SHAPE = Shape(layers=2, width=64, hidden=128, heads=2, vocab=50, sequences=2, context=64, active=6)


def calibrated(shape: Shape) -> tuple[Weights, torch.Tensor, Pass]:
    weights = drawn(shape, CPU, torch.float32)
    torch.manual_seed(1)
    tokens = torch.randint(shape.vocab, (shape.sequences, shape.context))
    z = torch.empty(shape.tokens, shape.width)
    run = forward(shape, weights, tokens, z, False)
    calibrate(run, shape, weights, z)
    return weights, z, run


@pytest.mark.parametrize("active", [1.5, 6, 40])
def test_as_many_units_are_on_as_was_asked_for_in_every_layer(active: float) -> None:
    shape = replace(SHAPE, layers=5, active=active)
    weights, z, run = calibrated(shape)
    logits, units = counted(run, weights, z)
    assert logits.shape == (2, 64, 50)
    assert units == [pytest.approx(active, rel=0.04)] * 5


def test_layers_differ_and_each_is_counted() -> None:
    shape = replace(SHAPE, layers=3)
    weights, z, run = calibrated(shape)
    weights.gains[1, 0] = 0
    _, units = counted(run, weights, z)
    assert units[0] == pytest.approx(6, rel=0.02)
    assert units[1] == pytest.approx(64, rel=0.1)


def test_column_0_of_the_stream_is_one_in_every_layer() -> None:
    weights = drawn(SHAPE, CPU, torch.float32)
    assert (weights.embedding[:, 0] == 1).all()
    assert not weights.out[0].any()
    assert not weights.wd[0].any()


@pytest.mark.parametrize("kind", step.MLPS[:2])
def test_a_step_has_loss_and_gradients_of_the_plain_model(kind: step.Mlp) -> None:
    weights = drawn(SHAPE, CPU, torch.float32)
    tokens = torch.randint(50, (2, 65))
    plain, other = (step.step(SHAPE, weights, tokens, k, False).shown() for k in ("plain", kind))
    assert len(plain) == len(other) == 3
    for right, found in zip(plain, other, strict=True):
        assert torch.allclose(right, found, rtol=1e-3, atol=1e-6)


def test_a_step_whose_gradients_are_wrong_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = step.mlp
    monkeypatch.setattr(step, "MLPS", ("plain", "SparseGatedMLP"))
    monkeypatch.setattr(command, "MLPS", ("plain", "SparseGatedMLP"))
    calls = []

    def forgets(z: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return honest(z.detach(), *given)

    monkeypatch.setattr(step, "mlp", forgets)
    found = measure(SHAPE, [], CPU, dtype="fp32", steps=1)
    assert calls
    sparse = found.ways[-1]
    assert "wrong: loss or gradients are" in sparse.detail
    assert not sparse.times_us


def test_what_is_wrong_or_unsupported_has_no_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepare = command._launch

    def launch(name: str, *given: object) -> Launch:
        found = prepare("torch_dense", *given)  # type: ignore[arg-type]
        if name == "twice":
            return Launch(lambda: 2 * found.run())  # type: ignore[operator]
        if name == "losing":
            return Launch(found.run, lost=lambda: 3)
        if name == "not_a_number":
            return Launch(lambda: torch.nan * found.run())  # type: ignore[operator]
        if name == "breaks":
            raise RuntimeError("an illegal address\nand more")
        return prepare(name, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "_launch", launch)
    names = ["breaks", "twice", "losing", "not_a_number", "ffn_sparse", "torch_dense"]
    found = measure(SHAPE, names, CPU, dtype="fp32", steps=0, to=tmp_path / "whole.json")
    by_name = {way.mlp: way for way in found.ways}
    assert len(by_name["torch_dense"].times_us) == command.ROUNDS
    assert by_name["torch_dense"].error == 0
    assert "wrong: logits are" in by_name["twice"].detail
    assert by_name["losing"].detail == "wrong: 6 values lost in 2 layers"
    assert by_name["losing"].error == 0
    assert by_name["not_a_number"].detail == "wrong: logits are nan from the right ones"
    assert by_name["not_a_number"].error is None
    assert by_name["breaks"].detail == "failed: RuntimeError: an illegal address"
    read = read_whole(tmp_path / "whole.json")
    assert [way.detail for way in read.ways] == [way.detail for way in found.ways]
    assert "runs on cuda, not on cpu" in by_name["ffn_sparse"].detail
    assert not any(by_name[name].times_us for name in names[:-1])
    assert len(table(found).rows) == 7


def test_energy_is_the_median_of_pieces_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up NVML, 300 W; every look at the clock is 50 ms later than the one before."""
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
    monkeypatch.setattr(energy, "identity", lambda device: "GPU-fake")
    honest = command.pieces

    def pieces(run: object, device: object, window_s: float, many: int) -> object:
        calls[0] += 1
        found = honest(run, device, window_s, many)  # type: ignore[arg-type]
        assert len(found) == 5
        assert sum(piece.window_s for piece in found) >= 15
        return found

    monkeypatch.setattr(command, "pieces", pieces)
    tiny = replace(SHAPE, layers=1, width=8, hidden=8, vocab=8, sequences=1, context=4, active=2)
    found = measure(tiny, ["torch_dense"], CPU, dtype="fp32", steps=0, window_s=30.0)
    assert calls[0] == 2
    assert [way.energy_j for way in found.ways] == [None, pytest.approx(300 * 0.05, rel=0.2)]
    alone = measure(tiny, [], CPU, dtype="fp32", steps=0, window_s=30.0)
    assert alone.ways[0].energy_j == pytest.approx(300 * 0.05, rel=0.2)


def test_energy_without_a_meter_is_said_before_anything_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "whole.json"
    done = sparsebench("whole", "--energy", "30", "--device", "cpu", "--out", file)
    assert done.returncode != 0
    assert "energy: expected an NVIDIA GPU" in done.stderr
    assert not file.exists()


def test_the_command_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "whole.json"
    sizes = "--layers 1 --width 32 --hidden 64 --heads 2 --vocab 20 --sequences 1 --context 16"
    given = f"{sizes} --active 4 --training 0 --mlp reference --device cpu"
    done = sparsebench("whole", *given.split(), "--out", file, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found == json.loads(done.stdout)
    assert found["schema"] == "sparsebench/whole@1"
    assert [way["mlp"] for way in found["ways"]] == ["plain", "reference"]
    assert found["model"]["active"] == 4
    assert found["active_by_layer"] == [found["active"]] == [pytest.approx(4, rel=0.1)]
