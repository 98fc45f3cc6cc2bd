"""Decide for bsr_wgmma.cu which rows of W are multiplied together, over which columns, and where.

    slice   64 rows of W (for dX, 64 columns); its 64 x 64 tiles lie in one block row
    group   two slices, the halves, which share the X tile of each step; the second may be missing
    step    `span_of` columns of X: the X tile, and a tile of W for one half or for both

        columns touched     slice a   0 . 2 3 . .        steps of the group (a, b)
                            slice b   . . 2 3 . 5        0: a   2: a b   3: a b   5: b

Loads are the bottleneck. A step loads an X tile (256 tokens: 32 KB), whether one half uses it or
both, and 8 KB of W for each half. So slices with many columns in common are paired. The slices of
one block row come first: they have all columns in common. Then the pair that shares the most
columns is taken, again and again (greedy matching). For uniform random blocks of 64, n = k = 4096,
at 90 % sparsity, that makes 335 steps; pairs by length make 387, and the best matching 331. In a
banded matrix, pairs are neighbours.

Groups are assigned to workers, a CTA or a cluster of two with twice the tokens, longest first
(_common/work_list.py). In a worker's list, tokens ascend, so that X is read from memory during the
whole launch. If all workers started with different tokens, the first items would wait 8 us for X
(90 % sparsity, n = k = m = 4096). An item is never split, so a row that is longer than a worker's
fair share limits the balance.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsebench.errors import FormatError
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.declarations import record
from sparsebench.kernels._common.made_once import made_once
from sparsebench.kernels._common.work_list import Ints, Records, assigned, fill

SIDE = 64  # rows of a tile of W, the height of wgmma; in 16 bits also its columns
NO_SLICE = 0xFFFF
STEPS_AHEAD, ITEMS_AHEAD = 32, 2  # past the end, which producers read but do not use
STORING = 3  # steps that take as long as storing an item


@dataclass(frozen=True)
class Groups:
    """Pairs of slices with their steps.

    slices  [groups, 2]: NO_SLICE if there is no second one
    first   [groups + 1]: first step of each group; each has at least one, which may load nothing
    steps   Step [steps + STEPS_AHEAD]. Column of X; for each half the row among the stored blocks;
            for each half, in 16 bits, the column in the block. -1: no load
    """

    slices: Ints
    first: Ints
    steps: Records


def span_of(w: Bsr) -> int:
    """Return the columns of a step: 64, or 128 in fp8 if the blocks allow it."""
    wide = 2 * SIDE
    return wide if w.values.itemsize == 1 and w.block[1] % wide == 0 else SIDE


@made_once
def groups_of(w: Bsr, transposed: bool = False) -> Groups:
    """Pair the slices of W [n, k], or those of its transpose. Raises FormatError."""
    span, tiles = span_of(w), _tiles(w, transposed)
    pairs = _pairs(tiles)
    group, half = np.zeros(tiles.slices, np.int64), np.zeros(tiles.slices, np.int64)
    for side in (0, 1):
        there = pairs[:, side] != NO_SLICE
        group[pairs[there, side]], half[pairs[there, side]] = np.flatnonzero(there), side
    empty = np.setdiff1d(np.arange(len(pairs)), group[tiles.owner])
    keys = np.concatenate([group[tiles.owner], empty]) * tiles.places
    keys[: len(tiles.owner)] += tiles.place
    union, step = np.unique(keys, return_inverse=True)
    step, of = step[: len(tiles.owner)], half[tiles.owner]
    rows, columns = np.full((len(union), 2), -1), np.zeros((len(union), 2), np.int64)
    rows[step, of], columns[step, of] = tiles.row, tiles.column
    loads_x = np.where((rows >= 0).any(1), union % tiles.places * span, -1)
    steps = np.zeros(len(union) + STEPS_AHEAD, record("bsr_wgmma", "Step"))
    loads = {"x": loads_x, "w0": rows[:, 0], "w1": rows[:, 1], "columns": packed(columns)}
    fill(steps, **loads)
    first = np.searchsorted(union // tiles.places, np.arange(len(pairs) + 1))
    return Groups(pairs, first, steps)


def packed(pairs: Ints) -> Ints:
    """Pack two numbers below 2^16 into one int32, the first in the low half."""
    both: Ints = (pairs[:, 0] | pairs[:, 1] << 16).astype(np.uint32).view(np.int32)
    return both


@dataclass(frozen=True)
class _Tiles:
    """W's stored tiles of 64 rows and `span_of` columns, [tiles] each.

    owner, place    its slice, and the columns of X that it multiplies
    row, column     its position in the stored blocks, stacked [blocks * r, c]
    slices, places  their numbers in W
    height          slices in a block row
    """

    owner: Ints
    place: Ints
    row: Ints
    column: Ints
    slices: int
    places: int
    height: int


def _tiles(w: Bsr, transposed: bool) -> _Tiles:
    block_rows, block_columns = checked(w)
    (n, k), (r, c) = w.shape, w.block
    span = span_of(w)
    block, i, j = np.ix_(range(len(block_rows)), range(r // SIDE), range(c // span))
    row, column = np.broadcast_arrays(block * r + i * SIDE, j * span)
    down, across = block_rows[block] * (r // SIDE) + i, block_columns[block] * (c // span) + j
    owner, place = np.broadcast_arrays(*((across, down) if transposed else (down, across)))
    sizes, height = ((k, n), c) if transposed else ((n, k), r)
    slices, places = -(-sizes[0] // SIDE), -(-sizes[1] // span)
    kept = (owner < slices) & (place < places)  # tiles of an edge block outside W are dropped
    return _Tiles(
        *(owner[kept], place[kept], row[kept], column[kept]), slices, places, height // SIDE
    )


def _pairs(tiles: _Tiles) -> Ints:
    """Pair the slices of each block row, and the remaining ones by the places that they share."""
    lead = np.arange(tiles.slices)
    lead = lead[lead % tiles.height % 2 == 0]
    whole = (lead % tiles.height < tiles.height - 1) & (lead < tiles.slices - 1)
    single = lead[~whole]
    index = np.full(tiles.slices, -1)
    index[single] = np.arange(len(single))
    left = index[tiles.owner] >= 0
    touched = np.zeros((len(single), tiles.places), np.float32)
    touched[index[tiles.owner[left]], tiles.place[left]] = 1
    pairs = matched(touched)
    alone = np.setdiff1d(np.arange(len(single)), pairs)
    return np.concatenate(
        [
            np.column_stack([lead[whole], lead[whole] + 1]),
            single[pairs],
            np.column_stack([single[alone], np.full(len(alone), NO_SLICE)]),
        ]
    )


def matched(touched: NDArray[np.float32]) -> Ints:
    """Pair the rows of [rows, places] greedily, most places in common first: int [pairs, 2].

    If the number of rows is odd, one remains unpaired.
    """
    shared = touched @ touched.T
    one, other = np.triu_indices(len(touched), 1)
    order = np.argsort(-shared[one, other], kind="stable")
    free, pairs = [True] * len(touched), []
    for a, b in zip(one[order].tolist(), other[order].tolist(), strict=True):
        if free[a] and free[b]:
            free[a] = free[b] = False
            pairs.append((a, b))
    return np.array(pairs, np.int64).reshape(-1, 2)


@made_once
def checked(w: Bsr) -> tuple[Ints, Ints]:
    """Return block row and column of each block. Raises FormatError if the index is invalid."""
    (n, k), (r, c) = w.shape, w.block
    offsets, columns = w.offsets.cpu().numpy(), w.columns.cpu().numpy()
    rows, width, blocks = -(-n // r), -(-k // c), len(w.values)
    if len(offsets) != rows + 1 or offsets[0] != 0 or offsets[-1] != blocks:
        actual = f"{len(offsets)} from {offsets[0]} to {offsets[-1]}" if len(offsets) else "none"
        raise FormatError(f"expected {rows + 1} offsets from 0 to {blocks}, found {actual}")
    lengths = np.diff(offsets)
    if lengths.min() < 0:
        row = int(lengths.argmin())
        actual = f"{offsets[row]} to {offsets[row + 1]} in row {row}"
        raise FormatError(f"expected ascending offsets, found {actual}")
    if len(columns) != blocks:
        raise FormatError(f"expected {blocks} block columns, found {len(columns)}")
    if blocks and (columns.min() < 0 or columns.max() >= width):
        actual = f"{columns.min()} to {columns.max()}"
        raise FormatError(f"expected block columns 0 to {width - 1}, found {actual}")
    owner = np.arange(rows).repeat(lengths)
    back = np.flatnonzero(np.diff(owner * width + columns) <= 0)
    if len(back):
        row, actual = owner[back[0]], columns[back[0] : back[0] + 2].tolist()
        raise FormatError(f"expected ascending columns, found {actual} in block row {row}")
    return owner, columns.astype(np.int64)


@dataclass(frozen=True)
class WgmmaSchedule:
    """The work of each worker.

    items   Item [items + ITEMS_AHEAD]; slices are two of 16 bits
    starts  int32 [workers + 1]: first item of each worker
    """

    items: Records
    starts: Ints


def schedule(groups: Groups, m: int, tokens: int, workers: int) -> WgmmaSchedule:
    """Assign every group and tile of `tokens` of m tokens; every worker gets an item."""
    steps = np.diff(groups.first)
    group, token, starts = assigned(steps + STORING, m, tokens, workers)
    items = np.zeros(len(group) + ITEMS_AHEAD, record("bsr_wgmma", "Item"))
    ends = {"first": groups.first[group], "count": steps[group]}
    fill(items, **ends, token=token, slices=packed(groups.slices[group]))
    return WgmmaSchedule(items, starts.astype(np.int32))
