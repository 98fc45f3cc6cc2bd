"""Which worker of spense_wgmma.cu or spense_mma.cu multiplies what, so that all end together.

    group   two rows of W's tiles for each CTA of a worker: what it multiplies at a time
    step    a column of tiles of a group
    item    steps of a group and a tile of tokens: all of them, or a piece

    in rounds   worker 0   |= group 0, token 0 ==|= group 1, token 0 ==|= group 2, 0: first half =|
                worker 1   |= group 0, token 256 =|= group 1, 256 =====|= group 2, 0: second half =|

    in line     worker 0   |= group 0, token 0 ==|= group 1, token 0 ==|= 2, 0: steps 0 to 31 =|
                worker 1   |= group 0, token 256 =|= group 1, 256 =====|= 2, 0: 32, 33 =|= 2, 256 =|

Items are dealt out in turn, the tokens of a band together: what is multiplied at one time shares
tiles of W and X in the L2 cache. What the last round lacks there are two ways to fill:

    in rounds   each item of it is cut into as many equal parts as there are workers for: 5120
                features and one tile of tokens, 40 items, are 3 parts each for 120 of 132 SMs
    in line     its steps and those of the round before, one after the other, are cut into a piece
                for each worker (stream-K, Osama et al., arXiv 2301.03598)

The first has fewer sums of parts to write and read, the second leaves nobody idle: the one with the
shorter time, by a small model of both, is taken. At m = 256 and 5120 x 25600 it was 75 us against
85. Parts are added up in the order of their steps, so that a schedule's sums are always the same.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsebench.formats.spense import DENSE_BYTES, ROWS, SPAN_BYTES, Spense
from sparsebench.kernels._common.work_list import Ints, first_of

BAND = 8  # tiles of tokens
SHORTEST = 2  # steps of a piece, or what there is for each worker: its sums are written and read
READ_AHEAD = 1  # items past the end, where there are none
# What an H200 reads from memory, and what one of its SMs brings and multiplies, in bytes and in
# multiply-adds of 16 bits a ns (4.3 TB/s and 790 TFLOP/s, NOTES.md).
FROM_MEMORY, BROUGHT, PRODUCTS = 4300, 90, 395_000 / 132
# ns that a worker waits at its end; bytes of sums a ns: with 3500 down went in line at 4096 tokens,
# in 1374 us, where rounds take 1324.
JOIN, SUMMED, SUM_BYTES = 2000, 1600, 4
SPARSE = 0.7  # of a dense tile's time on the tensor cores: shared memory is what limits (.cu)

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Schedule:
    """What each worker does.

    items     int32 [items + READ_AHEAD, 8]: group, first token, first step, how many, which piece,
              of how many, place of the first piece's sums, counter
    starts    int32 [workers + 1]: where each worker's items start
    places    sums of pieces
    counters  items in pieces
    """

    items: Ints
    starts: Ints
    places: int
    counters: int

    @property
    def first(self) -> bytes:
        """Return the kernel's argument First, of what is to be multiplied."""
        return first_of(self.items[:, :4], self.starts)


