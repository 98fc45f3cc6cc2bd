"""Weight gradient in BSR in CUDA C++ for Hopper: dW = dY[m, n].T @ X[m, k] where W has blocks.

bsr_wgrad.cu is the kernel and draws its pipeline: four producer warps load by TMA, and two consumer
warpgroups sum four 64 x 64 tiles of dW each. The sides of blocks are multiples of 64, 56, 48 or
40. This file decides which tiles are summed together, and _wgrad.py assigns them to CTAs.

    tile    64 x 64 of a stored block; its slice is 64 rows of W, its place 64 columns. If the sides
            of blocks are not multiples of 64, a tile is smaller: 40, 48 or 56 (SIDES)
    half    up to four (or two) tiles of a slice: the sums of a warpgroup
    item    two halves; a step loads a tile of dY for each slice, a tile of X for each place

        places touched               items                half 0     half 1     loads of dY, X
          slice a   0 1 2 3 4 5 .      both share four    a 0 1 2 3  b 0 1 2 3  2 + 4
          slice b   0 1 2 3 . 5 6      both share one     a 4 5      b 5 6      2 + 3

A step of eight tiles of dW loads 6 tiles if the halves share all four places, and 9 if they share
none. So slices are paired by the places that they share. Four shared places make an item, and
slices are paired again until no two share four; then the same is done for three, two and one. The
rest makes items slice by slice. With uniform random blocks of 64, n = k = 4096, eight tiles load
6.4 at 50 % sparsity (7.3 if pairs were made once, 9 slice by slice), 7.3 at 80 %, 8.4 at 90 %.

Halves of two tiles load more for each tile of dW than halves of four, but they balance better and
need fewer partial sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.declarations import record
from sparsebench.kernels._common.work_list import Ints
from sparsebench.kernels.bsr._call import BsrCall
from sparsebench.kernels.bsr._wgmma_lists import SIDE, checked, matched
from sparsebench.kernels.bsr._wgrad import (
    ALIGNED,
    Division,
    Gradient,
    Item,
    ItemList,
    WgradWork,
    unsupported_sizes,
    work_from,
)

TILES = 6, 9  # tiles of a stage; 9 are one slice and eight places, or two and seven
SIDES = 64, 56, 48, 40  # sides of a tile: the first that divides a block's side
# Costs are in loads of a tile.
PRODUCTS = 0.75  # products of a tile in a step, whether empty or not: 90 ns
PARTIAL = 9  # a tile of a partial sum, 16 KB, written and read: eight take 6 to 10 us


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    depth  tokens in a step: 64, or 32 with twice as many stages
    wide   tiles of dW that a warpgroup sums at a time: 4 or 2
    """

    depth: int
    wide: int


CONFIGS = tuple(Config(depth, wide) for depth in (64, 32) for wide in (4, 2))


class Half(NamedTuple):
    """Up to four tiles of a slice."""

    slice: int
    places: list[int]


def listed(pattern: Bsr, config: Config) -> ItemList:
    """Return the items; the cost of a step is the larger of its loads and its products."""
    items = items_of(tiles_of(pattern) >= 0, config.wide)
    tiles = np.array([[len(half.places) for half in item.sums] for item in items]).reshape(-1, 2)
    loads = np.array([item.loads for item in items])
    costs = np.maximum(loads, PRODUCTS * config.wide * (tiles > 0).sum(1))
    return ItemList(items, costs, PARTIAL * tiles.sum(1))


def written(pattern: Bsr, config: Config, listed: ItemList, division: Division) -> WgradWork:
    """Write the lists."""
    where, (down, across), wide = tiles_of(pattern), sides_of(pattern), config.wide
    items = listed.items
    tiles = next(t for t in TILES if all(fits(item, t, wide) for item in items))
    columns = np.full((len(items), max(TILES)), -1)
    sums = np.zeros((len(items), 2), record("bsr_wgrad", "Sums"))
    for mine, halves, item in zip(columns, sums, items, strict=True):
        mine[: len(item.x)] = np.array(item.x) * across // ALIGNED * ALIGNED
        at = tiles - len(item.dy)  # tiles of dY are the last of a stage
        mine[at:tiles] = np.array(item.dy) * down // ALIGNED * ALIGNED + 1
        for half, (row, places), start in zip(halves, item.sums, starts_of(item), strict=True):
            half["dy"], half["x"] = at + item.dy.index(row), start
            half["tiles"], half["out"][: len(places)] = len(places), where[row, places]
    work = work_from(
        *("bsr_wgrad", division, columns, sums),
        partial=wide * 2 * SIDE * SIDE,
        boxes=((config.depth, down + down % ALIGNED), (config.depth, across + across % ALIGNED)),
        constants=(
            *(("HEIGHT", down), ("WIDTH", across), ("TILES", tiles), ("WIDE", wide)),
            *(("SIDE", SIDE), ("BOXES", max(TILES))),
        ),
        width=(pattern.block[1],),
    )
    # One more is read, and not used.
    return replace(work, sums=np.concatenate([work.sums, np.zeros_like(work.sums, shape=(1, 2))]))


def starts_of(item: Item) -> list[int]:
    """Return the index in `x` of each half's first place."""
    return [item.x.index(half.places[0]) if half.places else 0 for half in item.sums]


def fits(item: Item, tiles: int, wide: int) -> bool:
    """Return whether a stage holds the item, and `wide` tiles from the start of each half."""
    return item.loads <= tiles and max(starts_of(item)) + wide <= tiles


def sides_of(w: Bsr) -> tuple[int, int]:
    """Return height and width of a tile, or 0 for a side that no tile divides."""
    down, across = (next((s for s in SIDES if side and not side % s), 0) for side in w.block)
    return down, across


def tiles_of(w: Bsr) -> Ints:
    """Return the position of each tile, [slices, places]; -1: no tile. Raises FormatError.

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
            yield _item(Half(int(pair[0]), a + common), Half(int(pair[1]), common + b))


def _item(first: Half, second: Half) -> Item:
    """Return an item. Shared places are the last of the first half and the first of the second."""
    others = [place for place in second.places if place not in first.places]
    return Item(sorted({first.slice, second.slice}), first.places + others, [first, second])


def _unshared(left: NDArray[np.bool_], wide: int) -> list[Item]:
    """Make items of two halves of a slice, then of halves of two slices, most with fewest tiles."""
    items, alone = [], []
    for row in np.flatnonzero(left.any(1)).tolist():
        places = np.flatnonzero(left[row]).tolist()
        halves = [Half(row, places[at : at + wide]) for at in range(0, len(places), wide)]
        items += [_item(*pair) for pair in zip(halves[::2], halves[1::2], strict=False)]
        alone += halves[len(halves) // 2 * 2 :]
    alone.sort(key=lambda half: len(half.places))
    while alone:
        most = alone.pop()
        paired = bool(alone) and fits(_item(most, alone[0]), max(TILES), wide)
        items.append(_item(most, alone.pop(0) if paired else Half(most.slice, [])))
    return items


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    r, c = w.block
    if not all(sides_of(w)):
        return f"expected blocks of multiples of 40, 48, 56 or 64 rows and columns, found {r}x{c}"
    return unsupported_sizes(w, call, max(r, c), len(w.columns) * r * c // 2)


GRADIENT = Gradient("bsr_wgrad", Config, listed, lambda prediction: CONFIGS, written)
KERNEL = GRADIENT.engine(unsupported_call)
