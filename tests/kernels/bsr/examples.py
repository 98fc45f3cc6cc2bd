"""Block-sparse weights and activations that tests of bsr_small, _strips and _resident share."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.kernels._kernel import DTYPES

Shape = tuple[int, int, int, tuple[int, int] | int, float]
"""m, n, k, block, part of the blocks that is stored."""


def example(shape: Shape) -> tuple[Bsr, torch.Tensor, torch.Tensor]:
    """Return W and activations for both directions, X [m, k] and dY [m, n]."""
    m, n, k, block, density = shape
    r, c = (block, block) if isinstance(block, int) else block
    rows, columns = -(-n // r), -(-k // c)
    order = np.random.default_rng(1).permutation(rows * columns).reshape(rows, columns)
    there = torch.from_numpy(order < density * rows * columns)
    generator = torch.Generator().manual_seed(2)
    dense = torch.randn(rows * r, columns * c, generator=generator)
    dense = dense.where(there.repeat_interleave(r, 0).repeat_interleave(c, 1), 0.0)
    w = Bsr.from_dense(dense[:n, :k].contiguous(), block=[r, c])
    return w, *(torch.randn(m, size, generator=generator) for size in (k, n))


def moved(w: Bsr, dtype: str) -> Bsr:
    """Put a matrix on the GPU, its values in the dtype."""
    arrays = {name: array.cuda() for name, array in w.arrays().items()}
    return replace(w, **{**arrays, "values": arrays["values"].to(DTYPES[dtype])})


def assert_right(y: Tensor, x: Tensor, w: Bsr, transposed: bool, what: Any) -> None:
    """Hold X @ W.T, or X @ W if transposed, against the definition."""
    dense = w.to_dense().double()
    right = dense if transposed else dense.T
    spread = (x.double().square() @ right.square()).sqrt()
    expected = Expected(x.double() @ right, spread, x.dtype, max(w.shape))
    assert (reason := check(y, expected).reason) is None, f"{what}: {reason}"
