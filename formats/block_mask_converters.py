"""Block masks of other libraries, from and to formats/block_mask.py.

    library              full blocks                    partial blocks                  element rule
    FlexAttention        full_kv_num_blocks, _indices   kv_num_blocks, kv_indices       mask_mod
    FlashAttention 4     full_block_cnt, _idx           mask_block_cnt, _idx            mask_mod
    cuDNN frontend       q2k_block_nums, _index         none                            none
    FlashInfer           indptr, indices                in the same lists, with mask    mask
    FlashInfer variable  block_mask_map                 none                            none
    NSA                  block_indices                  in the same lists               causal

The first three pad their lists: counts int32 [batch, heads, q_blocks] and kv blocks int32 [batch,
heads, q_blocks, most], of which the first `count` are valid. Heads that share a list are repeated.
The `to_...` functions raise FormatError if a library cannot represent a mask, so that no rule is
silently dropped. The lists of NSA (fla, cudnn-frontend) belong to single queries: blocks of [1, n].
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from sparsebench.formats._blocks import pack_bits, unpack_bits
from sparsebench.formats._format import require, rows_of
from sparsebench.formats.block_mask import BlockMask

CHUNK = 2**14  # partial blocks whose rule is evaluated at once


class PaddedLists(NamedTuple):
    """Padded lists: int32 counts [batch, heads, q_blocks] and blocks [..., most]."""

    counts: Tensor
    blocks: Tensor


class Fa4(NamedTuple):
    """The tensors of FlashAttention 4's BlockSparseTensorsTorch."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor


class FlashInfer(NamedTuple):
    """The arguments of BlockSparseAttentionWrapper.plan; `mask` is bool [blocks, R, C] or None."""

    indptr: Tensor
    indices: Tensor
    mask: Tensor | None


class FlashInferVariable(NamedTuple):
    """The arguments of VariableBlockSparseAttentionWrapper.plan, by KV head."""

    block_mask_map: Tensor  # bool [kv_heads, q_blocks, kv_blocks]
    block_row_sz: Tensor  # int32 [kv_heads, q_blocks]
    block_col_sz: Tensor  # int32 [kv_heads, kv_blocks]


def from_flex(mask: flex_attention.BlockMask, *, causal: bool = False) -> BlockMask:
    """Convert FlexAttention's mask.

    Set `causal` if its mask_mod is the causal rule and nothing else. Otherwise the mask_mod of
    every partial block is evaluated and stored as bits.
    """
    sides = mask.BLOCK_SIZE
    partial = PaddedLists(mask.kv_num_blocks, mask.kv_indices)
    full = None
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = PaddedLists(mask.full_kv_num_blocks, mask.full_kv_indices)
    rule = None if causal else mask.mask_mod
    return _from_lists(mask.seq_lengths, (sides[0], sides[1]), partial, full, rule, causal)


def to_flex(mask: BlockMask, heads: int) -> flex_attention.BlockMask:
    """Convert to FlexAttention's mask for `heads` heads."""
    width = mask.kv_blocks  # FlexAttention takes the padded length as the number of kv blocks
    partial, full = (padded_lists(mask, heads, partial=p, most=width) for p in (True, False))
    rule = rule_of(mask, heads)
    return flex_attention.BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=mask.block, mask_mod=rule, seq_lengths=mask.tokens
    )


def from_fa4(
    tensors: Fa4, tokens: tuple[int, int], block: tuple[int, int], *, causal: bool = False
) -> BlockMask:
    """Convert FlashAttention 4's tensors; partial blocks need the causal rule."""
    partial, full = PaddedLists(*tensors[:2]), PaddedLists(*tensors[2:])
    some = bool(partial.counts.any())
    require(causal or not some, "expected partial blocks only in a causal mask, found others")
    return _from_lists(tokens, block, partial, full, None, causal)


def to_fa4(mask: BlockMask, heads: int) -> Fa4:
    """Convert to FlashAttention 4's tensors; a causal mask needs its causal mask_mod, too."""
    require(mask.bits is None, "fa4: expected partial blocks of the causal rule, found bits")
    return Fa4(*padded_lists(mask, heads, partial=True), *padded_lists(mask, heads, partial=False))


def from_cudnn(lists: PaddedLists, tokens: tuple[int, int], block: tuple[int, int]) -> BlockMask:
    """Convert cuDNN's q2k_block_nums and q2k_block_index, given in this order."""
    return _from_lists(tokens, block, None, lists, None, False)


def to_cudnn(mask: BlockMask, heads: int) -> PaddedLists:
    """Convert to cuDNN's q2k_block_nums and q2k_block_index."""
    count = int(mask.partial.sum())
    require(not count, f"cuDNN: expected full blocks only, found {count} partial ones")
    return padded_lists(mask, heads, partial=False)


