"""Weight gradient in BSR of small blocks, CUDA C++ for Hopper: dW = dY[m, n].T @ X[m, k].

bsr_wgrad_small.cu is the kernel and draws its work: two warpgroups sum cells of 32 x 32, gathered
from anywhere in dW so that they share their loads. The sides of blocks are multiples of 8; blocks
of 8 and 16 are summed with their neighbours in a cell. This file decides which cells are summed
together, and _wgrad.py assigns them to CTAs.

    strip   32 columns of dY or of X           cell   32 x 32 of dW: a strip of dY x a strip of X
    unit    two strips of dY x two of X, or one: up to four cells, which an instruction sums
    item    up to 2 * `units` units; a step loads each strip that one of them reads

Strips lie side by side, and a block is in all cells that it touches; cells without a block are left
out. If blocks are 24 wide, each has a separate strip, so that no block is in two.

             strips of X  0 1 2 3 4 5 6 7      an item takes few strips of X, and the strips of dY
    strip of dY  0        # . # . . # . .      in which these have the most cells
                 1        . . . # . . # .
                 2        # . # . . # . #      dY 0 2 3, X 0 2 5 7: 9 cells for 7 loads, as units
                 3        # . # . # . . .      (0, 2) x (0, 2), (3) x (0, 2), (0, 2) x (5, 7)

An item of 32 cells loads 12 strips if it is a rectangle without a
hole. So items are built greedily. The strip of X with the most cells left comes first, then the
strip with the most cells in the rows of those before it, until ACROSS of the strips are of X; the
most similar ones form units together. Strips of dY are taken by the number of their cells while
units are left. The same strips of X make further items as long as these load at most 1 / WORSE as
much per cell as the first did. Uniform random cells, 128 x 128:

                                             strips that a cell loads        cells in a unit
    units of a warpgroup, strips at most     50 %   80 %   90 %   95 %       sparsity as before
                   6               20        0.43   0.56   0.69   0.86       3.1  2.8  2.6  2.3
                   4               12        0.51   0.63   0.76   0.93       3.2  2.8  2.6  2.4
                   2                8        0.60   0.73   0.85   1.02       3.5  3.0  2.8  2.5
    32 cells, strips of dY paired once       0.56   0.89   0.96   1.1
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.declarations import record
from sparsebench.kernels._common.work_list import Ints, Records, fill
from sparsebench.kernels.bsr._call import BsrCall
from sparsebench.kernels.bsr._wgmma_lists import checked, matched
from sparsebench.kernels.bsr._wgrad import (
    ALIGNED,
    STRIP,
    STRIP_BYTES,
    Division,
    Gradient,
    Item,
    ItemList,
    Prediction,
    WgradWork,
    room_of,
    strips_of,
    unsupported_sizes,
    work_from,
)

PIECE = 8  # side of the squares that have one position in the values
UNITS = 2, 4, 6
FEWEST, MOST = 5, 22  # strips of an item
GROWTH = 0.3  # a cell loads about strips ** -0.3
DEEP = 12  # strips: with more, steps of 64 tokens would leave three stages or fewer
ROUNDS = 3  # items of a worker, at most, for which strips are looked for
STEPS = 3  # rounds of the search that starts from the best of these
ACROSS = 0.45  # part of an item's strips that are of X
AHEAD = 2  # rows to examine for each one that is taken
EVEN = 0x5555555555555555
WORSE = 0.95
# Costs are in loads of a strip.
PRODUCTS = 1.2  # cost of a unit in a step, used or not: 73 ns
PARTIAL = 18  # a unit of a partial sum, 16 KB, written and read


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    depth   tokens in a step: 64 or 32
    units   that a warpgroup sums at a time, each of two cells of 32 x 32: 12, 8, 6 or 4
    strips  that an item loads at most: fewer strips make more items to distribute
    """

    depth: int
    units: int
    strips: int


def tried(prediction: Prediction) -> list[Config]:
    """Return a few.

    Items with as many strips as there is room for need the fewest loads. Items with fewer strips
    fill whole rounds of all workers, and multiply less if their cells fit into fewer units.
    """
    widest, workers = config_of(UNITS[-1], MOST), prediction.workers
    items = prediction.list(widest).items
    units_of_items = [unit for item in items for unit in item.sums]
    cells = sum(has.bit_count() for *_, has in units_of_items)
    loads = sum(item.loads for item in items)
    filled = cells / max(1, len(units_of_items))
    configs = [widest]

    def add(units: int, strips: int) -> None:
        if FEWEST <= strips <= MOST:
            configs.append(config_of(units, strips))

    for rounds in range(1, ROUNDS + 1):
        # The number of strips at which there are `workers * rounds` items.
        even = int((loads * MOST**GROWTH / (workers * rounds)) ** (1 / (1 + GROWTH)))
        for strips in (max(FEWEST, even), max(FEWEST, even) + 1):
            mine = cells * strips / max(1, loads * (MOST / strips) ** GROWTH)
            enough = (units for units in UNITS if 2 * units * filled >= mine)
            add(next(enough, UNITS[-1]), strips)
    for _ in range(STEPS):
        best = min(configs, key=prediction.end)
        add(best.units, best.strips - 1)
        add(best.units, best.strips + 1)
    return configs


