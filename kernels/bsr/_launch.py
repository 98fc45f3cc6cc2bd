"""Launches of the CUDA kernels of this family: a plan, its product, and its binding to operands.

    plan     pattern, most tokens, configuration: lists on the device, compiled code    made once
    Product  a plan to call with activations and blocks; returns a new tensor           each step
    bind     a plan's kernel on activations and values; its output is reused            each suite

bsr_small and bsr_strips read W packed in the order of their steps (pack.cu); bsr_wgmma reads it as
stored. A plan for M tokens also multiplies fewer: the maps of X and Y end at the last token, so the
tiles beyond it read zeros and write nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Protocol

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.cuda import (
    ADDRESSES,
    HALVES,
    Arguments,
    BoundKernel,
    Layout,
    Loaded,
    TransposedCopy,
    load,
    on_tape,
    target_of,
)
from sparsebench.kernels._common.scales import UNSCALED, Scales
from sparsebench.kernels._common.tuned_table import Tuned
from sparsebench.kernels._kernel import Kernel, Launch, Operands, output_dtype
from sparsebench.results.record import Problem

LARGEST = 2**31 - 1  # the kernels count in int32
PACK_THREADS, PACK_PIECES = 256, 4  # threads of a CTA; pieces of a thread (pack.cu)
PACK_ARGUMENTS = Layout(*"PPPi")


@dataclass(frozen=True)
class Plan:
    """A launch without operands: it depends only on pattern, tokens and configuration.

    lists      on the device: steps and items, or steps and the rows of each group
    arguments  (tokens, address of x, strides of x, address of W's values, address of y, and in fp8
               the addresses of the scales) -> arguments
    tokens     most tokens of x
    depth      columns of x: k, or n if transposed
    blocks     [blocks, r, c]
    width      columns of y: n, or k if transposed
    source     int32, on the device: the position in the blocks of each piece of the packed W, or
               -1 for zeros; None if the kernel reads the blocks as stored
    turned     `source` counts the pieces of transposed blocks
    piece      elements of a piece
    """

    loaded: Loaded
    lists: tuple[Tensor, ...]
    arguments: Callable[..., Arguments]
    tokens: int
    depth: int
    blocks: tuple[int, int, int]
    width: int
    dtype: torch.dtype
    source: Tensor | None = None
    turned: bool = False
    piece: int = 8

    @cached_property
    def kind(self) -> torch.dtype:
        """Return the dtype of y."""
        return output_dtype(self.dtype)

    @cached_property
    def order(self) -> bytes | None:
        """Return a digest of the order of the packed W; None if it is read as stored."""
        if self.source is None:
            return None
        return sha256(self.source.cpu().numpy().tobytes() + bytes([self.turned])).digest()

    @property
    def packs(self) -> bool:
        """Return whether the kernel reads another tensor than the values."""
        return self.source is not None or not self.blocks[0]

    def pack(self, values: Tensor) -> Tensor:
        """Return what the kernel reads of W: the values, or a copy in the order of the steps."""
        if self.source is None:
            on_tape(complete=self.blocks[0] > 0)
            return values if self.blocks[0] else values.new_zeros(1, *self.blocks[1:])
        if not self.turned:
            return packed(values, self.source, self.piece)
        transposed = values.transpose(1, 2).contiguous()
        on_tape(transposed, by_torch=TransposedCopy(values, transposed))
        return packed(transposed, self.source, self.piece)


class Product:
    """A plan to call: a new Y of X and of W's blocks (selection.Product).

    The caller checks the operands: at most `plan.tokens` tokens, in the plan's dtype, aligned.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.code = plan, plan.loaded.code
        self.pack: Callable[[Tensor], Tensor] | None = plan.pack if plan.packs else None
        self.order: bytes | None = plan.order if plan.packs else None

    def run(self, x: Tensor, w: Tensor) -> Tensor:
        """Multiply by the blocks, packed if there is `pack`; a graph keeps the plan alive."""
        plan, m = self.plan, x.shape[0]
        y = x.new_empty(m, plan.width, dtype=plan.kind)
        addresses = x.data_ptr(), x.stride(), w.data_ptr(), y.data_ptr()
        plan.loaded.enqueue(plan.arguments(m, *addresses))
        on_tape(y, owners=(plan, w))
        if is_capturing(x):
            keep(plan)
        return y


