"""Decide for bsr_wgrad.cu which tiles of dW are summed together, and assign them to workers.

    tile    64 x 64 of a stored block; its slice is 64 rows of W, its place 64 columns. If the sides
            of blocks are not multiples of 64, a tile is smaller: 40, 48 or 56 (SIDES)
    half    up to four (or two) tiles of a slice: the sums of a warpgroup
    item    two halves; a step loads a tile of dY for each slice, a tile of X for each place
    piece   an item, or every second, third, ... of its steps

        places touched               items                half 0     half 1     loads of dY, X
          slice a   0 1 2 3 4 5 .      both share four    a 0 1 2 3  b 0 1 2 3  2 + 4
          slice b   0 1 2 3 . 5 6      both share one     a 4 5      b 5 6      2 + 3

Loads are the bottleneck. A step of eight tiles of dW loads 6 tiles if the halves share all four
places, and 9 if they share none. So slices are paired by the places that they share. Four shared
places make an item, and slices are paired again until no two share four; then the same is done for
three, two and one. The rest makes items slice by slice. With uniform random blocks of 64, n = k =
4096, eight tiles load 6.4 at 50 % sparsity (7.3 if pairs were made once, 9 slice by slice), 7.3 at
80 %, 8.4 at 90 %.

Items are assigned longest first, as in _wgmma_schedule.py, and stay whole if the last worker then
ends earlier. Otherwise a worker takes whole items up to the mean load, and the rest is cut into
pieces of equal length, one per worker; longer items are cut into more pieces. Halves of two tiles
load more for each tile of dW than halves of four, but they balance better and need fewer partial
sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.work_list import Ints
from sparsebench.kernels.bsr._wgmma_pairs import SIDE, checked, matched

Floats = NDArray[np.float64]

TILES = 6, 9  # tiles of a stage; 9 are one slice and eight places, or two and seven
SIDES = 64, 56, 48, 40  # sides of a tile: the first that divides a block's side
ALIGNED = 16  # columns: TMA loads boxes that start elsewhere at half the rate
SHORTEST = 256  # tokens of a piece: fewer do not pay for a partial sum
# Costs are in loads of a tile of 64 tokens: TMA takes 122 ns for one on one SM.
PRODUCTS = 0.75  # products of a tile in a step, whether empty or not: 90 ns
PARTIAL = 9  # a tile of a partial sum, 16 KB, written and read: eight take 6 to 10 us


class Half(NamedTuple):
    """Up to four tiles of a slice."""

    slice: int
    places: list[int]


class Item(NamedTuple):
    """Two halves. Shared places are the last of the first half and the first of the second."""

    first: Half
    second: Half

    @property
    def slices(self) -> list[int]:
        """Return the slices whose dY is loaded."""
        return sorted({half.slice for half in self})

    @property
    def places(self) -> list[int]:
        """Return the places whose X is loaded; the places of a half are neighbours."""
        mine = self.first.places
        return mine + [place for place in self.second.places if place not in mine]

    @property
    def starts(self) -> list[int]:
        """Return the index in `places` of each half's first place."""
        return [self.places.index(half.places[0]) if half.places else 0 for half in self]

    @property
    def loads(self) -> int:
        """Return the tiles of dY and X that a step loads."""
        return len(self.slices) + len(self.places)

    @property
    def tiles(self) -> int:
        """Return the tiles of dW that the item sums."""
        return sum(len(half.places) for half in self)

    def cost(self, wide: int) -> float:
        """Return the cost of a step of 64 tokens: the larger of its loads and its products."""
        return max(self.loads, PRODUCTS * wide * sum(bool(half.places) for half in self))


class Piece(NamedTuple):
    """The steps share, share + of, share + 2 of, ... of an item; all steps if of = 1."""

    item: int
    share: int
    of: int


@dataclass(frozen=True)
class Work:
    """The arrays that bsr_wgrad.cu reads.

    loads     int32 [pieces, 12]         struct Loads of each piece, worker by worker
    sums      int32 [pieces + 1, 2, 12]  struct Sums of each half; the last is read, not used
    starts    int32 [workers + 1]        first piece of each worker
    partials  number of partial sums of the items that are cut
    tiles     of a stage
    last      predicted end of the last worker, in loads of a tile
    """

    loads: Ints
    sums: Ints
    starts: Ints
    partials: int
    tiles: int
    last: float


