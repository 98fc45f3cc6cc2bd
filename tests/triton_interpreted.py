"""Products of the Triton kernels in Triton's interpreter: run by test_triton_kernels.

Not collected by itself: TRITON_INTERPRET=1 must be set before triton is imported, and then no
kernel of the process can be compiled.
"""

import pytest
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.formats.dense import Dense
from sparsebench.kernels import bsr_triton, dense_triton
from sparsebench.kernels._kernel import DTYPES, Launch, Operands
from sparsebench.results.record import Problem

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


def weights(n: int, k: int, block: list[int], dtype: str) -> Tensor:
    """Half of the blocks, none in the second block row, none in the last block column."""
    r, c = block
    kept = torch.rand(-(-n // r), -(-k // c)) < 0.5
    kept[0] = True
    kept[1:2] = False
    kept[:, 1:] &= torch.arange(1, kept.shape[1]) < kept.shape[1] - 1
    mask = kept.repeat_interleave(r, 0).repeat_interleave(c, 1)[:n, :k]
    return torch.where(mask, torch.randn(n, k), 0.0).to(DTYPES[dtype])


def assert_exact(y: Tensor, x: Tensor, w: Tensor) -> None:
    """Hold Y against fp64: one rounding to its dtype, fp32 sums over the largest terms."""
    x64, w64 = x.double(), w.double()
    expected, sizes = x64 @ w64.T, x64.abs() @ w64.abs().T
    sums = len(w.T) * EPSILON[torch.float32] * sizes
    assert ((y - expected).abs() <= sums + EPSILON[y.dtype] * expected.abs() + 2.0**-25).all()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def run_twice(launch: Launch) -> Tensor:
    """Poison the first output, so that what a second call leaves out is seen."""
    launch().fill_(float("nan"))
    return launch()


def bsr_runs(x: Tensor, w: Tensor, block: list[int], path: str) -> list[Launch]:
    stored = Bsr.from_dense(w, block=block)
    configs = bsr_triton.configurations(len(x), stored.block, w.element_size(), path)
    return [Launch(bsr_triton.launch(x, stored, config)) for config in configs]


@pytest.mark.parametrize(
    ("m", "n", "k", "block", "dtype", "path"), [(*odd, "pointers") for odd in ODD] + PATHS
)
def test_bsr_products_are_right_in_every_configuration(m, n, k, block, dtype, path):
    w, x = weights(n, k, block, dtype), torch.randn(m, k).to(DTYPES[dtype])
    for launch in bsr_runs(x, w, block, path):
        assert_exact(run_twice(launch), x, w)


@pytest.mark.parametrize(("m", "n", "k", "block", "dtype", "path"), PATHS)
def test_dense_products_are_right_in_every_configuration(m, n, k, block, dtype, path):
    w, x = torch.randn(n, k).to(DTYPES[dtype]), torch.randn(m, k).to(DTYPES[dtype])
    for config in dense_triton.configurations(m, w.element_size(), path):
        assert_exact(run_twice(Launch(dense_triton.launch(x, w, config))), x, w)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 45, 53), (70, 131, 67)])
def test_dense_products_of_any_shape_are_right(m, n, k):
    w, x = torch.randn(n, k).half(), torch.randn(m, k).half()
    for config in dense_triton.configurations(m, 2, "pointers"):
        assert_exact(run_twice(Launch(dense_triton.launch(x, w, config))), x, w)


@pytest.mark.parametrize(
    ("block", "path"), [([10, 10], "pointers"), ([16, 16], "pointers"), ([16, 16], "tma")]
)
def test_nan_in_a_column_that_no_block_touches_stays_out(block, path):
    w, x = weights(40, 96, block, "fp32"), torch.randn(3, 96)
    touched = Bsr.from_dense(w, block=block).to_dense().ne(0).any(0)
    poisoned = torch.where(touched, x, float("nan"))
    assert not touched.all()
    for launch in bsr_runs(poisoned, w, block, path):
        assert_exact(launch(), x, w)


@pytest.mark.parametrize("path", ["tma", "pointers"])
def test_weights_without_a_block_give_zeros(path):
    for launch in bsr_runs(torch.randn(3, 32).half(), torch.zeros(48, 32).half(), [16, 16], path):
        assert run_twice(launch).eq(0).all()


@pytest.mark.parametrize("path", ["tma", None])
def test_activations_may_change_after_preparing(path):
    w, x = weights(48, 64, [16, 16], "fp16"), torch.zeros(3, 64).half()
    problem = Problem("linear", {"dtype": "fp16"})
    for kernel, stored in (
        (bsr_triton, Bsr.from_dense(w, block=16)),
        (dense_triton, Dense((48, 64), w)),
    ):
        launch = kernel.prepare(Operands(problem, {"w": stored}, {"x": x}, torch.mm), path=path)
        x.copy_(torch.randn(3, 64))
        assert launch.choice["path"] == (path or "pointers")
        assert_exact(launch(), x, w)