def bind(plan: Plan, x: Tensor, values: Tensor, scales: Scales = UNSCALED) -> BoundKernel:
    """Return a plan's kernel on these operands, with a new output. Raises Unsupported."""
    m, expected = x.shape[0], (plan.depth, plan.blocks, plan.dtype, plan.dtype)
    actual = x.shape[1], values.shape, x.dtype, values.dtype
    if actual != expected or m > plan.tokens or not values.is_contiguous():
        limit = f"planned for {plan.tokens} tokens and {expected}, contiguous blocks"
        raise Unsupported(f"{limit}; found {m} tokens and {actual}")
    scales.require(plan.width, m, plan.dtype)
    w, y = plan.pack(values), x.new_empty((m, plan.width), dtype=plan.kind)
    addresses = x.data_ptr(), x.stride(), w.data_ptr(), y.data_ptr()
    args = plan.arguments(m, *addresses, *(scales.addresses if scales.tensors else ()))
    return BoundKernel(plan.loaded, args, (x, w, *scales.tensors, *plan.lists), y)


def packed(blocks: Tensor, source: Tensor, size: int = 8) -> Tensor:
    """Return the pieces of blocks [blocks, r, c] in the order of `source`: [pieces, size].

    A piece -1 is zeros. Without blocks, return one block of zeros.
    """
    if not blocks.shape[0]:
        on_tape(complete=False)
        return blocks.new_zeros(1, *blocks.shape[1:])
    pieces = source.shape[0]
    if not blocks.is_cuda:  # the reference of pack.cu
        return blocks.view(-1, size)[source.clamp(0)].masked_fill_(source[:, None] < 0, 0)
    out = blocks.new_empty(pieces, size)
    loaded, arguments = _pack_kernel(blocks.device, pieces, size * blocks.itemsize)
    loaded.enqueue(arguments(blocks.data_ptr(), source.data_ptr(), out.data_ptr()))
    on_tape(out)
    return out


@lru_cache(256)
def _pack_kernel(
    device: torch.device, pieces: int, piece_bytes: int
) -> tuple[Loaded, Callable[..., Arguments]]:
    """Return pack.cu for so many pieces, and its arguments by the addresses, which it keeps."""
    constants = (("PIECE_BYTES", piece_bytes),)
    kernel, code = load("pack", "gather_pieces", constants, 0, device, target_of(device))
    grid = -(-pieces // (PACK_THREADS * PACK_PIECES))
    arguments = lru_cache(ADDRESSES)(lambda *addresses: PACK_ARGUMENTS(*addresses, pieces))
    return Loaded(kernel, code, device.index, grid, PACK_THREADS, 0), arguments


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


def unsupported_product(
    x: Tensor, w: Bsr, transposed: bool, dtypes: tuple[torch.dtype, ...] = HALVES
) -> str | None:
    """Return why no CUDA kernel can compute X @ W.T (X @ W if transposed), or None.

    TMA has further conditions (`tensor_map`).
    """
    (n, k), values = w.shape, w.values
    depth, width = (n, k) if transposed else (k, n)
    if x.dtype != values.dtype or x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        actual = f"{x.dtype} and {values.dtype}"
        return f"expected operands of one dtype of {names}; found {actual}"
    if x.dim() != 2 or x.shape[1] != depth:
        return f"expected activations of {depth} columns, found shape {list(x.shape)}"
    if not values.is_contiguous():
        return f"expected contiguous blocks, found strides {list(values.stride())}"
    if width % 8:
        return f"expected a multiple of 8 columns to write, found {width}"
    return None
