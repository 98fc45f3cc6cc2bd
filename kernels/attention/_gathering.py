"""The queries of each block of keys: lists of single queries, the other way round.

    list of a query                 queries of a block, each with its place: row * places + j
    row 0   0 .  .                  block 0   0:0  1:0  3:0
    row 1   0 2  .                  block 2   1:1  3:1
    row 3   0 2  5                  block 5   3:2

A row is a query of a list. Every 32 rows have a word for each block, with a bit for each row. How
many bits are set in the words before, and in the bits before in the same word, is where an entry
stands. So nothing is sorted, the rows of a block ascend, and nothing waits for the device.

A block that `least` or more of these 32 queries selected is common: they attend to it together,
and it gives them no entry.

A row that has all blocks it sees is complete. If such rows are listed apart, each has one entry, in
a column behind the last block, and no part. MoBA's first queries have no choice.

    mark         columns ──> words [lists, chunks, blocks], common blocks of each chunk
    accumulate   words ──> bases: bits of a block in the chunks before, and in all
    begin        bases ──> starts
    place        columns, words, bases, starts ──> entries, counts
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import rows_of
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.triton import BoundKernel
from sparsebench.kernels.attention._lanes import count_bits

CHUNK = 32  # rows of a word
GROUP = 16  # blocks of a program of `accumulate`; 64 and steps of 64 take 30 instead of 9 us
STEP = 256  # words of a block that it has at a time
WORDS = 128  # of a chunk that `mark` has at a time, by atomics
FEW_BLOCKS = 256  # of a list, whose words `mark` has in registers, CHUNK at a time


class Gathered(NamedTuple):
    """The queries of each block of keys, int32; see above. `blocks` counts that of complete rows.

    entries  [rows * places]                 those of a list of blocks start where the list's do
    starts   [lists, blocks]                 first entry of each block
    bases    [lists, chunks + 1, blocks]     entries of a block in the chunks before
    counts   [rows]                          entries of each row; -1 if it is in the column of
                                             complete rows
    words    [lists, chunks, blocks]         bits of the rows of a chunk that selected a block
    common   [lists * chunks, most]          common blocks of each chunk, ascending
    commons  [lists * chunks]                number of common blocks of each chunk
    """

    entries: Tensor
    starts: Tensor
    bases: Tensor
    counts: Tensor
    words: Tensor
    common: Tensor
    commons: Tensor

    @classmethod
    def without_data(cls, mask: BlockMask, places: int, least: int, apart: bool) -> "Gathered":
        """Return what each call writes, on "meta"; see `bound_gathering` for the arguments."""
        rows, blocks, tokens = mask.shape[0], mask.kv_blocks + apart, mask.q_blocks
        lists, chunks = rows // tokens, triton.cdiv(tokens, CHUNK)
        entries = torch.empty(rows * places, dtype=torch.int32, device="meta")
        bases, words = (entries.new_empty(lists, chunks + i, blocks) for i in (1, 0))
        common = entries.new_empty(lists * chunks, most_common(places, blocks, least))
        starts, counts = entries.new_empty(lists, blocks), entries.new_empty(rows)
        return cls(entries, starts, bases, counts, words, common, common.new_empty(len(common)))

    @classmethod
    def of(cls, mask: BlockMask, places: int, least: int, apart: bool) -> "Gathered":
        """Gather the queries of a mask that does not change, by torch."""
        height, blocks, tokens = mask.shape[0], mask.kv_blocks + apart, mask.q_blocks
        lists, chunks = height // tokens, triton.cdiv(tokens, CHUNK)
        size = lists, chunks, blocks
        rows, column = rows_of(mask.offsets), mask.indices.long()
        if apart:
            rows, column = _with_complete_rows_apart(mask, rows, column)
        token = rows % tokens
        cell = (rows // tokens * chunks + token // CHUNK) * blocks + column
        number = torch.bincount(cell, minlength=lists * chunks * blocks)
        words = torch.zeros_like(number).index_add(0, cell, 1 << token % CHUNK)
        is_common = number >= least
        commons = is_common.view(-1, blocks).sum(1)
        common = number.new_zeros(len(commons), most_common(places, blocks, least))
        at, block = is_common.view(-1, blocks).nonzero().T
        common[at, torch.arange(len(at), device=at.device) - exclusive_sum(commons)[at]] = block

        rows, column = rows[~is_common[cell]], column[~is_common[cell]]
        counts, list_ = torch.bincount(rows, minlength=height), rows // tokens
        bases = pad(number.masked_fill(is_common, 0).view(size).cumsum(1), (0, 0, 1, 0))
        first = torch.arange(lists, device=rows.device) * (tokens * places)
        starts = bases[:, -1].cumsum(1) - bases[:, -1] + first[:, None]
        number = torch.arange(len(rows), device=rows.device)
        entry = rows * places + number - exclusive_sum(counts)[rows]
        order = ((list_ * blocks + column) * tokens + rows % tokens).argsort()
        entries = number.new_zeros(height * places)
        of_lists = exclusive_sum(torch.bincount(list_, minlength=lists))
        entries[(first - of_lists)[list_[order]] + number] = entry[order]
        counts[rows[column == mask.kv_blocks]] = -1
        arrays = entries, starts, bases, counts, words.view(size), common, commons
        return cls(*(x.to(torch.int32) for x in arrays))


def _with_complete_rows_apart(
    mask: BlockMask, rows: Tensor, column: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the row and column of each block of a mask; a complete row has one, behind the last.

    rows, column  int64 [blocks], those of the mask
    """
    side, shift, blocks = mask.block[1], mask.tokens[1] - mask.tokens[0], mask.kv_blocks
    token = torch.arange(mask.shape[0], device=rows.device) % mask.q_blocks
    seen = ((token + shift) // side + 1).clamp(0, blocks) if mask.causal else blocks + 0 * token
    has = torch.bincount(rows[column < seen[rows]], minlength=len(seen))
    complete = ((has == seen) & (seen > 0))[rows]
    stays = ~complete | (column == 0)  # which a complete row has
    return rows[stays], column.masked_fill(complete, blocks)[stays]


def exclusive_sum(counts: Tensor) -> Tensor:
    """Return the sum of the counts before each."""
    return counts.cumsum(0) - counts


def most_common(places: int, blocks: int, least: int) -> int:
    """Return how many common blocks a chunk may have, or 1 if it has none."""
    return max(1, min(blocks, places * CHUNK // least))


def bound_gathering(
    mask: BlockMask, gathered: Gathered, places: int, least: int, apart: bool
) -> list[BoundKernel]:
    """Return the kernels that write the queries of each block of keys, in their order.

    least  rows of a chunk that must have selected a block to make it common; more than CHUNK for
           no common blocks
    apart  whether complete rows are listed apart; then no block may be common
    """
    rows, blocks, tokens = mask.shape[0], mask.kv_blocks + apart, mask.q_blocks
    lists, chunks = rows // tokens, triton.cdiv(tokens, CHUNK)
    entries, starts, bases, counts, words, common, commons = gathered
    sizes, shift = (tokens, blocks, chunks), mask.tokens[1] - mask.tokens[0]
    constants = {"PLACES": triton.next_power_of_2(places), "CHUNK": CHUNK, "num_warps": 1}
    constants |= {"LEAST": least, "APART": mask.block[1] * apart, "CAUSAL": mask.causal}
    every = {"BLOCKS": triton.next_power_of_2(blocks)}
    of_mark = CHUNK if blocks <= FEW_BLOCKS else WORDS
    walked, groups = (mask.offsets, mask.columns), triton.cdiv(blocks, GROUP)
    tile = {"GROUP": GROUP, "STEP": STEP, "LEAST": least}
    of_words = *walked, words, common, commons, *sizes, common.shape[1], shift
    return [
        BoundKernel(_mark, (lists * chunks,), of_words, {**constants, "WORDS": of_mark}, words),
        BoundKernel(_accumulate, (lists * groups,), (words, bases, *sizes[1:]), tile, bases),
        BoundKernel(_begin, (lists,), (bases, starts, *sizes, places), every, starts),
        BoundKernel(
            _place,
            (lists * chunks,),
            (*walked, words, bases, starts, counts, entries, *sizes, places, shift),
            constants,
            entries,
        ),
    ]


@triton.jit  # type: ignore[untyped-decorator]
def _rows(offsets, list_, chunk, tokens, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows of a chunk, where their places start and end; outside of a list, no place."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < tokens
    row = list_ * tokens + token
    start = tl.load(offsets + row, inside, 0)
    return row, inside, start, tl.load(offsets + row + 1, inside, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _columns(  # type: ignore[no-untyped-def]
    offsets, columns, list_, chunk, tokens, blocks, shift,
    PLACES: tl.constexpr, CHUNK: tl.constexpr, APART: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return the rows of a chunk, which of them exist, and the columns before an empty place.

    APART  0, or the keys of a block if complete rows are listed apart, in the last of the columns
    """
    row, inside, start, end = _rows(offsets, list_, chunk, tokens, CHUNK)
    blocks -= APART > 0
    place = tl.arange(0, PLACES)[None, :]
    there = place < (end - start)[:, None]
    column = tl.load(columns + start[:, None] + place, there, -1) & 0x7FFFFFFF
    count = tl.min(tl.where(there & (column < blocks), PLACES, place), 1)
    present = place < count[:, None]
    if APART > 0:
        seen = blocks + tl.zeros_like(row)
        if CAUSAL:
            last = chunk * CHUNK + tl.arange(0, CHUNK) + shift  # key that a row sees
            seen = tl.minimum(tl.maximum(last + APART, 0) // APART, blocks)
        has = tl.sum((present & (column < seen[:, None])).to(tl.int32), 1)
        complete = ((has == seen) & (seen > 0))[:, None]
        column = tl.where(complete, blocks, column)
        present = present & (~complete | (place == 0))
    return row, inside, column, present


@triton.jit  # type: ignore[untyped-decorator]
def _mark(  # type: ignore[no-untyped-def]
    offsets, columns, words, common, commons, tokens, blocks, chunks, most, shift,
    PLACES: tl.constexpr, CHUNK: tl.constexpr, APART: tl.constexpr, CAUSAL: tl.constexpr,
    LEAST: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    words += program.to(tl.int64) * blocks
    common += program.to(tl.int64) * most
    list_, chunk = program // chunks, program % chunks
    of_rows = offsets, columns, list_, chunk, tokens, blocks, shift
    _, _, column, present = _columns(*of_rows, PLACES, CHUNK, APART, CAUSAL)
    lane, row = tl.arange(0, WORDS), tl.arange(0, CHUNK)[:, None]
    if WORDS > CHUNK:
        for first in range(0, blocks, WORDS):
            tl.store(words + first + lane, 0, first + lane < blocks)
        tl.debug_barrier()  # all words are 0 before a bit is set
        tl.atomic_or(words + column, 1 << row, present, sem="relaxed")
        tl.debug_barrier()
    total = 0
    for first in range(0, blocks, WORDS):
        block = first + lane
        if WORDS > CHUNK:
            word = tl.load(words + block, block < blocks, 0, cache_modifier=".cg")
        else:  # bits of a row's blocks, and then the other way round
            there = present & (column >= first) & (column < first + CHUNK)
            bits = tl.sum(tl.where(there, 1 << (column % CHUNK), 0), 1)
            word = tl.sum(((bits[:, None] >> lane[None, :]) & 1) << row, 0)
            tl.store(words + block, word, block < blocks)
        many = (count_bits(word) >= LEAST).to(tl.int32)
        tl.store(common + total + tl.cumsum(many, 0) - 1, block, many == 1)
        total += tl.sum(many, 0)
    tl.store(commons + program, total)


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate(  # type: ignore[no-untyped-def]
    words, bases, blocks, chunks, GROUP: tl.constexpr, STEP: tl.constexpr, LEAST: tl.constexpr
):
    groups = tl.cdiv(blocks, GROUP)
    list_ = (tl.program_id(0) // groups).to(tl.int64)
    block = tl.program_id(0) % groups * GROUP + tl.arange(0, GROUP)[None, :]
    words += list_ * chunks * blocks
    bases += list_ * (chunks + 1) * blocks
    total = tl.zeros((1, GROUP), tl.int32)
    for first in range(0, chunks, STEP):
        chunk = first + tl.arange(0, STEP)[:, None]
        inside = (chunk < chunks) & (block < blocks)
        at = chunk * blocks + block
        count = count_bits(tl.load(words + at, inside, 0))
        count = tl.where(count < LEAST, count, 0)
        tl.store(bases + at, total + tl.cumsum(count, 0) - count, inside)
        total += tl.sum(count, 0)[None, :]
    tl.store(bases + chunks * blocks + block, total, block < blocks)


@triton.jit  # type: ignore[untyped-decorator]
def _begin(  # type: ignore[no-untyped-def]
    bases, starts, tokens, blocks, chunks, places, BLOCKS: tl.constexpr
):
    list_, block = tl.program_id(0), tl.arange(0, BLOCKS)
    last = (list_.to(tl.int64) * (chunks + 1) + chunks) * blocks
    total = tl.load(bases + last + block, block < blocks, 0)
    start = list_ * (tokens * places) + tl.cumsum(total, 0) - total
    tl.store(starts + list_ * blocks + block, start, block < blocks)


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    offsets, columns, words, bases, starts, counts, entries, tokens, blocks, chunks, places, shift,
    PLACES: tl.constexpr, CHUNK: tl.constexpr, APART: tl.constexpr, CAUSAL: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    list_, chunk = program // chunks, program % chunks
    of_rows = offsets, columns, list_, chunk, tokens, blocks, shift
    row, inside, column, present = _columns(*of_rows, PLACES, CHUNK, APART, CAUSAL)
    below = (1 << tl.arange(0, CHUNK)[:, None]) - 1
    word = tl.load(words + program.to(tl.int64) * blocks + column, present, 0)
    apart = present & (count_bits(word) < LEAST)
    base = (list_.to(tl.int64) * (chunks + 1) + chunk) * blocks
    at = tl.load(starts + list_ * blocks + column, apart, 0)
    at += tl.load(bases + base + column, apart, 0) + count_bits(word & below)
    place = tl.cumsum(apart.to(tl.int32), 1) - 1
    tl.store(entries + at, row[:, None] * places + place, apart)
    parts = tl.where((APART > 0) & (column == blocks - 1), -1, 1)
    tl.store(counts + row, tl.sum(tl.where(apart, parts, 0), 1), inside)