def config_of(units: int, strips: int) -> Config:
    """Return the configuration with the steps that leave enough stages."""
    return Config(64 if strips <= DEEP else 32, units, strips)


def listed(pattern: Bsr, config: Config) -> ItemList:
    """Return the items; the cost of a step is the larger of its loads and its products."""
    items = items_of(cells_of(pattern).there, config.units, config.strips)
    costs = np.array([max(float(item.loads), 2 * config.units * PRODUCTS) for item in items])
    return ItemList(items, costs, np.array([len(item.sums) for item in items]) * PARTIAL)


def written(pattern: Bsr, config: Config, listed: ItemList, division: Division) -> WgradWork:
    """Write the lists."""
    cells, room, units = cells_of(pattern), room_of(config.strips), config.units
    items, box = listed.items, (config.depth, STRIP)
    columns = strips_of(items, cells.dy, cells.x, room)
    return work_from(
        *("bsr_wgrad_small", division, columns, _halves(items, config.depth, units)),
        partial=units * 2 * 4 * STRIP * STRIP,
        boxes=(box, box),
        constants=(("UNITS", units), ("STRIPS", room)),
        places=_places(cells, items),
        width=(pattern.block[1],),
    )


@dataclass(frozen=True)
class Cells:
    """The blocks of W, in strips.

    dy, x    first column of each strip, of dY and of X
    places   [strips of dY, 4, strips of X, 4]: position of each 8 x 8 in the values, / 8, or -1
    """

    dy: Ints
    x: Ints
    places: Ints

    @property
    def there(self) -> NDArray[np.bool_]:
        """Return which cells contain a part of a block: bool [strips of dY, strips of X]."""
        return np.asarray((self.places >= 0).any((1, 3)))


