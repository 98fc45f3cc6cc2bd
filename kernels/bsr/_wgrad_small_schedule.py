"""Decide for bsr_wgrad_small.cu which cells of dW are summed together, and by which worker.

    strip   32 columns of dY or of X           cell   32 x 32 of dW: a strip of dY x a strip of X
    unit    two strips of dY x two of X, or one: up to four cells, which an instruction sums
    item    up to 2 * `units` units; a step loads each strip that one of them reads
    piece   an item, or every second, third, ... of its steps

Strips lie side by side, and a block is in all cells that it touches; cells without a block are left
out. If blocks are 24 wide, each has a separate strip, so that no block is in two.

             strips of X  0 1 2 3 4 5 6 7      an item takes few strips of X, and the strips of dY
    strip of dY  0        # . # . . # . .      in which these have the most cells
                 1        . . . # . . # .
                 2        # . # . . # . #      dY 0 2 3, X 0 2 5 7: 9 cells for 7 loads, as units
                 3        # . # . # . . .      (0, 2) x (0, 2), (3) x (0, 2), (0, 2) x (5, 7)

Loads are the bottleneck, and an item of 32 cells loads 12 strips if it is a rectangle without a
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

Pieces are assigned as in _wgrad_schedule.py.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.work_list import Ints
from sparsebench.kernels.bsr._wgmma_pairs import checked, matched
from sparsebench.kernels.bsr._wgrad_schedule import SHORTEST, Piece, shared_out

WIDTH = 32  # columns of a strip
PIECE = 8  # side of the squares that have one position in the values
ROW_BYTES = 2 * WIDTH
ALIGNED = 16  # columns, 32 bytes: loads that start elsewhere take twice as long
ACROSS = 0.45  # part of an item's strips that are of X
AHEAD = 2  # rows to examine for each one that is taken
EVEN = 0x5555555555555555
WORSE = 0.95
# Costs are in loads of a strip of 64 tokens: TMA takes 61 ns for one on one SM.
PRODUCTS = 1.2  # cost of a unit in a step, used or not: 73 ns
PARTIAL = 18  # a unit of a partial sum, 16 KB, written and read
AT_A_TIME = 64  # tokens that costs refer to


@dataclass(frozen=True)
class Item:
    """The cells that one worker sums at a time.

    dy, x  strips to load, in this order
    units  two positions in `dy` and two in `x`, in ascending order; a unit of one strip has it
           twice. Then a bit for each cell that the item has: first and second strip of dY with
           the first of X, then with the second
    """

    dy: list[int]
    x: list[int]
    units: list[tuple[int, int, int, int, int]]

    @property
    def loads(self) -> int:
        """Return the number of strips."""
        return len(self.dy) + len(self.x)


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


@dataclass(frozen=True)
class Work:
    """The arrays that bsr_wgrad_small.cu reads.

    loads     int32 [pieces, room + 4]          struct Loads of each piece, worker by worker
    sums      int32 [pieces, 2, 8 + 2 * units]  struct Sums of each half
    places    int32 [2 * units, 8, 4]           struct Places of each unit with its first
                                                strip of X, and with the second
    starts    int32 [workers + 1]               first piece of each worker
    partials  number of partial sums of the items that are cut
    last      predicted end of the last worker, in loads of a strip
    """

    loads: Ints
    sums: Ints
    places: Ints
    starts: Ints
    partials: int
    last: float


def room_of(strips: int) -> int:
    """Return the room in a stage: each of four warps loads the same number of strips."""
    return -(-strips // 4) * 4


def last_of(items: list[Item], m: int, units: int, workers: int) -> float:
    """Return the predicted end of the last worker, in loads of a strip."""
    return _shared_out(items, m, AT_A_TIME, units, workers)[1]


def _shared_out(
    items: list[Item], m: int, depth: int, units: int, workers: int
) -> tuple[list[list[Piece]], float]:
    costs = np.array([max(float(item.loads), 2 * units * PRODUCTS) for item in items])
    partials = np.array([len(item.units) for item in items]) * PARTIAL
    steps, shortest = -(-m // depth), -(-SHORTEST // depth)
    return shared_out(costs * (depth / AT_A_TIME), partials, steps, shortest, workers)


def work_of(
    cells: Cells, items: list[Item], m: int, depth: int, units: int, room: int, workers: int
) -> Work:
    """Divide the sums over m tokens, in steps of `depth`, among workers.

    A warpgroup has `units` units: 12, 8 or 4.
    """
    steps = -(-m // depth)
    lists, last = _shared_out(items, m, depth, units, workers)
    pieces = np.array([piece for given in lists for piece in given], np.int64).reshape(-1, 3)
    starts = np.array([0, *accumulate(len(given) for given in lists)], np.int32)
    of_item, share, parts = pieces.T
    cut = np.zeros(len(items), np.int64)
    cut[of_item] = np.where(parts > 1, parts, 0)
    first = cut.cumsum() - cut

    count = -(-(steps - share) // parts)
    loads = np.zeros((len(pieces), room + 4), np.int32)
    loads[:, :room] = _boxes(cells, items, room)[of_item]
    loads[:, room : room + 3] = np.stack([share, count, parts], 1)
    # All pieces of an item together add 2^31.
    adds = np.where((share > 0) | (parts == 1), 1, 2**31 - (parts - 1))
    sums = _halves(items, depth, units)[of_item]
    sums[:, :, 1:6] = np.stack([count, first[of_item], share, parts, adds], 1)[:, None]
    return Work(loads, sums, _places(cells, items), starts, int(cut.sum()), last)


def _boxes(cells: Cells, items: list[Item], room: int) -> Ints:
    """Return the first column of each strip, * 2, + 1 if it is of dY: [items, room]."""
    boxes = np.full((len(items), room), -1, np.int32)
    for mine, item in zip(boxes, items, strict=True):
        mine[: item.loads] = [*(cells.dy[item.dy] * 2 + 1), *(cells.x[item.x] * 2)]
    return boxes


def _halves(items: list[Item], depth: int, units: int) -> Ints:
    """Return struct Sums without the fields that depend on the piece: [items, 2].

    The first half of an item has as many units as the second, or one more.
    """
    of_item = np.array([len(item.units) for item in items], np.int64)
    counts = np.stack([of_item - of_item // 2, of_item // 2], 1).reshape(-1)
    firsts = counts.cumsum() - counts
    halves = np.zeros((len(counts), 8 + 2 * units), np.int32)
    halves[:, 0], halves[:, 6] = counts, 2 * firsts

    half = np.arange(len(counts)).repeat(counts)
    at = 8 + 2 * (np.arange(len(half)) - firsts[half])
    units_of = [(a, b, len(i.dy) + c, len(i.dy) + d) for i in items for a, b, c, d, _ in i.units]
    strips = np.array(units_of, np.int64).reshape(-1, 4) * (depth * ROW_BYTES >> 4)
    # The low words of two descriptors (smem_descriptor in hopper.cuh).
    halves[half, at] = strips[:, 0] | strips[:, 1] - strips[:, 0] << 16
    halves[half, at + 1] = strips[:, 2] | strips[:, 3] - strips[:, 2] << 16
    return halves.reshape(len(items), 2, halves.shape[1])


def _places(cells: Cells, items: list[Item]) -> Ints:
    """Return the position of each 8 x 8 of the items' units: [2 * units, 8, 4]."""
    strips = [(i.dy[a], i.dy[b], i.x[c], i.x[d], has) for i in items for a, b, c, d, has in i.units]
    *four, has = np.array(strips, np.int64).reshape(-1, 5).T
    places = np.empty((len(strips), 2, 2, 4, 4), np.int32)
    for at in range(4):
        mine = cells.places[four[at % 2], :, four[2 + at // 2]]
        places[:, at // 2, at % 2] = np.where((has >> at & 1)[:, None, None], mine, -1)
    return places.reshape(-1, 8, 4)


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
    if alone := WIDTH // 2 < side < WIDTH:
        firsts = np.arange(0, side * blocks, side) // ALIGNED * ALIGNED
    else:
        firsts = np.arange(0, side * blocks, WIDTH)
    at = firsts[:, None] + np.arange(0, WIDTH, PIECE)
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
