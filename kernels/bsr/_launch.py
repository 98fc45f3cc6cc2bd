"""Launches of the CUDA kernels of this family: a plan, and its binding to operands.

    plan   pattern, tokens and configuration: lists on the device, compiled code     made once
    bind   a plan's kernel on activations and values; packs the values if needed     each step

bsr_small and bsr_strips read W packed in the order of their steps; bsr_wgmma reads it as stored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.cuda import Arguments, BoundKernel, Loaded
from sparsebench.kernels._common.tuned_table import Tuned
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr._small_steps import gathered
from sparsebench.results.record import Problem

LARGEST = 2**31 - 1  # the kernels count in int32


@dataclass(frozen=True)
class Plan:
    """A launch without operands: it depends only on pattern, tokens and configuration.

    lists          on the device: steps and items, or steps and the rows of each group
    arguments      (address of x, strides of x, address of W's values, address of y) -> arguments
    activations    [m, k], or [m, n] if transposed
    blocks         [blocks, r, c]
    out            [m, n], or [m, k] if transposed
    source         int32, on the device: the position in the blocks of each 16-byte piece of the
                   packed W; None if the kernel reads the blocks as stored
    turned         `source` counts the pieces of transposed blocks
    zeros          int64, on the device: the pieces of the packed W that belong to no block
    """

    loaded: Loaded
    lists: tuple[Tensor, ...]
    arguments: Callable[[int, tuple[int, ...], int, int], Arguments]
    activations: tuple[int, int]
    blocks: tuple[int, int, int]
    out: tuple[int, int]
    dtype: torch.dtype
    source: Tensor | None = None
    turned: bool = False
    zeros: Tensor | None = None


def bind(plan: Plan, x: Tensor, values: Tensor) -> BoundKernel:
    """Return a plan's kernel on these operands, with a new output. Raises Unsupported."""
    expected = plan.activations, plan.blocks, plan.dtype, plan.dtype
    found = x.shape, values.shape, x.dtype, values.dtype
    if found != expected or not values.is_contiguous():
        raise Unsupported(f"planned for {expected}, contiguous blocks; found {found}")
    if plan.source is None:
        w = values if plan.blocks[0] else values.new_zeros(1, *plan.blocks[1:])
    else:
        turned = values.transpose(1, 2).contiguous() if plan.turned else values
        w = gathered(turned.view(-1, 1, 8), plan.source)
    if plan.zeros is not None and len(plan.zeros):
        w.view(-1, 8).index_fill_(0, plan.zeros, 0)
    y = x.new_empty(plan.out)
    args = plan.arguments(x.data_ptr(), x.stride(), w.data_ptr(), y.data_ptr())
    return BoundKernel(plan.loaded, args, (x, w, *plan.lists), y)


class Prepare(Protocol):
    """Return the launch of X @ W.T, or X @ W if transposed. Raises Unsupported.

    The configuration is the pinned one, one of a table, or the fastest of a search.
    """

    def __call__(
        self, operands: Operands, w: Bsr, x: Tensor, tuned: Tuned, *, transposed: bool
    ) -> Launch: ...


def kernel_of(
    op: str, prepare: Prepare, unsupported: Callable[[Problem, torch.device], str | None]
) -> Kernel:
    """Return the kernel of `linear`, or of `linear_dgrad`: dX = dY @ W is a linear layer of W.T."""
    transposed = op == "linear_dgrad"

    def prepare_operands(operands: Operands, *, tuned: Tuned = True) -> Launch:
        w, x = operands.weights["w"], operands.activations["dy" if transposed else "x"]
        assert isinstance(w, Bsr)
        return prepare(operands, w, x, tuned, transposed=transposed)

    return Kernel(op, "bsr", "cuda", prepare_operands, unsupported, tunes=True)


def too_large(shape: tuple[int, int], blocks: int, pieces: int, m: int) -> str | None:
    """Return which of W [n, k], its `pieces` of 16 bytes or m tokens is too large, or None."""
    if max(shape) <= 2**20 and max(pieces, m) <= LARGEST - 256:
        return None
    return (
        "expected less than 2^31 tokens and pieces of 16 bytes and at most 2^20 columns, "
        f"found {blocks} blocks, {m} tokens, W of {shape[0]}x{shape[1]}"
    )
