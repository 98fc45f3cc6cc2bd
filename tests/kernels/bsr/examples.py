"""Weights, patterns and activations for tests of the BSR kernels, and checks of their results."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.harness.bench.correctness import FP8, FP32, Expected, check
from sparsebench.kernels._common.scales import UNSCALED, Scales
from sparsebench.kernels._kernel import DTYPES, OUTPUTS

Shape = tuple[int, int, int, tuple[int, int] | int, float]
"""m, n, k, block, part of the blocks that is stored."""


def stored_blocks(shape: Shape) -> np.ndarray:
    """Return which blocks are stored: bool [block rows, block columns]."""
    _, n, k, block, density = shape
    r, c = (block, block) if isinstance(block, int) else block
    rows, columns = -(-n // r), -(-k // c)
    order = np.random.default_rng(1).permutation(rows * columns).reshape(rows, columns)
    return np.asarray(order < density * rows * columns)


def example(shape: Shape) -> tuple[Bsr, Tensor, Tensor]:
    """Return W and activations for both directions, X [m, k] and dY [m, n]."""
    m, n, k, block, _ = shape
    r, c = (block, block) if isinstance(block, int) else block
    there = torch.from_numpy(stored_blocks(shape))
    generator = torch.Generator().manual_seed(2)
    dense = torch.randn(len(there) * r, there.shape[1] * c, generator=generator)
    dense = dense.where(there.repeat_interleave(r, 0).repeat_interleave(c, 1), 0.0)
    w = Bsr.from_dense(dense[:n, :k].contiguous(), block=[r, c])
    return w, *(torch.randn(m, size, generator=generator) for size in (k, n))


def pattern_of(shape: Shape) -> Bsr:
    """Return a pattern for dW; its values are NaN."""
    there, block = stored_blocks(shape), shape[3]
    r, c = (block, block) if isinstance(block, int) else block
    offsets = np.concatenate([[0], there.sum(1).cumsum()]).astype(np.int32)
    values = torch.full((int(offsets[-1]), r, c), float("nan"))
    index = torch.from_numpy(offsets), torch.from_numpy(np.nonzero(there)[1].astype(np.int32))
    return Bsr((shape[1], shape[2]), *index, values)


def activations(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return dY [m, n] and X [m, k]."""
    m, n, k, *_ = shape
    generator = torch.Generator().manual_seed(2)
    return torch.randn(m, n, generator=generator), torch.randn(m, k, generator=generator)


def assert_lists_right(emulated: Callable[..., Any], shape: Shape, *plan: Any) -> None:
    """Check the gradient that an emulation of the device computes from the lists."""
    pattern, (dy, x) = pattern_of(shape), activations(shape)
    actual = emulated(pattern, dy, x, *plan)
    np.testing.assert_allclose(actual, pattern.sample(dy.T @ x).values, rtol=1e-4, atol=1e-3)


def moved(w: Bsr, dtype: str) -> Bsr:
    """Copy a matrix to the GPU, with values in the dtype."""
    arrays = {name: array.cuda() for name, array in w.arrays().items()}
    return replace(w, **{**arrays, "values": arrays["values"].to(DTYPES[dtype])})


def on_gpu(shape: Shape, dtype: str, transposed: bool) -> tuple[Bsr, Tensor]:
    """Return W and X, or dY if transposed, on the GPU."""
    w, x, dy = example(shape)
    return moved(w, dtype), (dy if transposed else x).cuda().to(DTYPES[dtype])


def assert_right(
    y: Tensor, x: Tensor, w: Bsr, transposed: bool, what: Any, scales: Scales = UNSCALED
) -> None:
    """Check X @ W.T, or X @ W if transposed, as the harness does."""
    dense, left = replace(w, values=w.values.double()).to_dense(), x.double()
    right = dense if transposed else dense.T
    right = right if scales.features is None else right * scales.features
    left = left if scales.tokens is None else left * scales.tokens[:, None]
    spread = (left.square() @ right.square()).sqrt()
    fp8 = x.dtype == DTYPES["fp8"]
    dtype, sums = (OUTPUTS["fp8"], FP8) if fp8 else (x.dtype, FP32)
    expected = Expected(left @ right, spread, dtype, max(w.shape), sums=sums)
    assert (reason := check(y, expected).reason) is None, f"{what}: {reason}"


def assert_right_gradient(
    values: Tensor, dy: Tensor, x: Tensor, pattern: Bsr, what: Any = ""
) -> None:
    """Check dW's blocks as the harness does: outside W, a block is zero."""
    dy, x = dy.double(), x.double()
    spread = (dy.square().T @ x.square()).sqrt()
    expected = Expected(dy.T @ x, spread, values.dtype, len(x))
    result = check(replace(pattern, values=values), expected, pattern)
    assert result.reason is None, f"{what}: {result.reason}"
