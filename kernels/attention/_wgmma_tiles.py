"""Tiles of the wgmma kernels of attention, in the order of work, and their tensor maps.

A tile of queries is `rows` rows, 64 for each consumer warpgroup: `span` queries of each of
rows / span heads, which share a list and a KV head. One step loads K and V for all of them.

    span 128             span 64, two heads       span 16, four heads
    head h  | 128 q |    head h     | 64 q |      head h      |16 q|
                         head h + 1 | 64 q |      ...
                                                  head h + 3  |16 q|

Tiles are sorted by section, a group of heads whose matrices fit into the L2 cache together, and in
a section by falling number of blocks, so that the last tiles to start are short. Tiles with more
than LONG times the mean of blocks come before all sections; else they might prolong the last one.
"""

from functools import lru_cache, reduce
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from sparsebench.formats._format import offsets_of, rows_of
from sparsebench.formats._selection import PARTIAL
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.declarations import listed, record
from sparsebench.kernels.attention._shapes import AttentionShape

SECTION_BYTES = 24 << 20  # the L2 cache of an H100 has 50 MB
LONG = 2
INNER = 64  # elements of a row of a box: 128 bytes, the widest swizzle
PRESENT, PARTLY = 24, 20  # first bits of a row of joined blocks (KeyLists)


def span_of(block: int) -> int:
    """Return the queries of a head in a tile: a power of two, at most 128, that divides a block."""
    return min(block & -block, 128)


