"""The queries of each block of keys: lists of single queries, the other way round.

    list of a query                 queries of a block, each with its place: row * places + j
    row 0   0 .  .                  block 0   0:0  1:0  3:0
    row 1   0 2  .                  block 2   1:1  3:1
    row 3   0 2  5                  block 5   3:2

A row is a query of a list. Every 32 rows have a word for each block, with a bit for each row. How
many bits are set in the words before, and in the bits before in the same word, is where an entry
stands. So nothing is sorted, the rows of a block ascend, and nothing waits for the device.

    mark         columns ──> words [lists, chunks, blocks], counts
    accumulate   words ──> bases: bits of a block in the chunks before, and in all
    begin        bases ──> starts
    place        columns, words, bases, starts ──> entries
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

CHUNK = 32  # rows of a word
GROUP = 64  # blocks of a program of `accumulate`
STEP = 64  # words of a block that it has at a time


class Gathered(NamedTuple):
    """The queries of each block of keys, int32; see above.

    entries  [rows * places]                 those of a list of blocks start where the list's do
    starts   [lists, blocks]                 first entry of each block
    bases    [lists, chunks + 1, blocks]     entries of a block in the chunks before
    counts   [rows]                          blocks of each row before its first empty place
    """

    entries: Tensor
    starts: Tensor
    bases: Tensor
    counts: Tensor

    @classmethod
    def without_data(cls, mask: BlockMask, places: int) -> "Gathered":
        """Return what each call writes, on "meta"."""
        (rows, blocks), tokens = mask.shape, mask.q_blocks
        lists = rows // tokens
        entries = torch.empty(rows * places, dtype=torch.int32, device="meta")
        bases = entries.new_empty(lists, triton.cdiv(tokens, CHUNK) + 1, blocks)
        return cls(entries, entries.new_empty(lists, blocks), bases, entries.new_empty(rows))

    @classmethod
    def of(cls, mask: BlockMask, places: int) -> "Gathered":
        """Return those of a mask that does not change, in torch."""
        rows, (height, blocks), tokens = rows_of(mask.offsets), mask.shape, mask.q_blocks
        lists, chunks = height // tokens, triton.cdiv(tokens, CHUNK)
        column, place = mask.indices.long(), torch.arange(len(rows), device=rows.device)
        entry = rows * places + place - mask.offsets[rows]
        order = ((rows // tokens * blocks + column) * tokens + rows % tokens).argsort()
        cell = (rows // tokens * chunks + rows % tokens // CHUNK) * blocks + column
        count = torch.bincount(cell, minlength=lists * chunks * blocks)
        bases = pad(count.view(lists, chunks, blocks).cumsum(1), (0, 0, 1, 0))
        starts = bases[:, -1].flatten().cumsum(0).view(lists, blocks) - bases[:, -1]
        entries = torch.zeros(height * places, dtype=torch.int32, device=rows.device)
        first = torch.arange(lists, device=rows.device)[:, None] * (tokens * places)
        starts += first - starts[:, :1]
        listed = rows[order] // tokens
        before = mask.offsets[::tokens][listed]
        entries[listed * (tokens * places) + place - before] = entry[order].to(torch.int32)
        return cls(entries, starts.to(torch.int32), bases.to(torch.int32), mask.counts)


def bound_gathering(mask: BlockMask, places: int, gathered: Gathered) -> list[BoundKernel]:
    """Return the kernels that write the queries of each block of keys, in their order."""
    (rows, blocks), tokens = mask.shape, mask.q_blocks
    lists, chunks = rows // tokens, triton.cdiv(tokens, CHUNK)
    entries, starts, bases, counts = gathered
    words = entries.new_empty(lists * chunks * blocks)
    sizes = tokens, blocks, chunks
    constants = {"PLACES": triton.next_power_of_2(places), "CHUNK": CHUNK, "num_warps": 1}
    every = {"BLOCKS": triton.next_power_of_2(blocks)}
    walked, groups = (mask.offsets, mask.columns), triton.cdiv(blocks, GROUP)
    tile = {"GROUP": GROUP, "STEP": STEP}
    return [
        BoundKernel(_mark, (lists * chunks,), (*walked, words, counts, *sizes), constants, words),
        BoundKernel(_accumulate, (lists * groups,), (words, bases, *sizes[1:]), tile, bases),
        BoundKernel(_begin, (lists,), (bases, starts, *sizes, places), every, starts),
        BoundKernel(
            _place,
            (lists * chunks,),
            (*walked, words, bases, starts, counts, entries, *sizes, places),
            constants,
            entries,
        ),
    ]


@triton.jit
def _bits(word):  # type: ignore[no-untyped-def]
    """Return how many bits of a word are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word += word >> 8
    return (word + (word >> 16)) & 0x3F


@triton.jit  # type: ignore[untyped-decorator]
def _rows(offsets, list_, chunk, tokens, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows of a chunk, where their places start and end; outside of a list, no place."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < tokens
    row = list_ * tokens + token
    start = tl.load(offsets + row, inside, 0)
    return row, inside, start, tl.load(offsets + row + 1, inside, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _mark(  # type: ignore[no-untyped-def]
    offsets, columns, words, counts, tokens, blocks, chunks,
    PLACES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    words += program.to(tl.int64) * blocks
    lane = tl.arange(0, 128)
    for first in range(0, blocks, 128):
        tl.store(words + first + lane, 0, first + lane < blocks)
    row, inside, start, end = _rows(offsets, program // chunks, program % chunks, tokens, CHUNK)
    place = tl.arange(0, PLACES)[None, :]
    there = place < (end - start)[:, None]
    column = tl.load(columns + start[:, None] + place, there, -1) & 0x7FFFFFFF
    count = tl.min(tl.where(there & (column < blocks), PLACES, place), 1)
    tl.store(counts + row, count, inside)
    tl.debug_barrier()  # all words are 0 before a bit is set
    bit = 1 << tl.arange(0, CHUNK)[:, None]
    tl.atomic_or(words + column, bit, place < count[:, None], sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate(  # type: ignore[no-untyped-def]
    words, bases, blocks, chunks, GROUP: tl.constexpr, STEP: tl.constexpr
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
        count = _bits(tl.load(words + at, inside, 0))
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
    offsets, columns, words, bases, starts, counts, entries, tokens, blocks, chunks, places,
    PLACES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    list_, chunk = program // chunks, program % chunks
    row, inside, start, _ = _rows(offsets, list_, chunk, tokens, CHUNK)
    place = tl.arange(0, PLACES)[None, :]
    present = place < tl.load(counts + row, inside, 0)[:, None]
    column = tl.load(columns + start[:, None] + place, present, 0) & 0x7FFFFFFF
    below = (1 << tl.arange(0, CHUNK)[:, None]) - 1
    word = tl.load(words + program.to(tl.int64) * blocks + column, present, 0)
    base = (list_.to(tl.int64) * (chunks + 1) + chunk) * blocks
    at = tl.load(starts + list_ * blocks + column, present, 0)
    at += tl.load(bases + base + column, present, 0) + _bits(word & below)
    tl.store(entries + at, row[:, None] * places + place, present)