def work_of(pattern: Bsr, m: int, depth: int, wide: int, workers: int) -> Work:
    """Divide the sums over m tokens, in steps of `depth`, among workers. Raises FormatError.

    `wide` tiles to a half: 4 or 2.
    """
    where, steps = tiles_of(pattern), -(-m // depth)
    down, across = sides_of(pattern)
    items = items_of(where >= 0, wide)
    costs = np.array([item.cost(wide) for item in items]) * (depth / SIDE)
    partials = np.array([item.tiles for item in items]) * PARTIAL
    lists, last = shared_out(costs, partials, steps, -(-SHORTEST // depth), workers)
    pieces = np.array([piece for assigned in lists for piece in assigned], np.int64).reshape(-1, 3)
    starts = np.array([0, *accumulate(len(assigned) for assigned in lists)], np.int32)
    cut = np.zeros(len(items), np.int64)
    cut[pieces[:, 0]] = np.where(pieces[:, 2] > 1, pieces[:, 2], 0)
    first = cut.cumsum() - cut

    tiles = next(t for t in TILES if all(fits(item, t, wide) for item in items))
    loads = np.full((len(pieces), 12), -1, np.int32)
    sums = np.zeros((len(pieces) + 1, 2, 12), np.int32)
    for at, (index, share, of) in enumerate(pieces.tolist()):
        item, slices, count = items[index], items[index].slices, -(-(steps - share) // of)
        loads[at, : len(item.places)] = np.array(item.places) * across // ALIGNED * ALIGNED
        starts_of = np.array(slices) * down // ALIGNED * ALIGNED
        loads[at, tiles - len(slices) : tiles] = starts_of + 1
        loads[at, 9:] = share, count, of
        # All pieces of an item together add 2^31.
        adds = 1 if share or of == 1 else 2**31 - (of - 1)
        for half, (row, places), start in zip(sums[at], item, item.starts, strict=True):
            half[:4] = tiles - len(slices) + slices.index(row), start, count, len(places)
            half[4:8] = first[index], share, of, adds
            half[8 : 8 + len(places)] = where[row, places]
    return Work(loads, sums, starts, int(cut.sum()), tiles, last)


def fits(item: Item, tiles: int, wide: int) -> bool:
    """Return whether a stage holds the item, and `wide` tiles from the start of each half."""
    return item.loads <= tiles and max(item.starts) + wide <= tiles


def sides_of(w: Bsr) -> tuple[int, int]:
    """Return height and width of a tile, or 0 for a side that no tile divides."""
    down, across = (next((s for s in SIDES if side and not side % s), 0) for side in w.block)
    return down, across


def tiles_of(w: Bsr) -> Ints:
    """Return the position of each tile, [slices, places]; -1: no tile.

    The position is four times its offset in the values, in 8 elements, plus 2 if it starts eight
    rows later than its box of dY, plus 1 if it starts eight columns later than its box of X.

    The part of an edge block outside W is stored, so its tiles count too.
    """
    block_rows, block_columns = checked(w)
    (n, k), (r, c) = w.shape, w.block
    down, across = sides_of(w)
    high, wide = r // down, c // across
    block, i, j = np.ix_(range(len(block_rows)), range(high), range(wide))
    slices, places = block_rows[block] * high + i, block_columns[block] * wide + j
    where = np.full((-(-n // r) * high, -(-k // c) * wide), -1)
    late = slices * down % ALIGNED // 8 * 2 + places * across % ALIGNED // 8
    where[slices, places] = ((block * r + i * down) * c + j * across) // 8 * 4 + late
    return where


def items_of(there: NDArray[np.bool_], wide: int) -> list[Item]:
    """Put each tile of [slices, places] into one item, at most `wide` tiles to a half."""
    left, items = there.copy(), []
    for least in range(wide, 0, -1):
        while shared := list(_sharing(left, least, wide)):
            items += shared
    return items + _unshared(left, wide)


def _sharing(left: NDArray[np.bool_], least: int, wide: int) -> Iterator[Item]:
    """Pair the slices; yield items of at least `least` shared places, and clear them in `left`."""
    rows = np.flatnonzero(left.any(1))
    for pair in rows[matched(left[rows].astype(np.float32))]:
        both = np.flatnonzero(left[pair].all(0)).tolist()
        for at in range(0, len(both) - least + 1, wide):
            common = both[at : at + wide]
            a, b = (
                np.flatnonzero(left[row] & ~left[other])[: wide - len(common)].tolist()
                for row, other in (pair, pair[::-1])
            )
            left[pair[0], a + common] = left[pair[1], common + b] = False
            yield Item(Half(int(pair[0]), a + common), Half(int(pair[1]), common + b))


def _unshared(left: NDArray[np.bool_], wide: int) -> list[Item]:
    """Make items of two halves of a slice, then of halves of two slices, most with fewest tiles."""
    items, alone = [], []
    for row in np.flatnonzero(left.any(1)).tolist():
        places = np.flatnonzero(left[row]).tolist()
        halves = [Half(row, places[at : at + wide]) for at in range(0, len(places), wide)]
        items += [Item(*pair) for pair in zip(halves[::2], halves[1::2], strict=False)]
        alone += halves[len(halves) // 2 * 2 :]
    alone.sort(key=lambda half: len(half.places))
    while alone:
        most = alone.pop()
        other = Half(most.slice, [])
        if alone and fits(Item(most, alone[0]), max(TILES), wide):
            other = alone.pop(0)
        items.append(Item(most, other))
    return items


def shared_out(
    costs: Floats, partials: Ints, steps: int, shortest: int, workers: int
) -> tuple[list[list[Piece]], float]:
    """Return the pieces of each worker that has any, and the predicted end of the last worker.

    costs     [items] cost of a step
    partials  [items] cost of a partial sum
    steps     of every item
    shortest  fewest steps of a piece of a cut item

    A worker sums its pieces of cut items before its whole items.
    """
    whole, _ = _dealt(costs * steps, workers, np.inf)
    assigned, rest = _dealt(costs * steps, workers, costs.sum() * steps / workers)
    none: list[list[Piece]] = [[] for _ in whole]
    ways = [(none, whole)]
    if 0 < len(rest) <= workers:
        ways.append((_split(rest, costs, steps, shortest, assigned), assigned))
    lists = [
        [pieces + [Piece(item, 0, 1) for item in items] for pieces, items in zip(*way, strict=True)]
        for way in ways
    ]

    def end(pieces: list[Piece]) -> float:
        apart = sum(partials[piece.item] for piece in pieces if piece.of > 1)
        return float(apart + sum(costs[p.item] * (-(-steps // p.of)) for p in pieces))

    last, best = min(((max(map(end, way)), way) for way in lists), key=lambda way: way[0])
    return [pieces for pieces in best if pieces] or [[]], last


def _dealt(costs: Floats, workers: int, most: float) -> tuple[list[list[int]], list[int]]:
    """Assign items, longest first, to the least loaded worker; also return those beyond `most`."""
    assigned: list[list[int]] = [[] for _ in range(workers)]
    loads, rest = [(0.0, worker) for worker in range(workers)], []
    for item in np.argsort(-costs, kind="stable").tolist():
        load, worker = loads[0]
        if load + costs[item] > most:
            rest.append(item)
        else:
            assigned[worker].append(item)
            heapreplace(loads, (load + costs[item], worker))
    return assigned, sorted(rest)


def _split(
    items: list[int], costs: Floats, steps: int, shortest: int, assigned: list[list[int]]
) -> list[list[Piece]]:
    """Cut items, always the one with the longest pieces, until each worker has a piece.

    Long pieces go to workers with short lists.
    """
    parts = dict.fromkeys(items, 1)
    for _ in range(len(assigned) - len(items)):
        longest = max(items, key=lambda item: costs[item] / parts[item])
        if steps < shortest * (parts[longest] + 1):
            break
        parts[longest] += 1
    cut = [Piece(item, share, of) for item, of in parts.items() for share in range(of)]
    cut.sort(key=lambda piece: -costs[piece.item] / piece.of)
    pieces: list[list[Piece]] = [[] for _ in assigned]
    least_first = np.argsort([costs[own].sum() for own in assigned], kind="stable").tolist()
    for piece, worker in zip(cut, least_first, strict=False):
        pieces[worker].append(piece)
    return pieces
