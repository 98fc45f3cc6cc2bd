"""Work lists of spense_wgmma.cu and spense_mma.cu: which worker multiplies what (stream-K).

    group      two rows of W's tiles for each CTA of a worker (spense_wgmma: one to four)
    k tile     a column of tiles of a group: 256 bytes of k
    work item  k tiles of a group and a tile of tokens: all of them, or one part

    split-K    worker 0   |= group 0, token 0 ==|= group 1, token 0 ==|= group 2, 0: first half =|
               worker 1   |= group 0, token 256 =|= group 1, 256 =====|= group 2, 0: second half =|

    stream-K   worker 0   |= group 0, token 0 ==|= group 1, token 0 ==|= 2, 0: k tiles 0 to 31 =|
               worker 1   |= group 0, token 256 =|= group 1, 256 =====|= 2, 0: 32, 33 =|= 2, 256 =|

Workers take items in turn. The items of a band of token tiles follow each other, so that workers
share tiles of W and X in the L2 cache. If the last round has fewer items than there are workers,
there are two ways to keep all of them busy:

    split-K    cut each item of the last round into equal parts. 5120 features and one tile of
               tokens are 40 items: with 3 parts each, 120 of 132 SMs are busy
    stream-K   cut the k tiles of the last two rounds, as one line, into one piece for each worker
               (Osama et al., arXiv 2301.03598)

split-K has fewer partial sums to write and read; stream-K leaves no worker idle. A small model
predicts the time of both, and the shorter one is taken. At m = 256 and 5120 x 25600 split-K took
75 us, and stream-K 85. Parts are added in the order of their k tiles, so sums never vary.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsebench.formats.spense import DENSE_BYTES, ROWS, SPAN_BYTES, Spense
from sparsebench.kernels._common.declarations import record
from sparsebench.kernels._common.work_list import Ints, Records, fill

BAND = 8  # tiles of tokens
SHORTEST = 2  # k tiles of a part; a shorter one costs more in partial sums than it saves
READ_AHEAD = 1  # items of zeros past the end: producers read one item ahead
# The model, in ns. Rates of an H200 (4.3 TB/s and 790 TFLOP/s of 16 bits, NOTES.md):
MEMORY_BYTES = 4300  # that the GPU reads from memory per ns
SM_BYTES = 90  # that one SM copies into its shared memory per ns
SM_MACS = 395_000 / 132  # multiply-adds of 16 bits of one SM per ns
FIXUP_NS = 2000  # that a worker waits for other parts at the end
# Bytes of partial sums per ns. With 3500 the model chose stream-K for `down` at 4096 tokens, which
# took 1374 us; split-K takes 1324.
PARTIAL_BYTES = 1600
SPARSE_TIME = 0.7  # time of a sparse tile relative to a dense one; shared memory is the limit (.cu)

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class StreamKSchedule:
    """The work items of each worker.

    items     WorkItem [items + READ_AHEAD] of both kernels
    starts    int32 [workers + 1]: where each worker's items start
    slots     slots of the workspace, one for the partial sums of each part
    counters  one for each item that is cut
    """

    items: Records
    starts: Ints
    slots: int
    counters: int


def schedule(
    w: Spense,
    m: int,
    tokens: int,
    cluster: int,
    workers: int,
    *,
    rows_of_cta: int = 2,
    interleaved: bool = True,
    unit: int = 1,
) -> StreamKSchedule:
    """Assign every k tile of every group and tile of `tokens` of m tokens.

    interleaved  groups have rows of tiles as in `interleaved_rows`, or in their order
    unit         items start and end at multiples of as many k tiles, which W has
    """
    rows = -(-w.shape[0] // ROWS)
    order = interleaved_rows(rows, w.sparse.shape[0]) if interleaved else np.arange(rows)
    of_tiles = _costs(w, tokens, (cluster, rows_of_cta), order)
    of_groups: Floats = of_tiles.reshape(len(of_tiles), -1, unit).sum(2)
    group, token = _order(len(of_groups), -(-m // tokens))
    costs, memory = of_groups[group], _memory_time(w)
    ways = _stream_k(costs, workers), _split_k(costs, workers)
    partial_bytes = rows_of_cta * cluster * ROWS * tokens * 4
    times = [way.time(costs, workers, partial_bytes, memory) for way in ways]
    pieces = ways[int(np.argmin(times))]
    item, first, count = pieces.item, pieces.first, pieces.count
    parts = np.bincount(item)
    cut = (parts > 1).astype(int)
    slot, counter = _before(parts * cut)[item], _before(cut)[item]
    part = np.arange(len(item)) - _before(parts)[item]
    columns = {
        **{"group": group[item], "token": token[item] * tokens},
        **{"k_tile": first * unit, "k_tiles": count * unit},
        **{"part": part, "parts": parts[item], "slot": slot, "counter": counter},
    }
    listed = np.argsort(pieces.owner, kind="stable")
    items = np.zeros(len(item) + READ_AHEAD, record("spense_mma", "WorkItem"))
    fill(items, **{name: values[listed] for name, values in columns.items()})
    starts = np.searchsorted(pieces.owner[listed], np.arange(workers + 1)).astype(np.int32)
    return StreamKSchedule(items, starts, int((parts * cut).sum()), int(cut.sum()))


@dataclass(frozen=True)
class _Pieces:
    """Worker `owner` has `count` k tiles of `item` from `first` on; sorted by item and k tile."""

    item: Ints
    first: Ints
    count: Ints
    owner: Ints

    def time(self, costs: Floats, workers: int, partial_bytes: int, memory: float) -> float:
        """Predict the time in ns of items with these costs [items, k tiles].

        partial_bytes  bytes of the partial sums of one part
        memory         ns in which the GPU reads W from memory
        """
        upto = np.zeros((len(costs), costs.shape[1] + 1))
        upto[:, 1:] = costs.cumsum(1)
        cost = upto[self.item, self.first + self.count] - upto[self.item, self.first]
        busy = float(np.bincount(self.owner, cost, workers).max())
        parts = np.bincount(self.item)
        partials = int(parts[parts > 1].sum())
        fixup = FIXUP_NS if partials else 0
        return max(busy, memory) + fixup + 2 * partials * partial_bytes / PARTIAL_BYTES


def _stream_k(costs: Floats, workers: int) -> _Pieces:
    """Assign all rounds but the last one or two; cut those into one piece for each worker."""
    items, k_tiles = costs.shape
    assigned = max(items // workers - 1, 0) * workers
    cuts = assigned * k_tiles + _cuts(costs[assigned:], _loads(costs[:assigned], workers))
    # The k tiles of all items are one line. It is cut between items, and at `cuts`.
    edges = np.union1d(np.arange(items + 1) * k_tiles, cuts)
    item, first, count = edges[:-1] // k_tiles, edges[:-1] % k_tiles, np.diff(edges)
    owner = np.where(item < assigned, item % workers, np.searchsorted(cuts, edges[:-1], "right"))
    return _Pieces(item, first, count, owner)


def _split_k(costs: Floats, workers: int) -> _Pieces:
    """Assign all whole rounds; cut each remaining item into equal parts for idle workers."""
    items, k_tiles = costs.shape
    assigned = items // workers * workers
    left = np.arange(assigned, items)
    parts = max(min(workers // max(len(left), 1), k_tiles // SHORTEST), 1)
    upto = costs[assigned:].cumsum(1)
    targets = upto[:, -1:] * np.arange(1, parts) / parts
    inner = (upto[:, None, :] < targets[:, :, None]).sum(2) + 1  # k tiles done by then
    ends = np.column_stack([inner, np.full(len(left), k_tiles)])
    starts = np.column_stack([np.zeros(len(left), int), inner])
    idle = np.argsort(_loads(costs[:assigned], workers), kind="stable")
    return _Pieces(
        np.concatenate([np.arange(assigned), left.repeat(parts)]),
        np.concatenate([np.zeros(assigned, int), starts.ravel()]),
        np.concatenate([np.full(assigned, k_tiles), (ends - starts).ravel()]),
        np.concatenate([np.arange(assigned) % workers, idle[: len(left) * parts]]),
    )


def _memory_time(w: Spense) -> float:
    """Return the ns in which the GPU reads W from memory."""
    (a, b, of_sparse), (c, d, of_dense) = w.sparse.shape, w.dense.shape
    return float(a * b * of_sparse + c * d * of_dense) / MEMORY_BYTES


def interleaved_rows(rows: int, sparse_rows: int) -> Ints:
    """Return the row of tiles at each place, with sparse and dense rows evenly interleaved.

    All groups then cost about the same. tile_row_of in the kernel has the same formula.
    """
    place, dense = np.arange(rows), rows - sparse_rows
    before = place * dense // rows
    return np.where((place + 1) * dense // rows > before, sparse_rows + before, place - before)


def tiles_of(w: Spense) -> tuple[int, ...]:
    """Return rows, sparse rows and columns, first dense row and column, dense columns of tiles."""
    (n, k), sparse, dense = w.shape, w.sparse.shape, w.dense.shape
    rows, columns = -(-n // ROWS), -(-k // w.span)
    return rows, sparse[0], sparse[1], rows - dense[0], columns - dense[1], dense[1]


def _costs(w: Spense, tokens: int, group: tuple[int, int], order: Ints) -> Floats:
    """Return the ns of each k tile of each group, [groups, k tiles], on the slowest CTA.

    group  CTAs of a worker, and rows of tiles of each CTA
    """
    (n, k), height = w.shape, group[0] * group[1]
    rows, k_tiles = -(-n // ROWS), -(-k // w.span)
    groups = -(-rows // height)
    sparse_rows, sparse_k_tiles, sparse_bytes = w.sparse.shape
    places = np.minimum(np.arange(groups * height), rows - 1)
    row = order[places].reshape(groups, *group, 1)
    sparse = (row < sparse_rows) & (np.arange(k_tiles) < sparse_k_tiles)
    dense_ns = 2 * ROWS * tokens * (SPAN_BYTES // 2) / SM_MACS  # 8 bits: twice the k and the rate
    mma_ns = np.where(sparse, SPARSE_TIME * dense_ns, dense_ns).mean(2)
    copied = np.where(sparse, sparse_bytes, DENSE_BYTES).sum(2) + SPAN_BYTES * tokens
    costs: Floats = np.maximum(mma_ns, copied / SM_BYTES).max(1)
    return costs


def _order(groups: int, tiles: int) -> tuple[Ints, Ints]:
    """Return group and tile of tokens of every item, band by band and group by group."""
    bands = [np.arange(start, min(start + BAND, tiles)) for start in range(0, tiles, BAND)]
    group = [np.arange(groups).repeat(len(band)) for band in bands]
    return np.concatenate(group), np.concatenate([np.tile(band, groups) for band in bands])


def _loads(costs: Floats, workers: int) -> Floats:
    """Return the time in ns of each worker if workers take items [items, k tiles] in turn."""
    loads: Floats = costs.sum(1).reshape(-1, workers).sum(0)
    return loads


def _cuts(costs: Floats, loads: Floats) -> Ints:
    """Return where to cut the line of k tiles [items, k tiles] for workers with these loads."""
    share = np.maximum((loads.sum() + costs.sum()) / len(loads) - loads, 0)
    share[max(costs.size // SHORTEST, 1) :] = 0
    targets = share.cumsum()[:-1] * (costs.sum() / share.sum())
    cuts = np.searchsorted(costs.cumsum() - costs.ravel() / 2, targets)  # the nearest k tile
    k_tiles = costs.shape[1]
    inside = cuts % k_tiles
    back, on = -inside, k_tiles - inside  # to the ends of the item
    moved: Ints = cuts + np.where(-back < SHORTEST, back, np.where(on < SHORTEST, on, 0))
    return moved


def _before(counts: Ints) -> Ints:
    before: Ints = np.cumsum(counts) - counts
    return before
