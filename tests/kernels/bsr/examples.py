"""Weights and activations for tests of the BSR kernels, and checks of their results."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.harness.bench.correctness import FP8, FP32, TF32, Expected, check
from sparsebench.kernels._common.operator import bucket
from sparsebench.kernels._kernel import DTYPES, OUTPUTS
from sparsebench.kernels.bsr._call import BsrCall

Shape = tuple[int, int, int, tuple[int, int] | int, float]
"""m, n, k, block, part of the blocks that is stored."""


def example(shape: Shape, device: str = "cpu", dtype: str = "fp32") -> tuple[Bsr, Tensor, Tensor]:
    """Return W, X [m, k] and dY [m, n].

    If a tenth of W or more is stored, its first row of blocks is full, and its second one empty.
    """
    m, n, k, block, density = shape
    r, c = (block, block) if isinstance(block, int) else block
    generator = torch.Generator().manual_seed(2)
    rows, columns = -(-n // r), -(-k // c)
    there = torch.randperm(rows * columns, generator=generator) < density * rows * columns
    there = there.view(rows, columns)
    if 0.1 <= density < 1 and rows > 2:
        there[0], there[1] = True, False
    dense = torch.randn(rows * r, columns * c, generator=generator)
    dense = dense.where(there.repeat_interleave(r, 0).repeat_interleave(c, 1), 0.0)
    w = Bsr.from_dense(dense[:n, :k].to(device, DTYPES[dtype]).contiguous(), block=[r, c])
    x, dy = (torch.randn(m, size, generator=generator) for size in (k, n))
    return w, x.to(device, DTYPES[dtype]), dy.to(device, DTYPES[dtype])


def call_of(op: Any, w: Bsr, m: int, dtype: str) -> BsrCall:
    """Return the call of a frozen weight in the bucket of m tokens."""
    kind, tf32 = DTYPES[dtype], dtype == "tf32"
    short = op.removeprefix("linear_")
    return BsrCall(short, bucket(m), w.shape, w.block, kind, live=False, tf32=tf32)


def on_gpu(shape: Shape, dtype: str, transposed: bool) -> tuple[Bsr, Tensor]:
    """Return W and X, or dY if transposed, on the GPU."""
    w, x, dy = example(shape, "cuda", dtype)
    return w, dy if transposed else x


def assert_right(
    y: Tensor,
    x: Tensor,
    w: Bsr,
    transposed: bool,
    what: Any,
    tf32: bool = False,
) -> None:
    """Check X @ W.T, or X @ W if transposed, as the harness does."""
    dense, left = replace(w, values=w.values.double()).to_dense(), x.double()
    right = dense if transposed else dense.T
    spread = (left.square() @ right.square()).sqrt()
    fp8 = x.dtype == DTYPES["fp8"]
    dtype, sums = (OUTPUTS["fp8"], FP8) if fp8 else (x.dtype, FP32)
    products = TF32 if tf32 else 0.0
    sizes = left @ right, spread, dtype, max(w.shape)
    expected = Expected(*sizes, sums=sums, products=products)
    assert (reason := check(y, expected).reason) is None, f"{what}: {reason}"


def assert_right_gradient(
    values: Tensor, dy: Tensor, x: Tensor, pattern: Bsr, what: Any = "", tf32: bool = False
) -> None:
    """Check dW's blocks as the harness does: outside W, a block is zero."""
    dy, x = dy.double(), x.double()
    spread = (dy.square().T @ x.square()).sqrt()
    sizes = dy.T @ x, spread, values.dtype, len(x)
    expected = Expected(*sizes, products=TF32 if tf32 else 0.0)
    result = check(replace(pattern, values=values), expected, pattern)
    assert result.reason is None, f"{what}: {result.reason}"
