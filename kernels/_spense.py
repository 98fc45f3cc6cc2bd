"""Which worker of spense_wgmma.cu or spense_mma.cu multiplies what, so that all end together.

    group   two rows of W's tiles for each CTA of a worker: what it multiplies at a time
    step    a column of tiles of a group
    item    steps of a group and a tile of tokens: all of them, or a piece

        worker 0   |= group 0, token 0 ==|= group 1, token 0 ==|= group 2, 0: steps 0 to 31 =|
        worker 1   |= group 0, token 256 =|= group 1, 256 =====|= 2, 0: 32 to 39 =|= 2, 256 =|

Items are dealt out in turn, the tokens of a band together: what is multiplied at one time shares
tiles of W and X in the L2 cache. The last one or two rounds are cut: their steps, one after the
other, into a piece for each worker (stream-K, Osama et al., arXiv 2301.03598). Few items are cut
altogether: 5120 features and one tile of tokens are 40 items for 132 SMs. The pieces of an item are
added up in the order of their steps, so that a schedule's sums are always the same.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsebench.formats.spense import DENSE_BYTES, ROWS, SPAN_BYTES, Spense

BAND = 8  # tiles of tokens
SHORTEST = 2  # steps of a piece, or what there is for each worker: its sums are written and read
READ_AHEAD = 1  # items past the end, where there are none
# What an SM of an H200 brings and multiplies: bytes from memory and from L2, and multiply-adds of
# 16 bits, a ns (4.3 and 8.8 TB/s and 790 TFLOP/s, kernels/NOTES.md).
FROM_MEMORY, FROM_L2, PRODUCTS = 4300 / 132, 8800 / 132, 395_000 / 132
SPARSE = 0.7  # of a dense tile's time on the tensor cores: shared memory is what limits (.cu)

Ints = NDArray[np.integer[Any]]
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


def schedule(w: Spense, m: int, tokens: int, cluster: int, workers: int) -> Schedule:
    """Assign every step of every group and tile of `tokens` of m tokens."""
    costs = _costs(w, m, tokens, cluster)
    groups, steps = costs.shape
    group, token = _order(groups, -(-m // tokens))
    dealt = max(len(group) // workers - 1, 0) * workers
    cuts = dealt * steps + _cuts(costs[group[dealt:]], _loads(costs[group[:dealt]], workers))
    # All steps of all items in one line: it is cut between items, and at the cuts.
    edges = np.union1d(np.arange(len(group) + 1) * steps, cuts)
    item, first, count = edges[:-1] // steps, edges[:-1] % steps, np.diff(edges)
    owner = np.where(item < dealt, item % workers, np.searchsorted(cuts, edges[:-1], "right"))
    parts = np.bincount(item)
    cut = (parts > 1).astype(int)
    place, counter = _before(parts * cut)[item], _before(cut)[item]
    part = np.arange(len(item)) - _before(parts)[item]
    columns = group[item], token[item] * tokens, first, count, part, parts[item], place, counter
    listed = np.argsort(owner, kind="stable")
    items = np.zeros((len(item) + READ_AHEAD, 8), np.int32)
    items[: len(item)] = np.column_stack(columns)[listed]
    starts = np.searchsorted(owner[listed], np.arange(workers + 1)).astype(np.int32)
    return Schedule(items, starts, int((parts * cut).sum()), int(cut.sum()))


def tiles_of(w: Spense) -> tuple[int, ...]:
    """Return rows, sparse rows and columns, first dense row and column, dense columns of tiles."""
    (n, k), sparse, dense = w.shape, w.sparse.shape, w.dense.shape
    rows, columns = -(-n // ROWS), -(-k // w.span)
    return rows, sparse[0], sparse[1], rows - dense[0], columns - dense[1], dense[1]


def _costs(w: Spense, m: int, tokens: int, cluster: int) -> Floats:
    """Return the ns that each group's steps take, [groups, steps]."""
    (n, k), height = w.shape, 2 * cluster
    rows, steps = -(-n // ROWS), -(-k // w.span)
    groups = -(-rows // height)
    row = np.minimum(np.arange(groups * height), rows - 1).reshape(groups, height)
    sparse_rows, sparse_steps, sparse_bytes = w.sparse.shape
    sparse = (row < sparse_rows).all(axis=1, keepdims=True) & (np.arange(steps) < sparse_steps)
    products = 2 * ROWS * tokens * (SPAN_BYTES // 2) / PRODUCTS  # 8 bits have twice the k and rate

    def cost(tile_bytes: int, time: float) -> float:
        of_w, of_x = 2 * tile_bytes, SPAN_BYTES * tokens / cluster
        brought = of_w / FROM_MEMORY if m <= tokens else 0.0
        return max(brought, (of_w + of_x) / FROM_L2, time)

    return np.where(sparse, cost(sparse_bytes, SPARSE * products), cost(DENSE_BYTES, products))


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
