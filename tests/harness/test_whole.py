"""A whole model around kernels of its MLP: units on, right answers alone, errors in one line."""

import json
from pathlib import Path

import pytest
import torch
from command import sparsebench

from sparsebench.harness.whole import command, step
from sparsebench.harness.whole.command import measure, table
from sparsebench.harness.whole.model import Shape, drawn, forward, mlp, on
from sparsebench.kernels._kernel import Launch

CPU = torch.device("cpu")
SHAPE = Shape(layers=2, width=64, hidden=128, heads=2, vocab=50, sequences=2, context=64, active=6)


def test_as_many_units_are_on_as_was_asked_for_in_every_layer() -> None:
    weights = drawn(SHAPE, CPU, torch.float32)
    tokens = torch.randint(50, (2, 64))
    z, counts = torch.empty(128, 64), []

    def call() -> torch.Tensor:
        counts.append(on(weights.wg, z))
        return mlp(z, weights.wg, weights.wu, weights.wd)

    logits = forward(SHAPE, weights, tokens, z, call, False)()
    assert logits.shape == (2, 64, 50)
    assert counts == pytest.approx([6, 6], rel=0.25)


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


def test_what_is_wrong_or_unsupported_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = command._launch

    def launch(name: str, *given: object) -> Launch:
        found = prepare("torch_dense", *given)  # type: ignore[arg-type]
        if name == "twice":
            return Launch(lambda: 2 * found.run())  # type: ignore[operator]
        if name == "losing":
            return Launch(found.run, lost=lambda: 3)
        return prepare(name, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "_launch", launch)
    names = ["torch_dense", "twice", "losing", "ffn_sparse"]
    found = measure(SHAPE, names, CPU, dtype="fp32", steps=0)
    by_name = {way.mlp: way for way in found.ways}
    assert len(by_name["torch_dense"].times_us) == command.ROUNDS
    assert by_name["torch_dense"].error == 0
    assert "wrong: logits are" in by_name["twice"].detail
    assert by_name["losing"].detail == "3 values lost"
    assert "runs on cuda, not on cpu" in by_name["ffn_sparse"].detail
    assert [len(by_name[name].times_us) for name in names[1:]] == [0, 0, 0]
    assert len(table(found).rows) == 5


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
