"""The contract of every op in the folder, and each definition against loops in float64."""

from typing import Any

import numpy as np
import pytest
import torch

from sparsebench.harness.catalog import load_op, names
from sparsebench.harness.ops import experts
from sparsebench.harness.testing.ops import SIZES, drawn, sizes
from sparsebench.results.record import Problem
from sparsebench.testing import Check, op_checks

ACTIVATIONS = ["silu", "relu", "relu2"]


def loops(activation: str, wg: Any, wu: Any, wd: Any, x: Any) -> np.ndarray:
    """Write the definition of ffn out, one scalar at a time."""
    act = {
        "silu": lambda z: z / (1 + np.exp(-z)),
        "relu": lambda z: max(z, 0.0),
        "relu2": lambda z: max(z, 0.0) ** 2,
    }[activation]
    y = np.zeros((len(x), len(wd)))
    for t in range(len(x)):
        for h in range(len(wg)):
            gate = sum(x[t, i] * wg[h, i] for i in range(x.shape[1]))
            up = sum(x[t, i] * wu[h, i] for i in range(x.shape[1]))
            for o in range(len(wd)):
                y[t, o] += act(gate) * up * wd[o, h]
    return y


@pytest.mark.parametrize("check", [c for n in names("harness.ops") for c in op_checks(n)], ids=str)
def test_every_op_keeps_its_contract(check: Check) -> None:
    check()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_ffn_is_a_gated_sum_of_products(activation: str) -> None:
    operands = drawn("ffn")
    expected = loops(activation, *(tensor.numpy() for tensor in operands.values()))
    single = {name: tensor.float() for name, tensor in operands.items()}
    y = load_op("ffn").definition(**single, activation=activation)
    assert np.allclose(y.double().numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_spread_of_ffn_is_that_of_random_rounding(activation: str) -> None:
    """Perturb every term of every product, as the spread of an op assumes."""
    op, exact = load_op("ffn"), drawn("ffn")
    torch.manual_seed(0)
    errors = []
    reference = op.definition(**exact, activation=activation)
    for _ in range(400):
        jolted = {name: t * (1 + 1e-6 * torch.randn_like(t)) for name, t in exact.items()}
        jolted["x"] = exact["x"]
        errors.append(op.definition(**jolted, activation=activation) - reference)
    measured = torch.stack(errors).std(0) / 1e-6
    ratio = measured / op.spread(**exact, activation=activation)
    assert float(ratio.min()) > 0.2  # relu's slope counts where it is off, too
    assert float(ratio.max()) < 1.2


def test_the_work_of_linear_by_hand() -> None:
    op, problem = load_op("linear"), Problem("linear", {**SIZES, "dtype": "bf16"})
    assert op.flops(problem, {"w": 7}) == 2 * 3 * 7
    assert op.fewest_bytes(problem, {"w": 7}, 2) == 2 * (7 + 3 * 5 + 3 * 6)
    fp8 = Problem("linear", {**SIZES, "dtype": "fp8"})
    assert op.fewest_bytes(fp8, {"w": 7}, 1) == 7 + 3 * 5 + 2 * 3 * 6


@pytest.mark.parametrize(
    ("op", "elements"),
    [("linear", 3 * 2 + 3 * 6), ("linear_dgrad", 3 * 2 + 3 * 5), ("linear_wgrad", 3 * 2 + 3 * 2)],
)
def test_activations_that_meet_no_non_zero_are_not_read(op: str, elements: int) -> None:
    w = torch.zeros(6, 5)
    w[1, :2] = w[4, 1] = 1.0  # two rows and two columns have non-zeros
    problem, counts = Problem(op, {**SIZES, "dtype": "bf16"}), load_op(op).nonzeros
    nnz = counts(problem, {"w": w})
    assert load_op(op).fewest_bytes(problem, nnz, 2) == 2 * (3 + elements)
    output = {"linear": 3 * 6, "linear_dgrad": 3 * 5, "linear_wgrad": 3}[op]
    assert load_op(op).output_bytes(problem, nnz) == 2 * output


def test_the_work_of_decoder_by_hand() -> None:
    op, fields = load_op("decoder"), {**sizes(load_op("decoder")), "layers": 3, "dtype": "bf16"}
    nnz = {"wqkv": 1, "wo": 2, "wg": 3, "wu": 4, "wd": 5, "wh": 100}
    attended = 2 * 4 * 4 * (5 + 1)  # scores and sums: heads, head_dim, tokens
    assert op.flops(Problem("decoder", fields), nnz) == 2 * 3 * (3 * 15 + 100 + 3 * attended)
    cached = 2 * 3 * 2 * 4 * 5  # keys and values: m, kv_heads, head_dim, cache
    rest = 100 + 3 * 6 + 3 * 5
    assert op.fewest_bytes(Problem("decoder", fields), nnz, 2) == 2 * (3 * (15 + cached) + rest)
    fp8 = Problem("decoder", {**fields, "dtype": "fp8"})
    assert op.fewest_bytes(fp8, nnz, 1) == 3 * 15 + 2 * (3 * cached + rest)


def test_the_work_of_ffn_by_hand() -> None:
    op, problem = load_op("ffn"), Problem("ffn", {**SIZES, "dtype": "bf16"})
    nnz = {"wg": 7, "wu": 8, "wd": 9}
    assert op.flops(problem, nnz) == 2 * 3 * 24
    assert op.fewest_bytes(problem, nnz, 2) == 2 * (24 + 3 * 5 + 3 * 5)
    fp8 = Problem("ffn", {**SIZES, "dtype": "fp8"})
    assert op.fewest_bytes(fp8, nnz, 1) == 24 + 2 * (3 * 5 + 3 * 5)
    assert op.flops(fp8, nnz) == op.flops(problem, nnz)


def test_weights_of_ffn_in_fp8_stand_for_smaller_ones() -> None:
    op, (n, k) = load_op("ffn"), (20, 64)
    torch.manual_seed(0)
    wg, wu, wd, x = (torch.randn(*size).double() for size in ((n, k), (n, k), (k, n), (3, k)))
    y = op.definition(wg, wu, wd, x, activation="relu2", dtype="fp8")
    assert torch.equal(y, op.definition(wg / 8, wu / 8, wd / 4, x, activation="relu2"))


def test_every_layer_of_a_mixture_hits_as_many_experts() -> None:
    op, m, layers = load_op("experts_decoder"), 16, 3
    fields = {"m": m, "layers": layers, "experts": 32, "top_k": 8, "routing": "skewed"}
    problem, ids = Problem("experts_decoder", fields), torch.empty(layers * m, 8, dtype=torch.int64)
    op.adjust(problem, "ids", ids, 5)
    hit = [len(of_layer.unique()) for of_layer in ids.split(m)]
    assert hit == [experts.experts_hit(problem)] * layers
    assert not torch.equal(ids[:m], ids[m : 2 * m])


@pytest.mark.parametrize("routing", ["uniform", "measured", "skewed", "one", "holes"])
def test_every_draw_hits_as_many_experts_with_as_many_rows(routing: str) -> None:
    fields = {"m": 16, "experts": 32, "top_k": 8, "routing": routing}
    problem = Problem("experts", fields)
    first, *others = (experts.rows_of_experts(problem, draw) for draw in range(4))
    assert experts.experts_hit(problem) == int((first > 0).sum())
    for rows in others:
        assert torch.equal(rows.sort().values, first.sort().values)
        assert not torch.equal(rows, first)