def schedule(
    w: Spense, m: int, tokens: int, cluster: int, workers: int, *, in_turn: bool = True
) -> Schedule:
    """Assign every step of every group and tile of `tokens` of m tokens.

    Groups are of rows as they follow each other, or as they come `in_turn`.
    """
    rows = -(-w.shape[0] // ROWS)
    turns = rows_in_turn(rows, w.sparse.shape[0]) if in_turn else np.arange(rows)
    of_groups = _costs(w, tokens, cluster, turns)
    group, token = _order(len(of_groups), -(-m // tokens))
    costs, memory = of_groups[group], _memory_time(w)
    ways = _in_line(costs, workers), _in_rounds(costs, workers)
    sums = 2 * cluster * ROWS * tokens * SUM_BYTES
    times = [way.time(costs, workers, sums, memory) for way in ways]
    pieces = ways[int(np.argmin(times))]
    item, first, count = pieces.item, pieces.first, pieces.count
    parts = np.bincount(item)
    cut = (parts > 1).astype(int)
    place, counter = _before(parts * cut)[item], _before(cut)[item]
    part = np.arange(len(item)) - _before(parts)[item]
    columns = group[item], token[item] * tokens, first, count, part, parts[item], place, counter
    listed = np.argsort(pieces.owner, kind="stable")
    items = np.zeros((len(item) + READ_AHEAD, 8), np.int32)
    items[: len(item)] = np.column_stack(columns)[listed]
    starts = np.searchsorted(pieces.owner[listed], np.arange(workers + 1)).astype(np.int32)
    return Schedule(items, starts, int((parts * cut).sum()), int(cut.sum()))


@dataclass(frozen=True)
class _Pieces:
    """Steps `first` to `first + count` of `item` are `owner`'s; in the order of items and steps."""

    item: Ints
    first: Ints
    count: Ints
    owner: Ints

    def time(self, costs: Floats, workers: int, sums: int, memory: float) -> float:
        """Predict the ns that items with these costs [items, steps] take.

        sums    bytes of an item's;  memory  ns that reading W takes all workers together
        """
        upto = np.zeros((len(costs), costs.shape[1] + 1))
        upto[:, 1:] = costs.cumsum(1)
        cost = upto[self.item, self.first + self.count] - upto[self.item, self.first]
        busy = float(np.bincount(self.owner, cost, workers).max())
        parts = np.bincount(self.item)
        joined = int(parts[parts > 1].sum())
        return max(busy, memory) + (JOIN if joined else 0) + 2 * joined * sums / SUMMED


def _in_line(costs: Floats, workers: int) -> _Pieces:
    """Deal out all rounds but the last one or two, and cut those, as one line, for each worker."""
    items, steps = costs.shape
    dealt = max(items // workers - 1, 0) * workers
    cuts = dealt * steps + _cuts(costs[dealt:], _loads(costs[:dealt], workers))
    # All steps of all items in one line: it is cut between items, and at the cuts.
    edges = np.union1d(np.arange(items + 1) * steps, cuts)
    item, first, count = edges[:-1] // steps, edges[:-1] % steps, np.diff(edges)
    owner = np.where(item < dealt, item % workers, np.searchsorted(cuts, edges[:-1], "right"))
    return _Pieces(item, first, count, owner)


def _in_rounds(costs: Floats, workers: int) -> _Pieces:
    """Deal out all whole rounds, and cut each item that is left into equal parts for the idle."""
    items, steps = costs.shape
    dealt = items // workers * workers
    left = np.arange(dealt, items)
    parts = max(min(workers // max(len(left), 1), steps // SHORTEST), 1)
    upto = costs[dealt:].cumsum(1)
    wanted = upto[:, -1:] * np.arange(1, parts) / parts
    inner = (upto[:, None, :] < wanted[:, :, None]).sum(2) + 1  # steps that are over by then
    ends = np.column_stack([inner, np.full(len(left), steps)])
    starts = np.column_stack([np.zeros(len(left), int), inner])
    idle = np.argsort(_loads(costs[:dealt], workers), kind="stable")
    return _Pieces(
        np.concatenate([np.arange(dealt), left.repeat(parts)]),
        np.concatenate([np.zeros(dealt, int), starts.ravel()]),
        np.concatenate([np.full(dealt, steps), (ends - starts).ravel()]),
        np.concatenate([np.arange(dealt) % workers, idle[: len(left) * parts]]),
    )


def _memory_time(w: Spense) -> float:
    """Return the ns in which W comes from memory."""
    (a, b, of_sparse), (c, d, of_dense) = w.sparse.shape, w.dense.shape
    return float(a * b * of_sparse + c * d * of_dense) / FROM_MEMORY


def rows_in_turn(rows: int, sparse_rows: int) -> Ints:
    """Return the row of tiles at each place: of rows in turn so many are sparse, so many dense.

    The kernel's row_of: so all groups have about the same to do.
    """
    place, dense = np.arange(rows), rows - sparse_rows
    before = place * dense // rows
    return np.where((place + 1) * dense // rows > before, sparse_rows + before, place - before)


def tiles_of(w: Spense) -> tuple[int, ...]:
    """Return rows, sparse rows and columns, first dense row and column, dense columns of tiles."""
    (n, k), sparse, dense = w.shape, w.sparse.shape, w.dense.shape
    rows, columns = -(-n // ROWS), -(-k // w.span)
    return rows, sparse[0], sparse[1], rows - dense[0], columns - dense[1], dense[1]


def _costs(w: Spense, tokens: int, cluster: int, turns: Ints) -> Floats:
    """Return the ns that each group's steps take, [groups, steps]: those of its slowest CTA."""
    (n, k), height = w.shape, 2 * cluster
    rows, steps = -(-n // ROWS), -(-k // w.span)
    groups = -(-rows // height)
    sparse_rows, sparse_steps, sparse_bytes = w.sparse.shape
    places = np.minimum(np.arange(groups * height), rows - 1)
    row = turns[places].reshape(groups, cluster, 2, 1)
    sparse = (row < sparse_rows) & (np.arange(steps) < sparse_steps)
    products = 2 * ROWS * tokens * (SPAN_BYTES // 2) / PRODUCTS  # 8 bits have twice the k and rate
    times = np.where(sparse, SPARSE * products, products).mean(2)
    brought = np.where(sparse, sparse_bytes, DENSE_BYTES).sum(2) + SPAN_BYTES * tokens
    costs: Floats = np.maximum(times, brought / BROUGHT).max(1)
    return costs


def _order(groups: int, tiles: int) -> tuple[Ints, Ints]:
    """Return group and tile of tokens of every item: band by band, group by group."""
    bands = [np.arange(start, min(start + BAND, tiles)) for start in range(0, tiles, BAND)]
    group = [np.arange(groups).repeat(len(band)) for band in bands]
    return np.concatenate(group), np.concatenate([np.tile(band, groups) for band in bands])


def _loads(costs: Floats, workers: int) -> Floats:
    """Return what each worker has to do, of items [items, steps] that are dealt out in turn."""
    loads: Floats = costs.sum(1).reshape(-1, workers).sum(0)
    return loads


def _cuts(costs: Floats, loads: Floats) -> Ints:
    """Return where to cut the line of steps [items, steps] between workers with these loads."""
    share = np.maximum((loads.sum() + costs.sum()) / len(loads) - loads, 0)
    share[max(costs.size // SHORTEST, 1) :] = 0
    wanted = share.cumsum()[:-1] * (costs.sum() / share.sum())
    cuts = np.searchsorted(costs.cumsum() - costs.ravel() / 2, wanted)  # to the nearest step
    steps = costs.shape[1]
    inside = cuts % steps
    back, on = -inside, steps - inside  # to the item's ends
    moved: Ints = cuts + np.where(-back < SHORTEST, back, np.where(on < SHORTEST, on, 0))
    return moved


def _before(counts: Ints) -> Ints:
    """Return the sum of all counts before each one."""
    before: Ints = np.cumsum(counts) - counts
    return before
