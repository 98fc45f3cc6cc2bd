"""Products of the block-sparse Triton kernels, in Triton's interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import DTYPES, Launch, Operands
from sparsebench.kernels.bsr import bsr_triton, bsr_triton_dgrad, bsr_triton_wgrad
from sparsebench.results.record import Problem
from tests.kernels.bsr.examples import assert_right_gradient
from tests.tools.marks import sampled

pytestmark = pytest.mark.interpreted

EPSILON = {torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # half an ulp of 1

# m, n, k, block, dtype
ODD = [
    (1, 1, 1, [8, 8], "fp16"),
    (3, 45, 53, [1, 1], "fp16"),
    (17, 41, 37, [8, 8], "fp32"),
    (33, 45, 53, [10, 10], "fp16"),
    (5, 70, 90, [48, 24], "fp16"),
    (17, 300, 430, [200, 200], "fp16"),
    (9, 520, 514, [512, 512], "fp16"),
    (20, 90, 100, [16, 32], "fp32"),
]
WHOLE = [
    (20, 80, 96, [16, 16], "fp16"),
    (70, 72, 104, [16, 32], "fp32"),
    (130, 144, 200, [64, 128], "fp16"),
    (66, 264, 256, [256, 64], "fp16"),
]
PATHS = [(*problem, path) for problem in WHOLE for path in ("tma", "pointers")]
SAMPLE = 3, 8, 9  # of ODD and PATHS: blocks of 10, and blocks of 16 by both paths
WIDE = [
    (130, 144, 200, [64, 128], "fp16"),
    (66, 264, 256, [256, 64], "fp16"),
    (600, 128, 192, [64, 64], "fp16"),
    (20, 72, 188, [16, 64], "fp32"),
]
STRIPS = [(700, 40, 90, [8, 8], "fp16"), (600, 70, 260, [16, 16], "fp16"), *ODD, *WHOLE, *WIDE]
CORES = 4  # multiprocessors: few enough that hundreds of tokens are split


def weights(n: int, k: int, block: list[int], dtype: str) -> Tensor:
    """Return W with half of its blocks, none in the second block row or the last block column."""
    r, c = block
    kept = torch.rand(-(-n // r), -(-k // c)) < 0.5
    kept[0] = True
    kept[1:2] = False
    kept[:, 1:] &= torch.arange(1, kept.shape[1]) < kept.shape[1] - 1
    mask = kept.repeat_interleave(r, 0).repeat_interleave(c, 1)[:n, :k]
    return torch.where(mask, torch.randn(n, k), 0.0).to(DTYPES[dtype])


def assert_exact(y: Tensor, x: Tensor, w: Tensor) -> None:
    """Compare Y with fp64: allow one rounding to its dtype, and fp32 sums of the largest terms."""
    x64, w64 = x.double(), w.double()
    expected, sizes = x64 @ w64.T, x64.abs() @ w64.abs().T
    sums = len(w.T) * EPSILON[torch.float32] * sizes
    assert ((y - expected).abs() <= sums + EPSILON[y.dtype] * expected.abs() + 2.0**-25).all()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def run_twice(launch: Launch) -> Tensor:
    """Poison the first output, so that the second call must write every element."""
    launch().fill_(float("nan"))
    return launch()


def bsr_runs(x: Tensor, w: Tensor, block: list[int], path: str) -> list[Launch]:
    stored = Bsr.from_dense(w, block=block)
    configs = bsr_triton.configurations(len(x), stored.block, w.element_size(), path)
    return [Launch(bsr_triton.launch(x, stored, config)) for config in configs]


@pytest.mark.parametrize(
    ("m", "n", "k", "block", "dtype", "path"),
    sampled([(*odd, "pointers") for odd in ODD] + PATHS, *SAMPLE),
)
def test_bsr_products_are_right_in_every_configuration(m, n, k, block, dtype, path):
    w, x = weights(n, k, block, dtype), torch.randn(m, k).to(DTYPES[dtype])
    for launch in bsr_runs(x, w, block, path):
        assert_exact(run_twice(launch), x, w)


@pytest.mark.parametrize(
    ("m", "n", "k", "block", "dtype", "path"),
    sampled([(*odd, "pointers") for odd in ODD] + PATHS, *SAMPLE),
)
def test_input_gradients_are_right_in_every_configuration(m, n, k, block, dtype, path):
    w, dy = weights(n, k, block, dtype), torch.randn(m, n).to(DTYPES[dtype])
    for launch in dgrad_runs(dy, w, block, path):
        assert_exact(run_twice(launch), dy, w.T)


@pytest.mark.parametrize(
    ("m", "n", "k", "block", "dtype", "path"),
    sampled(
        [(*strip, "pointers") for strip in STRIPS] + [(*wide, "tma") for wide in WIDE], 5, 10, -1
    ),
)
def test_weight_gradients_are_right_in_every_configuration(m, n, k, block, dtype, path):
    pattern = Bsr.from_dense(weights(n, k, block, dtype), block=block)
    dy, x = (torch.randn(m, side).to(DTYPES[dtype]) for side in (n, k))
    for launch in wgrad_runs(dy, x, pattern, path):
        assert_right_gradient(run_twice(launch), dy, x, pattern)


def dgrad_runs(dy: Tensor, w: Tensor, block: list[int], path: str) -> list[Launch]:
    stored = Bsr.from_dense(w, block=block)
    size = len(dy), stored.block, w.element_size(), path
    configs = bsr_triton_dgrad.configurations(*size)
    return [Launch(bsr_triton_dgrad.launch(dy, stored, config)) for config in configs]


def wgrad_runs(dy: Tensor, x: Tensor, pattern: Bsr, path: str) -> list[Launch]:
    sizes = len(x), pattern.block, len(pattern.columns), x.element_size(), path, CORES
    configs = bsr_triton_wgrad.configurations(*sizes)
    return [Launch(bsr_triton_wgrad.launch(dy, x, pattern, config)) for config in configs]


@pytest.mark.parametrize(
    ("block", "path"), [([10, 10], "pointers"), ([16, 16], "pointers"), ([16, 16], "tma")]
)
def test_nan_in_a_column_that_no_block_touches_does_not_reach_y(block, path):
    w, x = weights(40, 96, block, "fp32"), torch.randn(3, 96)
    touched = Bsr.from_dense(w, block=block).to_dense().ne(0).any(0)
    poisoned = torch.where(touched, x, float("nan"))
    assert not touched.all()
    for launch in bsr_runs(poisoned, w, block, path):
        assert_exact(launch(), x, w)


@pytest.mark.parametrize(
    ("block", "path"), [([10, 10], "pointers"), ([8, 32], "pointers"), ([16, 16], "tma")]
)
def test_nan_in_a_row_without_blocks_does_not_reach_dx(block, path):
    w, dy = weights(40, 96, block, "fp32"), torch.randn(3, 40)
    poisoned = torch.where(w.ne(0).any(1), dy, float("nan"))
    assert poisoned.isnan().any()
    for launch in dgrad_runs(poisoned, w, block, path):
        assert_exact(launch(), dy, w.T)


@pytest.mark.parametrize(("block", "path"), [(10, "pointers"), (16, "pointers"), (64, "tma")])
def test_nan_does_not_reach_the_gradient_of_blocks_that_it_does_not_touch(block, path):
    n, k = 3 * block - 4, 5 * block - 4
    w = weights(n, k, [block, block], "fp32")
    dy, x, pattern = torch.randn(9, n), torch.randn(9, k), Bsr.from_dense(w, block=block)
    dy_bad = torch.where(w.ne(0).any(1), dy, float("nan"))
    x_bad = torch.where(w.ne(0).any(0), x, float("nan"))
    assert dy_bad.isnan().any()
    assert x_bad.isnan().any()
    for launch in wgrad_runs(dy_bad, x_bad, pattern, path):
        assert_right_gradient(launch(), dy, x, pattern)


@pytest.mark.parametrize(("block", "path"), [(10, "pointers"), (64, "tma")])
def test_the_part_of_a_block_outside_w_is_zero_for_any_operands(block, path):
    pattern = Bsr.from_dense(torch.ones(block + 4, block + 8), block=block)
    dy, x = torch.full((3, block + 4), float("nan")), torch.ones(3, block + 8)
    for launch in wgrad_runs(dy, x, pattern, path):
        found = replace(pattern, values=run_twice(launch))
        assert found.to_dense().isnan().all()
        assert found.values.nan_to_num(1.0).sum() == (block + 4) * (block + 8)


def test_split_tokens_give_the_same_bits_at_every_call():
    dy, x = torch.randn(700, 32).half(), torch.randn(700, 32).half()
    pattern = Bsr.from_dense(torch.ones(32, 32).half(), block=16)
    split = [run for run in wgrad_runs(dy, x, pattern, "pointers") if run.run.before]
    assert split
    for launch in split:
        assert torch.equal(launch().clone(), launch())


@pytest.mark.parametrize("path", ["tma", "pointers"])
def test_gradients_without_blocks_are_zero_or_empty(path):
    w = torch.zeros(128, 64).half()
    dy, x, pattern = torch.randn(3, 128).half(), torch.randn(3, 64).half(), Bsr.from_dense(w)
    pattern = replace(pattern, values=w.new_zeros(0, 64, 64), offsets=pattern.offsets[:3])
    for launch in dgrad_runs(dy, w, [64, 64], path):
        assert run_twice(launch).eq(0).all()
    for launch in wgrad_runs(dy, x, pattern, path):
        assert launch().shape == (0, 64, 64)


@pytest.mark.parametrize("path", ["tma", "pointers"])
def test_weights_without_a_block_give_zeros(path):
    for launch in bsr_runs(torch.randn(3, 32).half(), torch.zeros(48, 32).half(), [16, 16], path):
        assert run_twice(launch).eq(0).all()


@pytest.mark.parametrize("path", ["tma", None])
def test_activations_may_change_after_preparing(path):
    w, x = weights(48, 64, [16, 16], "fp16"), torch.zeros(3, 64).half()
    problem = Problem("linear", {"dtype": "fp16"})
    weight = {"w": Bsr.from_dense(w, block=16)}
    launch = bsr_triton.prepare(Operands(problem, weight, {"x": x}, torch.mm), path=path)
    x.copy_(torch.randn(3, 64))
    assert launch.choice["path"] == (path or "pointers")
    assert_exact(launch(), x, w)


def operands_of(op: str, dtype: str) -> Operands:
    w, dy, x = weights(64, 128, [64, 64], dtype), torch.zeros(3, 64), torch.zeros(3, 128)
    given = {"dy": dy.to(w.dtype), "x": x.to(w.dtype)}
    if op == "linear_dgrad":
        del given["x"]
    stored, problem = Bsr.from_dense(w, block=64), Problem(op, {"dtype": dtype})
    return Operands(problem, {"w": stored}, given, torch.mm, pattern=stored)


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "tf32"])
@pytest.mark.parametrize("path", ["tma", None])
@pytest.mark.parametrize("kernel", [bsr_triton_dgrad, bsr_triton_wgrad])
def test_prepared_gradients_use_later_activations_and_can_be_pinned(kernel: Any, path, dtype):
    operands = operands_of(kernel.KERNEL.op, dtype)
    launch = kernel.prepare(operands, path=path)
    for activation in operands.activations.values():
        activation.copy_(torch.randn(activation.shape))
    w, dy = operands.weights["w"], operands.activations["dy"]
    out = launch()
    if kernel is bsr_triton_dgrad:
        assert_exact(out, dy, w.to_dense().T)
    else:
        assert_right_gradient(out.values, dy, operands.activations["x"], w)
    assert launch.choice["path"] == (path or "pointers")
    assert launch.choice["precision"] == ("tf32" if dtype == "tf32" else "ieee")
    pinned = kernel.prepare(replace(operands, pinned=launch.choice), path=path)
    assert pinned.choice == launch.choice


@pytest.mark.parametrize("path", ["tma", None])
def test_tf32_problems_multiply_in_tf32(path):
    w, x = weights(48, 64, [16, 16], "tf32"), torch.randn(3, 64)
    problem = Problem("linear", {"dtype": "tf32"})
    weight = {"w": Bsr.from_dense(w, block=16)}
    launch = bsr_triton.prepare(Operands(problem, weight, {"x": x}, torch.mm), path=path)
    assert launch.choice["precision"] == "tf32"
    assert_exact(launch(), x, w)  # the interpreter multiplies exactly