def query_tiles(mask: BlockMask, shape: AttentionShape, rows: int, span: int) -> Tensor:
    """Return Tile [tiles] of walk.cuh, as int32: a list's first block in mask.columns, its blocks.

    Heads count through all sequences.
    """
    device, pack = mask.offsets.device, rows // span
    head = torch.arange(0, shape.batch * shape.heads, pack, device=device)
    start = torch.arange(0, shape.q_tokens, span, device=device)
    # If rows have as many places, the last ones have most blocks when elements are causal.
    start = start.flip(0) if mask.keep else start
    row = lists_of_heads(mask, shape, head)[:, None] * mask.q_blocks + start // mask.block[0]
    count = mask.counts[row]
    lists = {"first": mask.offsets[row], "count": count}
    tiles = {**lists, "query": start.expand_as(row), "head": head[:, None].expand_as(row)}
    bytes_of_group = 2 * shape.kv_tokens * shape.head_dim * shape.itemsize  # K and V
    section = max(1, SECTION_BYTES // bytes_of_group) * (shape.heads // shape.kv_heads)
    return _sorted("attention_wgmma", tiles, count, head, section)


class KeyLists(NamedTuple):
    """The lists of query blocks by blocks of keys, as attention_wgmma_backward.cu reads them.

    side     keys of a block: those of the mask, or 64 if smaller blocks are joined
    offsets  int32 [batch * lists * blocks + 1]
    rows     int32, query blocks, ascending; bit 31 is set in partial blocks. If blocks are joined,
             bits 24 to 27 say which of them the query block has, and bits 20 to 23 which of these
             are partial
    slots    places of the bits of partial blocks, or None
    places   int32, of each block in mask.columns; None if blocks are joined
    present  int32 [batch * lists, blocks]: which of the joined blocks have a query block
    """

    side: int
    offsets: Tensor
    rows: Tensor
    slots: Tensor | None
    places: Tensor | None
    present: Tensor


def key_lists(mask: BlockMask) -> KeyLists:
    """Return the transposed lists; blocks of 16 or 32 keys are joined to blocks of 64."""
    offsets, rows, slots, places = mask.transposed
    count, ratio = mask.batch * mask.lists, max(1, INNER // mask.block[1])
    blocks = ceil(mask.kv_blocks / ratio)
    present = rows.new_zeros(count * blocks)
    if ratio == 1:
        present = present.view(count, blocks)
        return KeyLists(mask.block[1], offsets, rows, slots, places, present)
    row = rows_of(offsets)
    number, column = row // mask.kv_blocks, row % mask.kv_blocks
    joined, bit = number * blocks + column // ratio, 1 << column % ratio
    cells, place = (joined * mask.q_blocks + (rows & ~PARTIAL)).unique(return_inverse=True)
    kinds = (bit << PRESENT) + torch.where(rows < 0, bit << PARTLY, 0)
    rows = (cells % mask.q_blocks).index_add(0, place, kinds)
    of_block = cells // mask.q_blocks
    for at in range(ratio):
        some = of_block[rows >> PRESENT + at & 1 == 1]
        present[some] |= 1 << at
    rows = torch.where(rows >> PARTLY & 15 != 0, rows - (1 << 31), rows).to(torch.int32)
    offsets = offsets_of(of_block, count * blocks)
    return KeyLists(INNER, offsets, rows, None, None, present.view(count, blocks))


def key_tiles(lists: KeyLists, mask: BlockMask, shape: AttentionShape, rows: int) -> Tensor:
    """Return Tile [tiles] of attention_wgmma_backward.cu, as int32; `block` is of `lists`.

    present  which of the joined blocks some query selects, one bit each
    """
    device = mask.offsets.device
    blocks = ceil(shape.kv_tokens / lists.side)
    counts = lists.offsets.diff().view(-1, blocks)
    head = torch.arange(shape.batch * shape.heads, device=device)
    group = shape.heads // shape.kv_heads
    total = counts[lists_of_heads(mask, shape, head)].view(-1, group, blocks).sum(1)
    start = torch.arange(0, shape.kv_tokens, rows, device=device)
    kv_head = torch.arange(shape.batch * shape.kv_heads, device=device)
    block = start // lists.side
    count = total[:, block]
    of_lists = lists.present[lists_of_heads(mask, shape, head)].view(-1, group, blocks)
    present = reduce(torch.bitwise_or, of_lists.unbind(1))[:, block]
    tiles = {
        **{"key": start.expand_as(count), "kv_head": kv_head[:, None].expand_as(count)},
        **{"block": block.expand_as(count), "present": present},
    }
    bytes_of_group = 2 * group * shape.q_tokens * shape.head_dim * shape.itemsize  # Q and dO
    section = max(1, SECTION_BYTES // bytes_of_group)
    return _sorted("attention_wgmma_backward", tiles, count, kv_head, section)


def lists_of_heads(mask: BlockMask, shape: AttentionShape, head: Tensor) -> Tensor:
    """Return the list of each head of all sequences."""
    sequence, local = head // shape.heads, head % shape.heads
    return sequence * mask.lists + local * mask.lists // shape.heads


def _sorted(
    name: str, tiles: dict[str, Tensor], count: Tensor, head: Tensor, section: int
) -> Tensor:
    """Return Tile of NAME.cu of all heads and places, in the order of work."""
    number = (head // section + 1)[:, None].expand_as(count)
    number = number.masked_fill(count > LONG * count.float().mean(), 0)
    key = number * (1 << 32) - count.long()
    flat = {field: values.flatten() for field, values in tiles.items()}
    return listed(record(name, "Tile"), **flat)[key.flatten().argsort(stable=True)].contiguous()


@lru_cache(4096)  # the allocator reuses addresses
def head_map(address: int, dtype: torch.dtype, shape: tuple[int, int, int], rows: int) -> bytes:
    """Return the map of a matrix [batch * tokens, width] for boxes of `rows` tokens, INNER columns.

    shape  width, tokens and batch

    A box that reaches past the last token of its sequence reads zeros there. The matrix is
    contiguous at a multiple of 16 bytes.
    """
    tokens, row = shape[1], shape[0] * dtype.itemsize
    sizes, steps, box = shape[::-1], (row * tokens, row), (1, rows, INNER)
    kind, swizzle = cuda.MAP_TYPES[dtype], cuda.SWIZZLES[128]
    return cuda.encoded_map(address, sizes, steps, kind, box, swizzle)
