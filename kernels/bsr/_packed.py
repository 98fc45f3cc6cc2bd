"""The launch of bsr_small and bsr_strips, which read W packed in the order of their steps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.cuda import Arguments, BoundKernel, Loaded
from sparsebench.kernels.bsr._small_steps import gathered

LARGEST = 2**31 - 1  # int32 of the kernels


@dataclass(frozen=True)
class Plan:
    """A launch without operands: it depends on pattern, tokens and configuration alone.

    source         int32, on the device: where the 16-byte pieces of the packed W are in the blocks
    lists          on the device: steps, and the rows or units of each group
    arguments      (address of x, strides of x, address of the packed W, address of y) -> arguments
    activations    [m, k], or [m, n] if transposed
    blocks         [blocks, r, c]
    out            [m, n], or [m, k] if transposed
    turned         whether `source` counts the pieces of transposed blocks
    zeros          int64, on the device: the 16-byte pieces of the packed W that are none's
    """

    loaded: Loaded
    source: Tensor
    lists: tuple[Tensor, ...]
    arguments: Callable[[int, tuple[int, ...], int, int], Arguments]
    activations: tuple[int, int]
    blocks: tuple[int, int, int]
    out: tuple[int, int]
    dtype: torch.dtype
    turned: bool = False
    zeros: Tensor | None = None


def bind(plan: Plan, x: Tensor, values: Tensor) -> BoundKernel:
    """Pack the values; return a plan's kernel on them, with a new output. Raises Unsupported."""
    expected = plan.activations, plan.blocks, plan.dtype, plan.dtype
    found = x.shape, values.shape, x.dtype, values.dtype
    if found != expected or not values.is_contiguous():
        raise Unsupported(f"planned for {expected}, contiguous blocks; found {found}")
    turned = values.transpose(1, 2).contiguous() if plan.turned else values
    y, w = x.new_empty(plan.out), gathered(turned.view(-1, 1, 8), plan.source)
    if plan.zeros is not None and len(plan.zeros):
        w.view(-1, 8).index_fill_(0, plan.zeros, 0)
    args = plan.arguments(x.data_ptr(), x.stride(), w.data_ptr(), y.data_ptr())
    return BoundKernel(plan.loaded, args, (x, w, *plan.lists), y)


def too_large(shape: tuple[int, int], blocks: int, pieces: int, m: int) -> str | None:
    """Say what of W [n, k], its `pieces` of 16 bytes and m tokens the kernels cannot count."""
    if max(shape) <= 2**20 and max(pieces, m) <= LARGEST - 256:
        return None
    return (
        "expected less than 2^31 tokens and pieces of 16 bytes and at most 2^20 columns, "
        f"found {blocks} blocks, {m} tokens, W of {shape[0]}x{shape[1]}"
    )