def from_flashinfer(
    converted: FlashInfer, tokens: tuple[int, int], block: tuple[int, int]
) -> BlockMask:
    """Convert FlashInfer's lists, which all heads share."""
    bits = partial = None
    if converted.mask is not None:
        inside = _inside(rows_of(converted.indptr), converted.indices, tokens, block)
        partial = (~converted.mask & inside).any(-1).any(-1)
        bits = pack_bits(converted.mask[partial]) if bool(partial.any()) else None
    rows = rows_of(converted.indptr)
    return BlockMask.build(tokens, block, rows, converted.indices, partial, bits=bits)


def to_flashinfer(mask: BlockMask) -> FlashInfer:
    """Convert to FlashInfer's lists; the elements of all blocks follow if any block is partial."""
    mask = mask.compact()
    alone = mask.batch == mask.lists == 1
    actual = f"{mask.lists} lists of {mask.batch} sequences"
    require(alone, f"flashinfer: expected one list that all heads share, found {actual}")
    whole = tuple(s % b == 0 for s, b in zip(mask.tokens, mask.block, strict=True))
    require(all(whole), f"flashinfer: expected whole blocks of {mask.block}, found {mask.tokens}")
    elements = mask.elements() if bool(mask.partial.any()) else None
    return FlashInfer(mask.offsets, mask.indices, elements)


