"""List the blocks of a mask of elements on a GPU, without waiting for it.

    elements [batch, lists, S_q, S_kv] ──> which blocks there are, which are partial, bits   `_look`
                                       ──> columns, slots                       _selecting.py

A row has a place for every block of keys, and every block has a place for its bits. So no size
depends on a value, and a captured graph lists other blocks in each replay. The bits of blocks that
are full or absent are not written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats._selection import Selection
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.triton import BoundKernel
from sparsebench.kernels.attention._selecting import bound_select


def empty_bits(mask: BlockMask, rows: int) -> Tensor:
    """Return memory for the bits of every block of some rows of the grid of a mask."""
    count, (b_q, b_k) = mask.shape[1], mask.block
    return mask.columns.new_zeros(rows * count, b_q, -(-b_k // 8), dtype=torch.uint8)


def bound_listing(elements: Tensor, mask: BlockMask) -> list[BoundKernel]:
    """Return the kernels that write columns, bits and slots of a mask.

    elements  [batch, lists, S_q, S_kv]: bool; or floating point, where 0 is allowed and any other
              value is not
    mask      has a place for every block, and `empty_bits`
    """
    assert mask.bits is not None
    scores = mask.columns.new_empty(mask.shape, dtype=torch.float32)
    partial = torch.empty_like(scores, dtype=torch.uint8)
    (b_q, b_k), line = mask.block, mask.bits.shape[2]
    sizes = mask.lists, *mask.tokens, mask.q_blocks, mask.kv_blocks
    args = elements, scores, partial, mask.bits, *sizes, *elements.stride()[:3]
    constants = {"B_Q": b_q, "B_K": b_k, "LINE": line, "ADDS": elements.is_floating_point()}
    constants |= {"HEIGHT": triton.next_power_of_2(b_q), "WIDTH": triton.next_power_of_2(line)}
    look = BoundKernel(_look, (scores.numel(),), args, constants, scores)
    selection = Selection(mask.shape[0], mask.tokens, mask.block, False, mask.kv_blocks)
    lists = mask.offsets.clone(), mask.offsets, mask.columns, partial, mask.slots
    return [look, bound_select(selection, scores, *lists)]


@triton.jit  # type: ignore[untyped-decorator]
def _look(  # type: ignore[no-untyped-def]
    elements, scores, partial, bits, lists, queries, keys, q_blocks, kv_blocks,
    batch_stride, list_stride, query_stride,
    B_Q: tl.constexpr, B_K: tl.constexpr, LINE: tl.constexpr, ADDS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the score of a block, 0 or -inf if no element is allowed, and its bits."""
    program = tl.program_id(0)
    column, row = program % kv_blocks, program // kv_blocks
    list_, first = row // q_blocks, row % q_blocks * B_Q
    x = elements + (list_ // lists).to(tl.int64) * batch_stride
    x += (list_ % lists).to(tl.int64) * list_stride
    line, byte, bit = tl.arange(0, HEIGHT), tl.arange(0, WIDTH), tl.arange(0, 8)
    place = byte[None, :, None] * 8 + bit[None, None, :]  # of a key in its block
    query, key = (first + line)[:, None, None], column * B_K + place
    inside = (line < B_Q)[:, None, None] & (query < queries) & (place < B_K) & (key < keys)
    value = tl.load(x + query.to(tl.int64) * query_stride + key, inside, 0)
    allowed = inside & ((value == 0) if ADDS else (value != 0))
    missing = inside & (allowed == 0)
    some = tl.max(tl.max(tl.max(allowed.to(tl.int32), 2), 1), 0)
    partly = some & tl.max(tl.max(tl.max(missing.to(tl.int32), 2), 1), 0)
    tl.store(scores + program, tl.where(some > 0, 0.0, -float("inf")))
    tl.store(partial + program, partly)
    word = tl.sum(tl.where(allowed, 1 << bit[None, None, :], 0), 2)
    to = bits + program.to(tl.int64) * (B_Q * LINE) + line[:, None] * LINE + byte[None, :]
    stored = (line < B_Q)[:, None] & (byte < LINE)[None, :]
    tl.store(to, word, stored & (partly > 0))
