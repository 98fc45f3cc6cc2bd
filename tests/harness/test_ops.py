"""The contract of every op in the folder, and each definition against loops in float64."""

import inspect
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsebench.harness.catalog import keywords, load_op, names
from sparsebench.harness.inputs.bits import fill
from sparsebench.results.record import Problem

OPS = names("harness.ops")
SIZES = {"m": 3, "n": 6, "k": 5}
DECODER = {"hidden": 6, "heads": 4, "kv_heads": 2, "head_dim": 4, "intermediate": 7, "vocab": 5}
SIZES |= DECODER | {"layers": 2, "context": 5, "caches": 1}
ACTIVATIONS = ["silu", "relu", "relu2"]


def drawn(op_name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    found, op = {}, load_op(op_name)
    for name in op.arguments:
        operand = op.operands[name]
        found[name] = torch.empty([op.sizes(SIZES)[size] for size in operand.shape])
        fill(found[name], 0, name)
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def pinned(op_name: str, function: Any, dtype: str = "bf16") -> Any:
    """Set what a function takes besides operands to defaults of the op's fields, and a dtype."""
    fields = load_op(op_name).fields.model_fields
    defaults = {name: fields[name].default for name in fields} | {"dtype": dtype}
    return partial(function, **{name: defaults[name] for name in keywords(function)})


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


@pytest.mark.parametrize("name", OPS)
def test_sizes_of_operands_are_fields(name: str) -> None:
    op = load_op(name)
    sizes = {size for operand in op.operands.values() for size in operand.shape}
    fields = op.fields.model_fields.keys()
    assert sizes <= fields | (op.sizes(SIZES).keys() - SIZES.keys())
    assert name == "decoder" or sizes <= fields
    assert {"dtype", "pattern", "sparsity", "block"} <= op.fields.model_fields.keys()
    assert op.weights
    assert op.activations


@pytest.mark.parametrize("name", OPS)
def test_definition_and_spread_take_the_operands_in_order_and_fields_by_name(name: str) -> None:
    op = load_op(name)
    for function in (op.definition, op.spread, op.depth):
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == op.arguments
        assert keywords(function) <= op.fields.model_fields.keys()


@pytest.mark.parametrize("name", OPS)
def test_a_definition_keeps_the_dtype_and_a_spread_the_shape(name: str) -> None:
    op = load_op(name)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        out = pinned(name, op.definition)(**drawn(name, dtype))
        assert out.dtype == dtype
        assert pinned(name, op.spread)(**drawn(name, dtype)).shape == out.shape
        rows = op.operands[op.pattern].shape[0] if op.pattern else "m"
        parts = op.parts(Problem(name, dict(SIZES)))
        assert out.shape[0] == (sum(parts) if parts else SIZES[rows])


@pytest.mark.parametrize("name", OPS)
def test_a_definition_that_takes_fp8_gives_bf16_of_sums_in_fp32(name: str) -> None:
    op = load_op(name)
    if "fp8" in get_args(op.fields.model_fields["dtype"].annotation):
        operands = {n: t.to(op.operands[n].dtypes["fp8"]) for n, t in drawn(name).items()}
        single = {name: tensor.float() for name, tensor in operands.items()}
        run = pinned(name, op.definition, "fp8")
        assert torch.equal(run(**operands), run(**single).bfloat16())


@pytest.mark.parametrize("name", ["linear_dgrad", "linear_wgrad", "mlp"])
def test_gradients_and_layers_without_a_gate_have_no_fp8(name: str) -> None:
    assert "fp8" not in get_args(load_op(name).fields.model_fields["dtype"].annotation)


@pytest.mark.parametrize("name", OPS)
def test_a_spread_is_finite_not_negative_and_zero_only_without_terms(name: str) -> None:
    op, operands = load_op(name), drawn(name)
    found = pinned(name, op.spread)(**operands)
    assert found.isfinite().all()
    off = pinned(name, op.definition)(**operands) == 0  # a unit that no token has on
    assert (found > 0)[~off].all()
    assert not off.all()
    empty = {name: torch.zeros_like(tensor) for name, tensor in operands.items()}
    assert not pinned(name, op.spread)(**empty).any()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_errors_are_of_the_size_of_the_spread(name: str, dtype: torch.dtype) -> None:
    op = load_op(name)
    rounded = drawn(name, dtype)
    exact = {name: tensor.double() for name, tensor in rounded.items()}
    run, spread = pinned(name, op.definition), pinned(name, op.spread)
    ratio = (run(**rounded).double() - run(**exact)).abs() / spread(**exact)
    assert 0 < float(ratio.nan_to_num(0).max()) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", [name for name in OPS if name != "decoder"])
def test_dense_work_is_the_most_and_grows_with_the_non_zeros(name: str) -> None:
    op = load_op(name)
    problem = Problem(name, {**SIZES, "dtype": "bf16"})
    full = {w: SIZES[op.operands[w].shape[0]] * SIZES[op.operands[w].shape[1]] for w in op.weights}
    none = dict.fromkeys(full, 0)
    assert op.flops(problem, full) > op.flops(problem, none) == 0
    assert op.fewest_bytes(problem, full, 2) - op.fewest_bytes(problem, none, 2) == 2 * sum(
        full.values()
    )


def test_linear_is_a_sum_of_products() -> None:
    w, x = drawn("linear").values()
    y = load_op("linear").definition(w.float(), x.float())
    expected = [[sum(a * b for a, b in zip(t, o, strict=True)) for o in w] for t in x]
    assert torch.allclose(y.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_ffn_is_a_gated_sum_of_products(activation: str) -> None:
    operands = drawn("ffn")
    expected = loops(activation, *(tensor.numpy() for tensor in operands.values()))
    single = {name: tensor.float() for name, tensor in operands.items()}
    y = load_op("ffn").definition(**single, activation=activation)
    assert np.allclose(y.double().numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_spread_of_ffn_is_that_of_random_rounding(activation: str) -> None:
    """Jolt every term of every product, which is what a spread stands for."""
    op, exact = load_op("ffn"), drawn("ffn")
    torch.manual_seed(0)
    errors = []
    reference = op.definition(**exact, activation=activation)
    for _ in range(400):
        jolted = {name: t * (1 + 1e-6 * torch.randn_like(t)) for name, t in exact.items()}
        jolted["x"] = exact["x"]
        errors.append(op.definition(**jolted, activation=activation) - reference)
    found = torch.stack(errors).std(0) / 1e-6
    ratio = found / op.spread(**exact, activation=activation)
    assert float(ratio.min()) > 0.2  # relu's slope counts where it is off, too
    assert float(ratio.max()) < 1.2


def test_the_work_of_linear_by_hand() -> None:
    op, problem = load_op("linear"), Problem("linear", {**SIZES, "dtype": "bf16"})
    assert op.flops(problem, {"w": 7}) == 2 * 3 * 7
    assert op.fewest_bytes(problem, {"w": 7}, 2) == 2 * (7 + 3 * 5 + 3 * 6)
    fp8 = Problem("linear", {**SIZES, "dtype": "fp8"})
    assert op.fewest_bytes(fp8, {"w": 7}, 1) == 7 + 3 * 5 + 2 * 3 * 6


def test_the_work_of_decoder_by_hand() -> None:
    op, fields = load_op("decoder"), {**SIZES, "layers": 3, "dtype": "bf16"}
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
    for function in (op.definition, op.spread):
        y = function(wg, wu, wd, x, activation="relu2", dtype="fp8")
        assert torch.equal(y, function(wg / 8, wu / 8, wd / 4, x, activation="relu2"))
