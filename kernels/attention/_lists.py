"""The lists of a mask as the Triton kernels read them: full blocks first, then the masked ones.

    row of the mask    0 . 1p . . 4     (p: partial)
    columns            0 4 1p           full, ascending; then masked, ascending
    fulls              2

A kernel processes the full blocks without a mask, and then the rest with one. A block that reaches
past the last key needs a mask too. The lists of the transpose have the same form: their columns are
blocks of queries.
"""

from dataclasses import dataclass
from math import ceil, gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats.block_mask import BlockMask


@dataclass(frozen=True)
class MaskLists:
    """Lists of blocks, all int32 on the mask's device. A list has a row for each block.

    offsets  [lists * rows + 1]  first block of each row
    columns  [nnz + 1]           block columns, with bit 31 in partial blocks; kernels read one past
                                 the last
    fulls    [lists * rows]      full blocks of each row, which come first; None if each call
                                 writes other columns: an empty place ends a row, every step has a
                                 mask, and `masked` is True
    slots    [nnz + 1]           place of each block's bits, or -1; None without bits
    order    [groups, rows]      rows by falling number of blocks; `groups` is a multiple of lists
    masked   whether any block needs a mask
    blocks_per_row  number of blocks of every row if all have the same, else None
    """

    offsets: Tensor
    columns: Tensor
    fulls: Tensor | None
    slots: Tensor | None
    order: Tensor
    masked: bool
    blocks_per_row: int | None


def lists_of(mask: BlockMask) -> MaskLists:
    """Return the lists of key blocks by query blocks, with an order for each list."""
    ragged = mask.tokens[1] // mask.block[1] if mask.tokens[1] % mask.block[1] else -1
    counts = mask.offsets.diff().view(-1, ceil(mask.tokens[0] / mask.block[0]))
    return _lists(mask.offsets, mask.columns, mask.slots, counts, ragged, fixed=not mask.keep)


def transposed_lists_of(mask: BlockMask, kv_heads: int) -> MaskLists:
    """Return the lists of query blocks by key blocks, with an order for each key head.

    No block is ragged: kernels give missing queries an LSE of infinity and store no missing key.
    """
    transpose = mask.transposed
    counts = transpose.offsets.diff().view(mask.batch, mask.lists, -1)
    if mask.lists > kv_heads:
        counts = counts.unflatten(1, (kv_heads, -1)).sum(2)
    else:
        counts = counts.repeat_interleave(kv_heads // mask.lists, 1)
    lists = transpose.offsets, transpose.rows, transpose.slots, counts.flatten(0, 1)
    return _lists(*lists, fixed=not mask.keep)


def shared_heads(mask: BlockMask, heads: int, kv_heads: int) -> int:
    """Return how many query heads in turn have one list and one key head: a power of two."""
    shared = gcd(heads // kv_heads, heads // mask.lists)
    return shared & -shared


def _lists(
    offsets: Tensor,
    columns: Tensor,
    slots: Tensor | None,
    counts: Tensor,
    ragged: int = -1,
    *,
    fixed: bool,
) -> MaskLists:
    """Move the partial blocks of each row, and those of a ragged column, behind the full ones.

    counts  [groups, rows]: what the rows are ordered by
    fixed   False if each call writes other columns, which then stay in place
    """
    lengths = offsets.diff()
    order = counts.argsort(dim=1, descending=True, stable=True).to(torch.int32).contiguous()
    if not fixed:
        return MaskLists(offsets, columns, None, slots, order, masked=True, blocks_per_row=None)
    equal = int(lengths[0]) if bool((lengths == lengths[0]).all()) else None
    row = torch.arange(len(lengths), device=columns.device).repeat_interleave(lengths)
    masked = (columns < 0) | (columns == ragged)
    place = (row * 2 + masked).argsort(stable=True)
    fulls = lengths - torch.bincount(row[masked], minlength=len(lengths))
    return MaskLists(
        offsets=offsets,
        columns=pad(columns[place], (0, 1)),
        fulls=fulls.to(torch.int32),
        slots=None if slots is None else pad(slots[place], (0, 1), value=-1),
        order=order,
        masked=bool(masked.any()),
        blocks_per_row=equal,
    )
