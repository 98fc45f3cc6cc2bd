"""Dense layers of several products: searched, pinned, and on redrawn activations."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsebench.formats.dense import Dense
from sparsebench.harness.bench.contest_state import bound
from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.harness.catalog import load_op
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, Launch, Operands
from sparsebench.kernels.dense import _gemm, _layers, cublas
from sparsebench.results.record import Problem

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = [(3, 40, 24), (33, 272, 136)]


@pytest.fixture(autouse=True)
def _no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():  # a build of torch without cuBLASLt refuses its name
        monkeypatch.setattr(_gemm, "preferred", lambda library: nullcontext())


def problem(op: str, sizes: tuple[int, int, int], dtype: str, activation: str) -> Problem:
    fields = dict(zip("mnk", sizes, strict=True)) | {"dtype": dtype, "activation": activation}
    defaults = load_op(op).defaults
    return Problem(op, {**defaults, **fields}, 0, defaults=defaults)


def given(asked: Problem, device: torch.device) -> Operands:
    """Draw operands, with weights that keep sums near 1."""
    op, weights, activations = load_op(asked.op), {}, {}
    for name, operand in op.operands.items():
        drawn = torch.randn([asked[size] for size in operand.shape], device=device)
        if operand.role == "weight":
            drawn = (drawn / drawn.shape[1] ** 0.5).to(DTYPES[asked["dtype"]])
            weights[name] = Dense.from_dense(drawn)
        else:
            activations[name] = drawn.to(DTYPES[asked["dtype"]])
    return Operands(asked, weights, activations, bound(op.definition, asked))


def assert_right(launch: Launch, operands: Operands) -> None:
    """Redraw the activations, poison the output, and check what the launch writes."""
    asked, op = operands.problem, load_op(operands.problem.op)
    for activation in operands.activations.values():
        activation.copy_(torch.randn(activation.shape))
    out = launch()
    assert isinstance(out, Tensor)
    out.fill_(torch.nan)
    weights = {name: w.to_dense() for name, w in operands.weights.items()}
    given = {**weights, **operands.activations}
    exact = {name: t.double() for name, t in given.items()}
    right, plain = (bound(op.definition, asked)(**each) for each in (exact, given))
    spread, dtype = bound(op.spread, asked)(**exact), OUTPUTS[asked["dtype"]]
    expected = Expected(right, spread, dtype, op.depth(**exact), plain=plain)
    verdict = check(launch(), expected)
    assert verdict.reason is None, verdict.reason


def assert_right_twice(operands: Operands, prepare: Any) -> None:
    """Check a searched launch, and one from the pinned choice."""
    launch = prepare(operands)
    assert_right(launch, operands)
    again = prepare(replace(operands, pinned=json.loads(json.dumps(launch.choice))))
    assert again.choice == launch.choice
    assert_right(again, operands)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("activation", ["relu", "relu2", "silu"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_layer_without_a_gate_is_two_products(
    dtype: str, activation: str, sizes: tuple[int, int, int]
) -> None:
    operands = given(problem("mlp", sizes, dtype, activation), CPU)
    assert_right_twice(operands, _layers.mlp)
    assert [*_layers.mlp(operands).choice] == ["up", "down"]


def test_a_choice_of_one_library_is_the_definition_by_that_library() -> None:
    operands = given(problem("mlp", SIZES[0], "fp32", "relu"), CPU)
    launch = cublas.prepare(replace(operands, pinned={"library": "cublaslt"}))
    assert launch.choice == {"library": "cublaslt"}
    assert_right(launch, operands)


def test_the_kernel_between_products_reads_and_writes_16_bytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = _layers._backward
    constants = {"TOKENS": _layers.TOKENS, "FEATURES": _layers.FEATURES, "SQUARED": False}
    kinds = dict.fromkeys(function.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    kinds |= dict.fromkeys(("products", "dh", "h", "gradients"), "*bf16")
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 3, 5)}  # all but m
    source = ASTSource(function, kinds, constants, aligned)
    ptx = triton.compile(source, GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert ptx.count("ld.global.v4") == ptx.count("ld.global") > 0
    assert ptx.count("st.global.v4") == ptx.count("st.global") > 0


@pytest.mark.interpreted
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_an_interpreted_training_step_is_six_products(
    activation: str, sizes: tuple[int, int, int]
) -> None:
    operands = given(problem("ffn_step", sizes, "fp16", activation), CPU)
    assert_right_twice(operands, _layers.ffn_step)
    names = [*_layers.ffn_step(operands).choice]
    assert names == ["gate_up", "dh", "y", "dx", "dw", "dwd"]


@pytest.mark.interpreted
def test_interpreted_gate_and_up_are_one_product_or_two() -> None:
    operands = given(problem("ffn", SIZES[0], "fp16", "silu"), CPU)
    for pair in _layers.PAIRS:
        pinned = {name: {"library": "cublas"} for name in (*pair, "down")}
        launch = _layers.ffn(replace(operands, pinned=pinned))
        assert launch.choice == pinned
        assert_right(launch, operands)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("sizes", [*SIZES, (1, 1000, 333), (1000, 2048, 512)])
@pytest.mark.parametrize("op", ["mlp", "ffn", "ffn_step"])
def test_layers_are_right_on_a_gpu(op: str, sizes: Any, activation: str, dtype: str) -> None:
    assert_right_twice(given(problem(op, sizes, dtype, activation), CUDA), cublas.prepare)
