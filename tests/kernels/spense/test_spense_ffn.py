"""The op ffn with 2:4 hybrid weights: gate and up as one matrix, activations, whole layers."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.harness.bench import contest
from sparsebench.harness.plan.suite import read
from sparsebench.kernels._common import elementwise
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.kernels.nn import _spense_op as layers
from sparsebench.kernels.spense import spense_ffn, spense_wgmma
from sparsebench.results.record import Contender, Status
from tests.compiling.nvcc import hopper
from tests.kernels.layers import assert_correct, assert_right, given, problem_of
from tests.kernels.spense.examples import pruned

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_gate_and_up_with_different_layouts_are_not_joined():
    w = torch.zeros(256, 256, dtype=BF16)
    half, whole = (Spense.from_dense(w, dense_fraction=fraction) for fraction in (0.5, 0.0))
    with pytest.raises(Unsupported, match="sparse"):
        spense_ffn.joined(half, whole)
    columns = Spense.from_dense(w, dense_fraction=0.5, split="columns")
    with pytest.raises(Unsupported, match="split"):
        spense_ffn.joined(columns, columns)
    odd = Spense.from_dense(w[:100])
    with pytest.raises(Unsupported, match="100"):
        spense_ffn.joined(odd, odd)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("h", "fraction"), [(328, 0.5), (328, 0.0), (200, 1.0), (72, 0.5)])
def test_gate_and_up_are_joined_by_rows_of_eight_and_parted(h, fraction, dtype):
    of = {"dense_fraction": fraction, "split": "rows"}
    rows = int(h * (1 - fraction))
    gate, up = ((pruned(h, 400, rows, 400, FP16) + 0.0).to(dtype) for _ in range(2))
    packed = [Spense.from_dense(w, **of) for w in (gate, up)]
    both = spense_ffn.joined(*packed)
    rows = both.to_dense().float()
    assert torch.equal(rows[:24], torch.cat((gate.float()[:8], up.float()[:8], gate.float()[8:16])))
    for result, expected in zip(spense_ffn.parted(rows), (gate, up), strict=True):
        assert torch.equal(result, expected.float())
    assert both.sparse_shape == (2 * packed[0].sparse_shape[0], 400)


def test_a_suite_gives_down_another_split():
    for plan in read("spense-ffn").contests:
        (hybrid,) = (c for c in plan.contenders if c.kernel == "spense_ffn")
        assert hybrid.params_of("wu") == {"dense_fraction": 0.5, "split": "rows"}
        assert hybrid.params_of("wd") == {"dense_fraction": 0.5, "split": "columns"}


def test_down_is_converted_by_its_own_split():
    params = {"dense_fraction": 0.5, "split": "rows", "wd.split": "columns"}
    contender = Contender("spense", "reference", params)
    (row,), _ = contest.run(
        problem_of("ffn", m=4, n=512, k=128, dtype="bf16", pattern="two_four", sparsity=0.5),
        [contender],
        torch.device("cpu"),
        None,
    )
    assert row.status is Status.OK
    assert row.stored_bytes == 3 * 512 * 128 * (2 + 9 / 8) / 2  # with rows, down would be dense


ACT = {**layers.ACTIVATIONS, "relu2": lambda z: z.relu().square()}


def assert_activates(m: int, n: int, activation: str, dtype: Any, device: str) -> None:
    """Compare the kernel with fp64, to two units in the last place; NaN stays in its element."""
    products = 3 * torch.randn(m, 2 * n, device=device).to(dtype)
    products[0, 0] = -300  # its exp is infinite
    products[-1, 1] = float("nan")
    program = elementwise.hidden(products, activation)
    program.out.fill_(7)
    gate, up = products.double().chunk(2, 1)
    right = (ACT[activation](gate) * up).to(dtype)
    with numpy.errstate(over="ignore"):  # in the interpreter
        torch.testing.assert_close(program(), right, rtol=2**-7, atol=1e-6, equal_nan=True)


@pytest.mark.interpreted
@pytest.mark.parametrize("activation", [*ACT])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (19, 328), (5, 512), (33, 200)])
def test_interpreted_activations_are_correct(m, n, activation):
    assert_activates(m, n, activation, FP16, "cpu")


def ffn(
    m: int, n: int, k: int, dtype: str, activation: str, fraction: float, device: str = "cuda"
) -> Operands:
    fields = {"m": m, "n": n, "k": k, "dtype": dtype, "activation": activation}
    problem = problem_of("ffn", **fields, pattern="two_four", sparsity=0.5)
    pack = partial(Spense.from_dense, dense_fraction=fraction)
    formats = dict.fromkeys(("wg", "wu"), pack) | {"wd": partial(pack, split="columns")}
    return given(problem, torch.device(device), formats)


def in_torch(operands: Operands, activation: str | None, scales: Any, *, tuned: Any) -> Launch:
    """A stand-in for the prepare of spense_wgmma."""
    w, x = operands.weights["w"], operands.activations["x"]
    y, dense = x.new_empty(len(x), w.shape[0] // (2 if activation else 1)), w.to_dense()

    def run() -> Tensor:
        if activation is None:
            return y.copy_(x @ dense.T)
        gate, up = spense_ffn.parted(dense @ x.T)
        return y.copy_((ACT[activation](gate) * up).T)

    return Launch(run, {"by": operands.pinned or list(w.shape)}, "code")


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_feed_forward_layers_join_gate_and_up(fraction, activation, monkeypatch):
    monkeypatch.setattr(spense_wgmma, "prepare", in_torch)
    inputs = ffn(19, 392, 72, "fp16", activation, fraction, "cpu")
    launch = spense_ffn.prepare(inputs)
    assert_right(launch, inputs)
    assert launch.choice == {"gate_up": {"by": [2 * 392, 72]}, "down": {"by": [72, 392]}}
    again = spense_ffn.prepare(replace(inputs, pinned=launch.choice))
    assert again.choice == {name: {"by": choice} for name, choice in launch.choice.items()}


@pytest.mark.parametrize("activation", [*ACT])
def test_the_activation_compiles_to_loads_of_16_bytes(activation, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = elementwise._activate
    constants = {
        "TOKENS": 16,
        "FEATURES": elementwise.FEATURES,
        "ACTIVATION": activation,
        "SCALE": 1.0,
    }
    kinds = dict.fromkeys(function.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    kinds |= {"products": "*bf16", "h": "*bf16"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 3)}  # all but m
    source = ASTSource(function, kinds, constants, aligned)
    ptx = triton.compile(source, GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert ptx.count("ld.global.v4") == ptx.count("ld.global") > 0
    assert ptx.count("st.global.v4") == ptx.count("st.global") > 0


@hopper
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("activation", ["silu", "relu", "relu2"])
def test_a_feed_forward_layer_is_correct_on_a_gpu(activation, dtype):
    for m, fraction in ((1, 0.5), (33, 0.0), (300, 0.25), (2000, 0.5), (17, 1.0)):
        inputs = ffn(m, 1352, 520, dtype, activation, fraction)
        launch = spense_ffn.prepare(inputs)
        assert_right(launch, inputs)
        again = spense_ffn.prepare(replace(inputs, pinned=launch.choice))
        assert (again.choice, again.code) == (launch.choice, launch.code)
        assert_correct(again(), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_activations_are_correct_on_a_gpu(dtype):
    for activation in ACT:
        for m, n in ((1, 8), (19, 328), (5, 512), (3000, 1352)):
            assert_activates(m, n, activation, dtype, "cuda")
