"""Block-sparse weights and activations that tests of bsr_small, _strips and _resident share."""

import numpy as np
import torch

from sparsebench.formats.bsr import Bsr

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