def _halves(items: list[Item], depth: int, units: int) -> Records:
    """Return Sums [items, 2], without the fields that depend on the piece.

    The first half of an item has as many units as the second, or one more.
    """
    of_item = np.array([len(item.sums) for item in items], np.int64)
    counts = np.stack([of_item - of_item // 2, of_item // 2], 1).reshape(-1)
    firsts = counts.cumsum() - counts
    halves = np.zeros(len(counts), record("bsr_wgrad_small", "Sums", (("UNITS", units),)))
    fill(halves, units=counts, places=2 * firsts)

    half = np.arange(len(counts)).repeat(counts)
    at = half, np.arange(len(half)) - firsts[half]
    units_of = [(a, b, len(i.dy) + c, len(i.dy) + d) for i in items for a, b, c, d, _ in i.sums]
    strips = np.array(units_of, np.int64).reshape(-1, 4) * (depth * STRIP_BYTES >> 4)
    # The low words of two descriptors (smem_descriptor in wgmma.cuh).
    halves["operands"]["x"][at] = strips[:, 0] | strips[:, 1] - strips[:, 0] << 16
    halves["operands"]["y"][at] = strips[:, 2] | strips[:, 3] - strips[:, 2] << 16
    return halves.reshape(len(items), 2)


def _places(cells: Cells, items: list[Item]) -> Records:
    """Return the position of each 8 x 8 of the items' units: Places [2 * units]."""
    strips = [(i.dy[a], i.dy[b], i.x[c], i.x[d], has) for i in items for a, b, c, d, has in i.sums]
    *four, has = np.array(strips, np.int64).reshape(-1, 5).T
    places = np.empty((len(strips), 2, 2, 4, 4), np.int32)
    for at in range(4):
        mine = cells.places[four[at % 2], :, four[2 + at // 2]]
        places[:, at // 2, at % 2] = np.where((has >> at & 1)[:, None, None], mine, -1)
    return places.reshape(-1).view(record("bsr_wgrad_small", "Places"))


def cells_of(w: Bsr) -> Cells:
    """Return the cells of a matrix with blocks of any multiple of 8. Raises FormatError."""
    block_rows, block_columns = checked(w)
    (n, k), (r, c) = w.shape, w.block
    down, across = -(-n // r), -(-k // c)
    blocks = np.full((down + 1, across + 1), -1)  # a last row and column without a block
    blocks[block_rows, block_columns] = np.arange(len(block_rows))
    dy, (row, in_row) = _strips(r, down)
    x, (column, in_column) = _strips(c, across)
    block = blocks[row[:, :, None, None], column]
    place = (block * r + in_row[:, :, None, None]) * (c // PIECE) + in_column // PIECE
    return Cells(dy, x, np.where(block < 0, -1, place))


def _strips(side: int, blocks: int) -> tuple[Ints, tuple[Ints, Ints]]:
    """Return the first column of each strip, and block and offset of each 8 columns: [strips, 4].

    The block is -1 if the 8 columns belong to another strip or are beyond all blocks.
    """
    if alone := STRIP // 2 < side < STRIP:
        firsts = np.arange(0, side * blocks, side) // ALIGNED * ALIGNED
    else:
        firsts = np.arange(0, side * blocks, STRIP)
    at = firsts[:, None] + np.arange(0, STRIP, PIECE)
    mine = at // side == np.arange(blocks)[:, None] if alone else at < side * blocks
    return firsts, (np.where(mine, at // side, -1), np.where(mine, at % side, 0))


def items_of(there: NDArray[np.bool_], units: int, strips: int) -> list[Item]:
    """Put each cell of [strips of dY, strips of X] into one item.

    An item has up to 2 * `units` units, and loads up to `strips` strips.
    """
    left, items = there.astype(np.float32), []
    cells = left.sum(0)
    across = 2 * max(1, round(ACROSS * strips / 2))
    while len(x := _alike(left, cells, across)):
        bits = (left[:, x] @ (1 << np.arange(len(x))).astype(np.float32)).astype(np.int64)
        rows = np.flatnonzero(bits)
        masks = dict(zip(rows.tolist(), bits[rows].tolist(), strict=True))
        waiting = sorted(masks, key=lambda row: (-masks[row].bit_count(), _pairs(masks[row])))
        dense = 0.0
        while waiting:
            dy, number = _filled(waiting, masks, 2 * units, strips - len(x))
            if number < WORSE * dense * (len(dy) + len(x)):
                break
            dense = dense or number / (len(dy) + len(x))
            items.append(_item(dy, x, masks))
            left[np.ix_(dy, x)] = 0
            taken = set(dy)
            waiting = [row for row in waiting if row not in taken]
        cells[x] = left[:, x].sum(0)
    return items


def _alike(left: NDArray[np.float32], cells: NDArray[np.float32], most: int) -> list[int]:
    """Return up to `most` strips of X that have cells in the same strips of dY.

    The two most similar ones are neighbours, so that units have both.
    """
    weights, there = np.full(len(left), 0.1, np.float32), (cells > 0).astype(np.float32)
    strips: list[int] = []
    for _ in range(min(most, int(there.sum()))):
        best = int((there * (weights @ left)).argmax())
        strips.append(best)
        there[best] = 0
        weights += left[:, best]
    paired = matched(left[:, strips].T).reshape(-1).tolist()
    alone = set(range(len(strips))) - set(paired)
    return [strips[at] for at in (*paired, *alone)]


def _pairs(mask: int) -> int:
    """Return a bit for each pair of bits of which one is set."""
    return (mask | mask >> 1) & EVEN


def _filled(rows: list[int], masks: dict[int, int], units: int, most: int) -> tuple[list[int], int]:
    """Take rows while units are left, at most `most`; return them and the number of their cells.

    A second row with cells in a pair of columns needs no further unit.
    """
    taken, number, odd = [], 0, 0
    for row in rows[: AHEAD * most]:
        pairs = _pairs(masks[row])
        needs = (pairs & ~odd).bit_count()
        if needs <= units:
            taken.append(row)
            number += masks[row].bit_count()
            units -= needs
            odd ^= pairs
            if len(taken) == most:
                break
    return sorted(taken), number


def _item(dy: list[int], x: list[int], masks: dict[int, int]) -> Item:
    """Make units of two rows and a pair of columns; leave out columns without a cell."""
    used = 0
    for row in dy:
        used |= masks[row]
    strips: list[int] = []
    units: list[tuple[int, int, int, int, int]] = []
    for at in range(0, len(x), 2):
        columns = [i for i in (at, at + 1) if used >> i & 1]
        rows = [i for i, row in enumerate(dy) if masks[row] >> at & 3]
        one, other = len(strips), len(strips) + len(columns) - 1
        for i in range(0, len(rows), 2):
            pair = rows[i : i + 2]
            cells = [
                (masks[dy[row]] >> column & 1) << 2 * across + down
                for across, column in enumerate(columns)
                for down, row in enumerate(pair)
            ]
            units.append((pair[0], pair[-1], one, other, sum(cells)))
        strips += [x[i] for i in columns]
    return Item(dy, strips, units)


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    r, c = w.block
    if r % PIECE or c % PIECE or not r or not c:
        return f"expected blocks of a multiple of {PIECE} rows and columns, found {r}x{c}"
    return unsupported_sizes(w, call, max(r, c), len(w.columns) * r * (c // PIECE))


GRADIENT = Gradient("bsr_wgrad_small", Config, listed, tried, written)
KERNEL = GRADIENT.engine(unsupported_call)
