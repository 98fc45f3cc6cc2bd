"""Cut W into the tiles that bsr_strips.cu multiplies, and list its steps.

    tile    HEIGHT features x DEPTH of k: a block, or an equal part of a larger one
    strip   the columns of X that a tile reads
    piece   elements of a tile's row that are packed together: 8 (16 bytes), or fewer if blocks are
            not a multiple of 8 columns wide

If no tile divides a block (12, 20, 104), tiles are as high as a few block rows, 16 deep, and begin
at multiples of 16 columns. Elements are gathered into them when W is packed, with zeros where there
is no block:

    blocks of 12    |  0   |  1   |  2   |  3   |        two block rows are the 24 rows of a tile
    their tiles     |   0    |   1    |   2    |  ...    16 columns; strips have two of them

Random blocks fill this part of the tiles, by the part of the blocks that is stored:

    12, in tiles of 24 x 16    0.2: 0.60    0.12: 0.40    0.1: 0.34    0.05: 0.18
    20, in tiles of 40 x 16         0.49          0.33         0.30          0.15
    10, in tiles of 40 x 16         0.87          0.69         0.64          0.38
"""

from dataclasses import dataclass
from math import gcd, lcm

import numpy as np
import torch
from torch import Tensor

from sparsebench.formats._format import offsets_of, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.made_once import made_once
from sparsebench.kernels._common.work_list import Ints
from sparsebench.kernels.bsr._small_steps import SHARE, StepLayout, StepLists, cut, listed
from sparsebench.kernels.bsr._wgmma_lists import checked

