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

import ctypes

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.driver import driver, require_success
from sparsebench.kernels.attention._shapes import Shape

SECTION_BYTES = 24 << 20  # the L2 cache of an H100 has 50 MB
LONG = 2
INNER = 64  # elements of a row of a box: 128 bytes, the widest swizzle


def span_of(block: int) -> int:
    """Return the queries of a head in a tile: a power of two, at most 128, that divides a block."""
    return min(block & -block, 128)


def query_tiles(mask: BlockMask, shape: Shape, rows: int, span: int) -> Tensor:
    """Return int32 [tiles, 4]: first block in mask.columns, blocks, first query, first head.

    Heads count through all sequences.
    """
    device, pack = mask.offsets.device, rows // span
    head = torch.arange(0, shape.batch * shape.heads, pack, device=device)
    start = torch.arange(0, shape.q_tokens, span, device=device)
    row = _lists(mask, shape, head)[:, None] * mask.q_blocks + start // mask.block[0]
    count = mask.counts[row]
    columns = mask.offsets[row], count, start.expand_as(row), head[:, None].expand_as(row)
    bytes_of_group = 2 * shape.kv_tokens * shape.head_dim * shape.itemsize  # K and V
    section = max(1, SECTION_BYTES // bytes_of_group) * (shape.heads // shape.kv_heads)
    return _sorted(columns, count, head, section)


def key_tiles(mask: BlockMask, shape: Shape, rows: int, *, sums: bool) -> Tensor:
    """Return int32 [tiles, 4]: first key, KV head of all sequences, block of keys, blocks.

    sums  a tile adds to fp32 sums of dQ in memory
    """
    device = mask.offsets.device
    offsets = mask.transpose().offsets
    counts = offsets.diff().view(-1, mask.kv_blocks)
    head = torch.arange(shape.batch * shape.heads, device=device)
    group = shape.heads // shape.kv_heads
    total = counts[_lists(mask, shape, head)].view(-1, group, mask.kv_blocks).sum(1)
    start = torch.arange(0, shape.kv_tokens, rows, device=device)
    kv_head = torch.arange(shape.batch * shape.kv_heads, device=device)
    block = start // mask.block[1]
    count = total[:, block]
    columns = start.expand_as(count), kv_head[:, None].expand_as(count), block.expand_as(count)
    bytes_of_element = 2 * shape.itemsize + 4 * sums  # of Q, dO and the sums
    bytes_of_group = group * shape.q_tokens * shape.head_dim * bytes_of_element
    section = max(1, SECTION_BYTES // bytes_of_group)
    return _sorted((*columns, count), count, kv_head, section)


def _lists(mask: BlockMask, shape: Shape, head: Tensor) -> Tensor:
    """Return the list of each head of all sequences."""
    sequence, local = head // shape.heads, head % shape.heads
    return sequence * mask.lists + local * mask.lists // shape.heads


def _sorted(columns: tuple[Tensor, ...], count: Tensor, head: Tensor, section: int) -> Tensor:
    number = (head // section + 1)[:, None].expand_as(count)
    number = number.masked_fill(count > LONG * count.float().mean(), 0)
    key = number * (1 << 32) - count.long()
    tiles = torch.stack([column.flatten() for column in columns], 1).to(torch.int32)
    return tiles[key.flatten().argsort(stable=True)].contiguous()


def tensor_map(x: Tensor, batch: int, rows: int) -> bytes:
    """Return the map of x [batch * tokens, width] for boxes of `rows` tokens and INNER columns.

    A box that reaches past the last token of its sequence reads zeros there. Raises Unsupported.
    """
    if not x.is_contiguous() or x.data_ptr() % cuda.TMA_ALIGNMENT:
        raise Unsupported(
            f"TMA expected a contiguous matrix at a multiple of {cuda.TMA_ALIGNMENT} bytes, "
            f"found strides {list(x.stride())} at {x.data_ptr() % cuda.TMA_ALIGNMENT}"
        )
    height, width = x.shape
    tokens, row = height // batch, width * x.element_size()
    space = ctypes.create_string_buffer(cuda.MAP_BYTES + cuda.MAP_ALIGNMENT)
    place = -(-ctypes.addressof(space) // cuda.MAP_ALIGNMENT) * cuda.MAP_ALIGNMENT
    sizes, steps = (ctypes.c_uint64 * 3)(width, tokens, batch), (ctypes.c_uint64 * 2)
    box, every = (ctypes.c_uint32 * 3)(INNER, rows, 1), (ctypes.c_uint32 * 3)(1, 1, 1)
    result = driver().cuTensorMapEncodeTiled(
        *(ctypes.c_void_p(place), cuda.MAP_TYPES[x.dtype], 3, ctypes.c_void_p(x.data_ptr())),
        *(sizes, steps(row, row * tokens), box, every),
        *(0, cuda.SWIZZLES[128], cuda.L2_PROMOTION_128B, 0),
    )
    require_success(result, f"cuTensorMapEncodeTiled, {[batch, tokens, width]} by {rows}")
    return ctypes.string_at(place, cuda.MAP_BYTES)
