"""The op decoder: its definition by loops, its spread by jolts, what a suite may ask for."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsebench.harness.bench import contest
from sparsebench.harness.bench.operands import operands, redraw
from sparsebench.harness.catalog import load_op
from sparsebench.harness.ops import decoder
from sparsebench.harness.ops._op import with_fields
from sparsebench.results.record import Contender, Problem, Row, Status
from tests.tools.devices import CPU

OP = load_op("decoder")
SIZES = {"m": 2, "hidden": 24, "heads": 6, "kv_heads": 2, "head_dim": 8, "intermediate": 32}
FEW = {"activation": "relu", "active": 4, "intermediate": 256, "hidden": 64, "m": 6}
REST = {"vocab": 10, "layers": 3, "context": 5, "caches": 2, "dtype": "fp32"}


def problem(**fields: Any) -> Problem:
    return Problem("decoder", {**OP.defaults, **SIZES, **REST, **fields}, defaults=OP.defaults)


def exact(spec: Problem) -> dict[str, Tensor]:
    result = operands(spec, OP, CPU, None)
    return {name: t.double() for name, t in {**result.weights, **result.activations}.items()}


def norm(x: Any, gain: Any = 1.0) -> Any:
    return x / np.sqrt((x**2).mean() + 1e-6) * gain


def turned(x: Any, position: int) -> Any:
    """Turn each pair as a complex number."""
    half = len(x) // 2
    angle = position * 1e6 ** (-np.arange(half) / half)
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
    return np.concatenate((z.real, z.imag))


def loops(spec: Problem, tensors: dict[str, Any]) -> Any:
    """Write a decoding step out, a sequence, a head and a token at a time."""
    d, group = spec["head_dim"], spec["heads"] // spec["kv_heads"]
    shape = spec["caches"], spec["m"], spec["kv_heads"], spec["context"], d
    keys, values = (tensors[name].reshape(shape) for name in ("keys", "values"))
    rows = []
    for sequence, s in enumerate(tensors["x"]):
        for layer in range(spec["layers"]):
            projected = tensors["wqkv"] @ norm(s, tensors["gains"][2 * layer])
            heads = projected.reshape(-1, d)
            out = []
            for head in range(spec["heads"]):
                at = head // group
                key = turned(norm(heads[spec["heads"] + at]), spec["context"])
                q = turned(norm(heads[head]), spec["context"])
                cache = layer % spec["caches"], sequence, at
                seen = np.vstack((keys[cache], key))
                p = np.exp(seen @ q / np.sqrt(d))
                held = np.vstack((values[cache], heads[spec["heads"] + spec["kv_heads"] + at]))
                out.append(p @ held / p.sum())
            s = s + tensors["wo"] @ np.concatenate(out)
            z = norm(s, tensors["gains"][2 * layer + 1])
            gate = tensors["wg"] @ z
            s = s + tensors["wd"] @ (gate / (1 + np.exp(-gate)) * (tensors["wu"] @ z))
        rows.append(tensors["wh"] @ norm(s, tensors["gains"][-1]))
    return np.array(rows)


def test_a_step_equals_explicit_loops() -> None:
    spec = problem()
    tensors = exact(spec)
    result = with_fields(OP.definition, spec)(**tensors).numpy()
    assert np.allclose(result, loops(spec, {n: t.numpy() for n, t in tensors.items()}), rtol=1e-9)


def test_no_part_of_the_model_is_small_beside_the_others() -> None:
    """Attention or MLP of the last layer left out: 4 % of the logits and more."""
    for fields in ({}, {"pattern": "blocks", "block": 8, "sparsity": 0.75, "hidden": 32}, FEW):
        spec = problem(layers=8, **fields)
        tensors = exact(spec)
        right = with_fields(OP.definition, spec)(**tensors)
        for half in (0, 1):
            gains = tensors["gains"].clone()
            gains[14 + half] = 0
            wrong = with_fields(OP.definition, spec)(**{**tensors, "gains": gains})
            assert float((wrong - right).norm() / right.norm()) > 0.04


@pytest.mark.parametrize("layers", [1, 4])
def test_the_spread_is_that_of_roundings_in_every_layer(layers: int) -> None:
    spec = problem(layers=layers, caches=1, context=40)
    tensors = exact(spec)
    size = 1e-4
    torch.manual_seed(0)
    reference = with_fields(OP.definition, spec)(**tensors)
    errors = []
    for _ in range(60):
        jolted = {name: t * (1 + size * torch.randn_like(t)) for name, t in tensors.items()}
        errors.append(with_fields(OP.definition, spec)(**jolted) - reference)
    result = torch.stack(errors).norm() / 60**0.5 / size
    ratio = float(result / with_fields(OP.spread, spec)(**tensors).norm())
    assert 0.5 < ratio < 1.5


def contest_of(spec: Problem) -> list[Row]:
    contenders = [Contender("dense", "torch_dense", baseline=True), Contender("dense", "reference")]
    rows, _ = contest.run(spec, contenders, CPU, None)
    assert [row.status for row in rows] == [Status.OK] * 2, [row.detail for row in rows]
    return rows


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8"])
def test_torch_is_right_in_a_contest_on_a_cpu(dtype: str) -> None:
    spec = problem(dtype=dtype, intermediate=256, pattern="spense_hidden", sparsity=0.25)
    rows = contest_of(spec)
    dense = 24 * (80 + 48 + 3 * 256 + 10)
    assert rows[0].nnz == dense - 3 * 24 * 256 // 4
    assert rows[0].sparsity == pytest.approx(3 * 24 * 64 / dense)


@pytest.mark.parametrize("fields", [{}, {"dtype": "bf16"}, {"m": 1, "activation": "relu2"}])
def test_as_many_units_are_on_in_every_layer(fields, monkeypatch) -> None:
    spec = problem(**{**FEW, **fields})
    result = operands(spec, OP, CPU, None)
    counts: list[float] = []
    honest = decoder.act_of

    def act(z: Tensor, activation: str) -> Tensor:
        counts.append(float((z > 0).sum()) / len(z))
        return honest(z, activation)

    monkeypatch.setattr(decoder, "act_of", act)
    for draw in (0, 3):
        redraw(spec, OP, result.activations, draw, weights=result.weights)
        gains = result.activations["gains"].clone()
        counts.clear()
        everything = {**result.weights, **result.activations}
        with_fields(OP.definition, spec)(**{name: t.double() for name, t in everything.items()})
        assert counts == [pytest.approx(4, abs=0.35)] * 3
        redraw(spec, OP, result.activations, draw, weights=result.weights)
        assert torch.equal(gains, result.activations["gains"])


def test_only_units_that_are_on_are_work() -> None:
    few, every = problem(**FEW), problem(**{**FEW, "active": None})
    nnz = {"wqkv": 10, "wo": 10, "wg": 1024, "wu": 1024, "wd": 1024, "wh": 10}
    assert OP.dense(few) == every
    part = 4 / 256
    assert OP.flops(every, nnz) - OP.flops(few, nnz) == 2 * 6 * 3 * (1 - part) * 2048
    saved = OP.fewest_bytes(every, nnz, 4) - OP.fewest_bytes(few, nnz, 4)
    assert saved == pytest.approx(3 * 4 * (1 - part) ** 6 * 2048, abs=1)
    assert OP.held_bytes(few) == OP.held_bytes(every)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_derived_gains_are_the_same_bits_on_a_gpu(dtype: str) -> None:
    spec = problem(**FEW, dtype=dtype, layers=6)
    here, there = (operands(spec, OP, torch.device(d), None) for d in ("cpu", "cuda:0"))
    assert here.digest == there.digest


def test_a_kernel_holds_the_weights_of_every_layer() -> None:
    few, many = (OP.held_bytes(problem(layers=layers)) for layers in (3, 5))
    tensors = exact(problem())
    layer = sum(tensors[name].numel() for name in ("wqkv", "wo", "wg", "wu", "wd"))
    assert many - few == 4 * (2 * layer + 4 * SIZES["hidden"])
    whole = Problem("decoder", {**OP.defaults, **QWEN3, "dtype": "fp8"}, defaults=OP.defaults)
    assert OP.held_bytes(whole) == pytest.approx(64 * 487.6e6 + 1.556e9, rel=0.01)


QWEN3 = {
    **{"hidden": 5120, "heads": 64, "kv_heads": 8, "head_dim": 128, "intermediate": 25600},
    **{"m": 1, "vocab": 151936, "layers": 64, "context": 1024},
}
