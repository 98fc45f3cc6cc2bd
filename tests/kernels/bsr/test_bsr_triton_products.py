"""Products of the block-sparse Triton kernels, in Triton's interpreter."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import DTYPES, Launch
from sparsebench.kernels.bsr import bsr_triton, bsr_triton_dgrad, bsr_triton_wgrad
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
PRODUCTS = bsr_triton, bsr_triton_dgrad
CORES = 4  # multiprocessors: few enough that hundreds of tokens are split


def weights(n: int, k: int, block: list[int], dtype: str) -> Tensor:
    """Return W with half of its blocks, none in the second block row or the last block column."""
    r, c = block
    cells = torch.rand(-(-n // r), -(-k // c)) < 0.5
    cells[0] = True
    cells[1:2] = False
    cells[:, 1:] &= torch.arange(1, cells.shape[1]) < cells.shape[1] - 1
    mask = cells.repeat_interleave(r, 0).repeat_interleave(c, 1)[:n, :k]
    return torch.where(mask, torch.randn(n, k), 0.0).to(DTYPES[dtype])


def assert_exact(y: Tensor, x: Tensor, w: Tensor) -> None:
    """Compare Y with fp64: allow one rounding to its dtype, and fp32 sums of the largest terms."""
    x64, w64 = x.double(), w.double()
    expected, sizes = x64 @ w64.T, x64.abs() @ w64.abs().T
    sums = len(w.T) * EPSILON[torch.float32] * sizes
    assert ((y - expected).abs() <= sums + EPSILON[y.dtype] * expected.abs() + 2.0**-25).all()


def run_twice(launch: Launch) -> Tensor:
    """Poison the first output, so that the second call must write every element."""
    launch().fill_(float("nan"))
    return launch()


def product_runs(of: ModuleType, a: Tensor, w: Bsr, path: str) -> list[Launch]:
    """Return the launches of Y = X W^T, or of dX = dY W, in every configuration."""
    configs = of.configurations(len(a), w.block, w.values.element_size(), path)
    return [Launch(of.launch(a, w, config)) for config in configs]


def wgrad_runs(dy: Tensor, x: Tensor, pattern: Bsr, path: str) -> list[Launch]:
    sizes = len(x), pattern.block, len(pattern.columns), x.element_size(), path, CORES
    configs = bsr_triton_wgrad.configurations(*sizes)
    return [Launch(bsr_triton_wgrad.launch(dy, x, pattern, config)) for config in configs]


@pytest.mark.parametrize("kernel", PRODUCTS)
@pytest.mark.parametrize(
    ("m", "n", "k", "block", "dtype", "path"),
    sampled([(*odd, "pointers") for odd in ODD] + PATHS, *SAMPLE),
)
def test_products_are_right_in_every_configuration(m, n, k, block, dtype, path, kernel):
    w = weights(n, k, block, dtype)
    right = w if kernel is bsr_triton else w.T
    a = torch.randn(m, right.shape[1]).to(DTYPES[dtype])
    for launch in product_runs(kernel, a, Bsr.from_dense(w, block=block), path):
        assert_exact(run_twice(launch), a, right)


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


@pytest.mark.parametrize("kernel", PRODUCTS)
@pytest.mark.parametrize(
    ("block", "path"), [([10, 10], "pointers"), ([8, 32], "pointers"), ([16, 16], "tma")]
)
def test_nan_that_no_block_touches_does_not_reach_the_product(block, path, kernel):
    w = weights(40, 96, block, "fp32")
    right = w if kernel is bsr_triton else w.T
    a, stored = torch.randn(3, right.shape[1]), Bsr.from_dense(w, block=block)
    poisoned = torch.where(right.ne(0).any(0), a, float("nan"))
    assert poisoned.isnan().any()
    for launch in product_runs(kernel, poisoned, stored, path):
        assert_exact(launch(), a, right)


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
        gradient = replace(pattern, values=run_twice(launch))
        assert gradient.to_dense().isnan().all()
        assert gradient.values.nan_to_num(1.0).sum() == (block + 4) * (block + 8)


def test_split_tokens_give_the_same_bits_at_every_call():
    dy, x = torch.randn(700, 32).half(), torch.randn(700, 32).half()
    pattern = Bsr.from_dense(torch.ones(32, 32).half(), block=16)
    split = [run for run in wgrad_runs(dy, x, pattern, "pointers") if run.run.before]
    assert split
    for launch in split:
        assert torch.equal(launch().clone(), launch())


@pytest.mark.parametrize("path", ["tma", "pointers"])
def test_without_a_block_products_are_zero_and_weight_gradients_empty(path):
    w = torch.zeros(128, 64).half()
    dy, x, pattern = torch.randn(3, 128).half(), torch.randn(3, 64).half(), Bsr.from_dense(w)
    pattern = replace(pattern, values=w.new_zeros(0, 64, 64), offsets=pattern.offsets[:3])
    for kernel, a in ((bsr_triton, x), (bsr_triton_dgrad, dy)):
        for launch in product_runs(kernel, a, pattern, path):
            assert run_twice(launch).eq(0).all()
    for launch in wgrad_runs(dy, x, pattern, path):
        assert launch().shape == (0, 64, 64)