HEIGHTS, DEPTHS = range(16, 97, 8), (*range(16, 65, 8), 80)  # sides of a tile
LEAST_GATHERED = 10  # side of a block that tiles do not divide
UNEVEN_HEIGHT = 32  # height of a tile, if none holds whole blocks
SUMS = 192  # fp32 per thread, at most: a consumer has 224 registers
# KB of tiles in a step: 6, 5, 4 or 3 stages with 32 KB of X; 26 KB give 3 stages with 48.
ROOMS = 5, 12, 23, 26, 42
STRIP_BYTES = 32 * 1024  # bytes of the strips of a step, if it has several
PIECE = 8  # columns in 16 bytes
DEEP = 16  # columns of a tile in an aligned strip


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens, rows  of a work item: tokens, and rows of tiles of each warpgroup
    warpgroups    that share an item: 1 or 2
    across        tiles side by side in a strip. 1: strips start where tiles do and are as wide.
                  2: strips of 32 columns at multiples of 32, and tiles 16 deep
    """

    tokens: int
    rows: int
    warpgroups: int
    across: int = 1

    @property
    def threads(self) -> int:
        """Return the threads of a CTA: the consumer warpgroups and one of producers."""
        return 128 * (self.warpgroups + 1)


@dataclass(frozen=True)
class Tiles:
    """W, or W.T for dX, cut into tiles.

    height, depth  of a tile: features of Y, columns of X
    row, column    [tiles] of each tile, in tiles
    rows, columns  of tiles in W
    pieces         int32 [tiles, height, depth / piece]: the position of each piece in the blocks;
                   -1 for zeros
    across         tiles side by side in a strip
    piece          columns of a piece
    """

    height: int
    depth: int
    row: Ints
    column: Ints
    rows: int
    columns: int
    pieces: Tensor
    across: int = 1
    piece: int = PIECE

    def lists(self, config: Config, m: int, workers: int) -> StepLists:
        """Unite the rows and list the steps."""
        return self.listed(self.layout(config, m, workers))

    def layout(self, config: Config, m: int, workers: int) -> StepLayout:
        """Return how a step holds tiles, in as many groups as fill the last round of items."""
        size, tiles = config.rows * config.warpgroups, -(-m // config.tokens)
        least = -(-self.rows // size)
        rounds = -(-least * tiles // workers)
        return StepLayout(
            rows=size,
            warpgroups=config.warpgroups,
            unit=1,
            across=self.across,
            strips=strips_of(self.depth, config.tokens, self.across),
            block_bytes=2 * self.height * self.depth,
            rooms=ROOMS,
            parity=self.depth % 16 > 0,
            groups=min(self.rows, rounds * workers // tiles),
        )

    @made_once
    def listed(self, layout: StepLayout) -> StepLists:
        """Return the lists of a layout."""
        strips = -(-self.columns // self.across)
        return listed(self.row, self.column, self.rows, strips, layout)

    def possible(self, config: Config) -> bool:
        """Return whether registers hold the sums, and a step all tiles that a strip may have."""
        tiles = config.rows * self.across
        most = tiles * config.warpgroups * 2 * self.height * self.depth
        fits = most <= ROOMS[-1] * 1024 and tiles <= SHARE and config.across == self.across
        return fits and config.tokens // 64 * config.rows * self.height // 2 <= SUMS


def height_of(size: int) -> int | None:
    """Return the height of a tile for a side of blocks, or None: the largest that divides it.

    If none does, the least that holds whole blocks.
    """
    sides = [side for side in HEIGHTS if size and size % side == 0]
    whole = (side for side in HEIGHTS if side % lcm(size, PIECE) == 0)
    return max(sides) if sides else next(whole, UNEVEN_HEIGHT) if _is_gathered(size) else None


def depth_of(size: int) -> int | None:
    """Return the depth of a tile for a side of blocks, or None.

    The one that divides the side and wastes the fewest loaded bytes. If none does, that of aligned
    strips.
    """
    sides = [side for side in DEPTHS if size and size % side == 0]
    without = DEEP if _is_gathered(size) else None
    return max(sides, key=lambda side: (side / row_bytes(side), side), default=without)


def _is_gathered(size: int) -> bool:
    """Return whether blocks of this side may be gathered into tiles that do not divide them."""
    return size >= LEAST_GATHERED and size % 2 == 0


def boxes_of(depth: int, across: int = 1) -> list[int]:
    """Return the columns of each box of a strip: one box, or two for more than 64 columns."""
    columns = across * (depth + depth % 16)
    first = -(-columns // 32) * 16 if columns > 64 else columns
    return [box for box in (first, columns - first) if box]


def row_bytes(depth: int, across: int = 1) -> int:
    """Return the cost of a row of a strip in bytes: TMA takes as long for fewer than 64."""
    return sum(max(2 * box, 64) for box in boxes_of(depth, across))


def strips_of(depth: int, tokens: int, across: int = 1) -> int:
    """Return how many strips of `across` tiles a step holds: 1, 2 or 4, at most 8 places."""
    fit = STRIP_BYTES // (tokens * sum(cuda.pitch(2 * box) for box in boxes_of(depth, across)))
    return min(max(fit, 1), 4, 8 // across)


@made_once
def tiles_of(w: Bsr, transposed: bool, across: int = 1) -> Tiles:
    """Cut W, or its transpose, into tiles. Raises FormatError.

    With `across` > 1, and if no tile divides a block, tiles are 16 deep, at multiples of 16
    columns, wherever blocks begin.
    """
    checked(w)
    (n, k), (blocks, r, c) = w.shape, w.values.shape
    if transposed:
        (n, k), (r, c) = (k, n), (c, r)
    height, depth, piece = height_of(r), depth_of(c), gcd(c, PIECE)
    assert height is not None
    assert depth is not None
    # The numbers of the pieces are cut and sorted like the values.
    pieces = torch.arange(blocks * r * c // piece, dtype=torch.int32).view(blocks, r, c // piece)
    rows, columns = rows_of(w.offsets.cpu()), w.columns.cpu().long()
    if transposed:
        rows, columns = columns, rows
    if across > 1 or r % height or c % depth:
        return _aligned((n, k), rows, columns, pieces, height, piece)
    if transposed:
        order = (rows * -(-k // c) + columns).argsort()
        rows, columns, pieces = rows[order], columns[order], pieces[order]
    numbered = Bsr((n, k // 8), offsets_of(rows, -(-n // r)), columns.int(), pieces)
    tiles = cut(numbered, height, depth // 8)
    row, column = checked(tiles)
    return Tiles(height, depth, row, column, -(-n // height), -(-k // depth), tiles.values)


def _aligned(
    shape: tuple[int, int], rows: Tensor, columns: Tensor, pieces: Tensor, height: int, piece: int
) -> Tiles:
    """Gather the pieces [blocks, r, c / piece] of blocks at these places into tiles 16 deep."""
    (n, k), (_, r, across) = shape, pieces.shape
    down, deep, each = -(-n // height), -(-k // DEEP), DEEP // piece
    row = rows[:, None, None] * r + torch.arange(r)[:, None]
    column = columns[:, None, None] * across + torch.arange(across)
    inside = (row < n) & (column < k // piece)
    row, column = (a.expand_as(pieces)[inside] for a in (row, column))
    cell = row // height * deep + column // each
    filled = torch.zeros(down * deep, dtype=torch.bool)
    filled[cell] = True
    number = filled.cumsum(0) - 1
    united = torch.full((int(filled.sum()), height, each), -1, dtype=torch.int32)
    united[number[cell], row % height, column % each] = pieces[inside]
    place = filled.nonzero()[:, 0].numpy()
    return Tiles(height, DEEP, *np.divmod(place, deep), down, deep, united, across=2, piece=piece)


def packed_order(tiles: Tiles, lists: StepLists) -> Tensor:
    """Return the position in the blocks of each piece of the packed W: int32; zeros: -1.

    Tiles are in the order of the steps. In a tile, all features of the first 8 of k come first.
    """
    pieces = tiles.pieces[torch.from_numpy(lists.order)]
    in_steps: Tensor = pieces.unflatten(2, (-1, PIECE // tiles.piece)).transpose(1, 2)
    return in_steps.flatten()