def to_flashinfer_variable(mask: BlockMask, kv_heads: int) -> FlashInferVariable:
    """Convert to FlashInfer's masks by KV head, in which blocks may have different sizes."""
    mask = mask.compact()
    count = int(mask.partial.sum())
    require(not count, f"flashinfer: expected full blocks only, found {count} partial ones")
    shared = mask.batch == 1 and kv_heads % mask.lists == 0
    actual = f"{mask.lists} lists of {mask.batch} sequences"
    require(shared, f"flashinfer: expected a list for each of {kv_heads} KV heads, found {actual}")
    cells = mask.to_dense().bool().view(mask.lists, mask.q_blocks, mask.kv_blocks)
    device = cells.device
    sizes = [
        (tokens - torch.arange(0, tokens, side, device=device)).clamp(max=side).int()
        for tokens, side in zip(mask.tokens, mask.block, strict=True)
    ]
    repeated = cells.repeat_interleave(kv_heads // mask.lists, 0)
    return FlashInferVariable(repeated, *(size.repeat(kv_heads, 1) for size in sizes))


def from_nsa(indices: Tensor, block: int, keys: int) -> BlockMask:
    """Convert block_indices [batch, tokens, lists, most]; -1, repeated and future ones are none.

    block  keys of a block; `keys` of a sequence, the last of which belongs to the last query
    """
    expected = "expected block_indices [batch, tokens, lists, most] in whole numbers"
    whole = indices.dim() == 4 and indices.dtype in (torch.int32, torch.int64)
    require(whole, f"{expected}, found {indices.dtype} {list(indices.shape)}")
    tokens, most = [indices.shape[1], keys], -(-keys // block)
    outside = (indices < -1) | (indices >= most)
    require(not bool(outside.any()), f"expected blocks from -1 to {most - 1}, found others")
    listed = BlockMask.from_indices(
        indices.transpose(1, 2), tokens=tokens, block=[1, block], causal=True
    )
    return listed.compact()


def to_nsa(mask: BlockMask) -> Tensor:
    """Convert to block_indices [batch, tokens, lists, most], int64, ascending, padded with -1."""
    mask = mask.compact()
    require(mask.block[0] == 1, f"nsa: expected lists of single queries, found {mask.block}")
    require(mask.causal, "nsa: expected a causal mask, found another")
    require(mask.bits is None, "nsa: expected partial blocks of the causal rule, found bits")
    rows = rows_of(mask.offsets)
    place = torch.arange(len(rows), device=rows.device) - mask.offsets[rows]
    padded = rows.new_full((mask.shape[0], max(1, int(mask.counts.max()))), -1)
    padded[rows, place] = mask.indices.long()
    by_list = padded.view(mask.batch, mask.lists, mask.q_blocks, -1)
    return by_list.transpose(1, 2).contiguous()


def padded_lists(
    mask: BlockMask, heads: int, *, partial: bool, most: int | None = None
) -> PaddedLists:
    """Return the partial or the full blocks of every head, padded to the longest list or `most`."""
    mask = mask.compact()
    mask.list_of(0, heads)
    rows, of_kind = rows_of(mask.offsets), mask.partial == partial
    rows, blocks = rows[of_kind], mask.indices[of_kind]
    counts = torch.bincount(rows, minlength=mask.shape[0])
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    most = most or max(1, int(counts.max()))
    padded = blocks.new_zeros(mask.shape[0], most)
    padded[rows, place] = blocks
    by_list = mask.batch, mask.lists, mask.q_blocks
    repeats = heads // mask.lists
    return PaddedLists(
        counts.int().view(by_list).repeat_interleave(repeats, 1).contiguous(),
        padded.view(*by_list, most).repeat_interleave(repeats, 1).contiguous(),
    )


def rule_of(mask: BlockMask, heads: int) -> Any:
    """Return FlexAttention's mask_mod for the partial blocks of a mask, or None without any."""
    (s_q, s_kv), (b_q, b_k), lists = mask.tokens, mask.block, mask.lists
    if mask.bits is None or mask.slots is None:
        return (lambda b, h, q, k: k <= q + (s_kv - s_q)) if mask.causal else None
    slots = torch.full(mask.shape, -1, dtype=torch.int32, device=mask.columns.device)
    slots[rows_of(mask.offsets), mask.indices.long()] = mask.slots
    slots = slots.view(mask.batch, lists, mask.q_blocks, mask.kv_blocks)
    bits, causal = mask.bits, mask.causal

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        slot = slots[b, h * lists // heads, q // b_q, k // b_k].clamp(min=0)
        key = k % b_k
        allowed = ((bits[slot, q % b_q, key // 8] >> (key % 8)) & 1) == 1
        return allowed & (k <= q + (s_kv - s_q)) if causal else allowed

    return rule


def _from_lists(
    tokens: tuple[int, int],
    block: tuple[int, int],
    partial: PaddedLists | None,
    full: PaddedLists | None,
    rule: Any,
    causal: bool,
) -> BlockMask:
    """Build a mask of padded lists; `rule` is a mask_mod whose bits are stored."""
    rows, columns, flags = [], [], []
    shape = (partial or full or PaddedLists(torch.empty(0), torch.empty(0))).counts.shape
    require(len(shape) == 3, f"expected counts [batch, heads, q blocks], found {list(shape)}")
    for lists, flag in ((partial, True), (full, False)):
        if lists is not None:
            valid = torch.arange(lists.blocks.shape[-1], device=lists.counts.device)
            at = valid < lists.counts[..., None]
            rows.append(at.flatten(0, 2).nonzero()[:, 0])
            columns.append(lists.blocks[at])
            flags.append(torch.full((len(columns[-1]),), flag, device=at.device))
    batch, heads, q_blocks = shape
    row, column, part = torch.cat(rows), torch.cat(columns), torch.cat(flags)
    bits = None
    if rule is not None and bool(part.any()):
        at_row, at_column = row[part], column[part].long()
        bits = _bits(rule, at_row, at_column, heads, q_blocks, block)
        bits = _without_outside(bits, at_row % q_blocks, at_column, tokens, block)
    return BlockMask.build(
        tokens, block, row, column, part, batch=batch, lists=heads, causal=causal, bits=bits
    )


def _bits(
    rule: Any, rows: Tensor, columns: Tensor, heads: int, q_blocks: int, block: tuple[int, int]
) -> Tensor:
    """Evaluate a mask_mod on all elements of partial blocks."""
    b_q, b_k = block
    parts = []
    for row, column in zip(rows.split(CHUNK), columns.split(CHUNK), strict=True):
        lists, q_block = (row // q_blocks)[:, None, None], (row % q_blocks)[:, None, None]
        q = q_block * b_q + torch.arange(b_q, device=row.device)[:, None]
        k = column[:, None, None] * b_k + torch.arange(b_k, device=row.device)
        allowed = rule(lists // heads, lists % heads, q, k)
        parts.append(pack_bits(allowed.expand(len(row), b_q, b_k)))
    return torch.cat(parts)


def _without_outside(
    bits: Tensor, rows: Tensor, columns: Tensor, tokens: tuple[int, int], block: tuple[int, int]
) -> Tensor:
    """Clear the bits of elements that an edge block does not have."""
    return pack_bits(unpack_bits(bits, block[1]) & _inside(rows, columns, tokens, block))


def _inside(rows: Tensor, columns: Tensor, tokens: tuple[int, int], block: tuple[int, int]) -> Any:
    """Return which elements of blocks are in the matrix, bool [blocks, b_q, b_k]."""
    q = rows[:, None] * block[0] + torch.arange(block[0], device=rows.device)
    k = columns.long()[:, None] * block[1] + torch.arange(block[1], device=rows.device)
    return (q < tokens[0])[:, :, None] & (k < tokens[1])[:, None]
