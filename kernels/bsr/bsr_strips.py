"""Linear layer with blocks of odd sizes in CUDA C++ for Hopper: Y[m, n] = X[m, k] @ W[n, k].T.

bsr_strips.cu is the kernel and draws its pipeline. _small_steps.py decides which rows go together
and lists the steps. This file chooses a configuration and launches. It supports

    blocks    whose sides are divisible by a multiple of 8 from 16 to 64 (24, 40, 48, 56, 80, 96,
              24 x 48), fp16 or bf16; edge blocks may extend beyond W, and block rows may be empty
    sizes     k and n multiples of 8 (TMA's rows of 16 bytes), any m
    X         rows of any stride that is a multiple of 16 bytes

The kernel reads W packed, in tiles: blocks are cut into equal parts, as large as the kernel takes
(80 x 80 into 80 x 40, 96 x 96 into 96 x 48). No zero is stored. If the width of a tile is an odd
multiple of 8, the kernel multiplies eight columns of zeros, and a NaN of X in the eight columns
beside a block reaches the block's rows. Alternatively, blocks are cut at multiples of 16 columns,
wherever they begin, so that X comes in aligned strips; then tiles that a block half fills contain
zeros.

`DGRAD` is the same kernel over W.T: index and blocks are transposed when they are packed.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import offsets_of, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.tuned_table import Tuned, blocked, choose, multiprocessors
from sparsebench.kernels._common.work_list import WORKERS, Ints
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.kernels.bsr._launch import Plan, bind, kernel_of, too_large, unsupported_product
from sparsebench.kernels.bsr._small_steps import (
    END,
    LAST,
    NO_STRIP,
    SHARE,
    Layout,
    Lists,
    cut,
    listed,
    worked,
)
from sparsebench.kernels.bsr._wgmma_pairs import checked

HEIGHTS, DEPTHS = range(16, 97, 8), (*range(16, 65, 8), 80)  # of a tile
TOKENS, ROWS = (64, 128, 256), range(1, 9)  # of an item; of a warpgroup in it
SUMS = 192  # fp32 per thread, at most: a consumer has 224 registers
# KB of tiles in a step: 6, 5, 4 or 3 stages with 32 KB of X; 26 KB give 3 stages with 48.
ROOMS = 5, 12, 23, 26, 42
STRIP_BYTES = 32 * 1024  # of the strips of a step, if it has several
RING_BYTES = 222 * 1024  # of stages
SHARED_BYTES = RING_BYTES + 1024 + 2048 + 1536  # alignment to 1024 may take 1023; zeros
# Maps of x and of its last tile, starts; w, steps, rows, y; m and width.
ARGUMENTS = cuda.Layout("512s", f"{4 * WORKERS}s", *"PPPPii")
TRIED = 8  # configurations that a short search times: the best by the byte model
ALIGNED = 32  # columns of an aligned strip
TRIED_ALIGNED = 2  # configurations with aligned strips that a short search times
PIECE = 8  # columns in 16 bytes


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
    pieces         int32 [tiles, height, depth / 8]: the position of each 16 bytes in the blocks;
                   -1 for zeros
    across         tiles side by side in a strip
    """

    height: int
    depth: int
    row: Ints
    column: Ints
    rows: int
    columns: int
    pieces: Tensor
    across: int = 1

    def lists(self, config: Config, m: int, workers: int) -> Lists:
        """Unite the rows and list the steps, in as many groups as fill the last round of items."""
        size, tiles = config.rows * config.warpgroups, -(-m // config.tokens)
        least = -(-self.rows // size)
        rounds = -(-least * tiles // workers)
        layout = Layout(
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
        strips = -(-self.columns // self.across)
        return listed(self.row, self.column, self.rows, strips, layout)

    def possible(self, config: Config) -> bool:
        """Return whether registers hold the sums, and a step all tiles that a strip may have."""
        tiles = config.rows * self.across
        most = tiles * config.warpgroups * 2 * self.height * self.depth
        fits = most <= ROOMS[-1] * 1024 and tiles <= SHARE and config.across == self.across
        return fits and config.tokens // 64 * config.rows * self.height // 2 <= SUMS


def height_of(size: int) -> int | None:
    """Return the height of a tile: the largest that divides the block's side, or None."""
    return next((side for side in reversed(HEIGHTS) if size and size % side == 0), None)


def depth_of(size: int) -> int | None:
    """Return the depth of a tile: the one that wastes the fewest loaded bytes, or None."""
    sides = [side for side in DEPTHS if size and size % side == 0]
    return max(sides, key=lambda side: (side / row_bytes(side), side), default=None)


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


def tiles_of(w: Bsr, transposed: bool, across: int = 1) -> Tiles:
    """Cut W, or its transpose, into tiles, 16 deep with `across` > 1. Raises FormatError."""
    checked(w)
    (n, k), (blocks, r, c) = w.shape, w.values.shape
    if transposed:
        (n, k), (r, c) = (k, n), (c, r)
    height, depth = height_of(r), depth_of(c)
    assert height is not None
    assert depth is not None
    # The numbers of the 16-byte pieces are cut and sorted like the values.
    pieces = torch.arange(blocks * r * c // 8, dtype=torch.int32).view(blocks, r, c // 8)
    rows, columns = rows_of(w.offsets.cpu()), w.columns.cpu().long()
    if transposed:
        order = (columns * len(w.offsets) + rows).argsort()
        rows, columns, pieces = columns[order], rows[order], pieces[order]
    numbered = Bsr((n, k // 8), offsets_of(rows, -(-n // r)), columns.int(), pieces)
    tiles = cut(numbered, height, 1 if across > 1 else depth // 8)
    row, column = checked(tiles)
    down = -(-n // height)
    if across == 1:
        return Tiles(height, depth, row, column, down, -(-k // depth), tiles.values)
    deep = -(-k // (2 * PIECE))
    place, at = np.unique(row * deep + column // 2, return_inverse=True)
    united = torch.full((len(place), height, 2), -1, dtype=torch.int32)
    united[torch.from_numpy(at), :, torch.from_numpy(column % 2)] = tiles.values[:, :, 0]
    return Tiles(height, 2 * PIECE, *np.divmod(place, deep), down, deep, united, across)


def costs_of(lists: Lists, tiles: Tiles, config: Config) -> Ints:
    """Return the cost of each group for a CTA, in bytes that TMA loads in that time."""
    loads = lists.strips * (config.tokens * row_bytes(tiles.depth, tiles.across))
    loads = loads + lists.blocks * (2 * tiles.height * tiles.depth)
    storing = config.tokens * config.rows * config.warpgroups * tiles.height  # half of Y's bytes
    costs: Ints = loads + 4000 * np.diff(lists.first) + storing
    return costs


def configurations(tiles: Tiles, m: int, workers: int) -> list[Config]:
    """Return what is possible for these tiles and m tokens, by the busiest worker's bytes."""
    costs: dict[Config, float] = {}
    for tokens, rows, warpgroups in product(TOKENS, ROWS, (2, 1)):
        config = Config(tokens, rows, warpgroups, tiles.across)
        if tokens >= m + 64 or not tiles.possible(config) or (warpgroups == 1 and rows > 1):
            continue
        each = costs_of(tiles.lists(config, m, workers), tiles, config)
        items = len(each) * -(-m // tokens)
        costs[config] = max(each.mean() * -(-items // workers), each.max())
    return sorted(costs, key=lambda config: costs[config])


def offered(w: Bsr, m: int, transposed: bool) -> list[tuple[Config, Tiles]]:
    """Return the likeliest `configurations` with W's tiles; if W is odd, also in aligned strips."""
    workers, tiles = multiprocessors(w.columns.device), tiles_of(w, transposed)
    likeliest = [(config, tiles) for config in configurations(tiles, m, workers)]
    if w.block[not transposed] % ALIGNED == 0:
        return likeliest
    aligned = tiles_of(w, transposed, across=2)
    more = [(config, aligned) for config in configurations(aligned, m, workers)]
    return [*likeliest[:TRIED_ALIGNED], *more[:TRIED_ALIGNED], *likeliest[TRIED_ALIGNED:]]


def launch(
    x: Tensor,
    w: Bsr,
    config: Config,
    tiles: Tiles | None = None,
    *,
    transposed: bool = False,
    watchdog: bool = False,
) -> cuda.BoundKernel:
    """Return the kernel of X @ W.T [m, n], or X @ W [m, k] if transposed. Raises Unsupported.

    With `watchdog`, a kernel that hangs stops and prints where it waited; it runs a little slower.
    """
    if reason := unsupported_operands(x, w, transposed):
        raise Unsupported(reason)
    planned = plan(w, len(x), config, tiles, transposed=transposed, watchdog=watchdog)
    return bind(planned, x, w.values)


def plan(
    w: Bsr,
    m: int,
    config: Config,
    tiles: Tiles | None = None,
    *,
    transposed: bool = False,
    watchdog: bool = False,
) -> Plan:
    """Unite the rows, list the steps and assign them; only shape and dtype of w's values matter.

    Expects operands that `unsupported_operands` accepts. Reads the index on the host, so it waits
    for the device.
    """
    (n, k), (blocks, r, c) = w.shape, w.values.shape
    dtype, device = w.values.dtype, w.values.device
    tiles = tiles or tiles_of(w, transposed, config.across)
    if not tiles.possible(config):
        size = f"{tiles.height}x{tiles.depth}"
        raise Unsupported(f"expected fewer tokens or rows with tiles of {size}, found {config}")
    workers = multiprocessors(device)
    lists = tiles.lists(config, m, workers)
    constants = constants_of(config, tiles.height, tiles.depth, lists.room, dtype)
    constants += (("WATCHDOG", 1),) if watchdog else ()
    kernel, code = cuda.load("bsr_strips", "multiply_tiles", constants, SHARED_BYTES, device)
    costs = costs_of(lists, tiles, config)
    steps, bounds = worked(lists, costs, m, config.tokens, workers)
    starts = np.zeros(WORKERS, np.int32)
    starts[: len(bounds)] = bounds
    uploaded = tuple(torch.from_numpy(a).to(device) for a in (steps, lists.units))
    depth, width = (n, k) if transposed else (k, n)
    boxes, first_steps = boxes_of(tiles.depth, tiles.across), starts.tobytes()

    @lru_cache(cuda.ADDRESSES)
    def arguments(
        tokens: int, x: int, strides: tuple[int, int], packed: int, y: int
    ) -> cuda.Arguments:
        of_x = x, (tokens, depth), strides, dtype
        tail = tokens % config.tokens or config.tokens
        x_maps = [_maps(of_x, rows, boxes) for rows in (config.tokens, tail)]
        each, rows = (a.data_ptr() for a in uploaded)
        return ARGUMENTS(b"".join(x_maps), first_steps, packed, each, rows, y, tokens, width)

    loaded = cuda.Loaded(kernel, code, device.index, len(bounds) - 1, config.threads, SHARED_BYTES)
    sizes = m, depth, (blocks, r, c), width, dtype
    source = packed_order(tiles, lists).to(device)
    return Plan(loaded, uploaded, arguments, *sizes, source, transposed)


def _maps(of_x: tuple[Any, ...], rows: int, boxes: list[int]) -> bytes:
    """Return struct Boxes: the maps of a strip's boxes, of which there are one or two."""
    maps = [cuda.tensor_map(*of_x, (rows, box)) for box in boxes]
    return (b"".join(maps)).ljust(2 * cuda.MAP_BYTES, b"\0")


def packed_order(tiles: Tiles, lists: Lists) -> Tensor:
    """Return the position in the blocks of each 16-byte piece of the packed W: int32; zeros: -1.

    Tiles are in the order of the steps. In a tile, all features of the first 8 of k come first.
    """
    return tiles.pieces[torch.from_numpy(lists.order)].transpose(1, 2).flatten()


def constants_of(
    config: Config, height: int, depth: int, room: int, dtype: torch.dtype
) -> cuda.Constants:
    """Return the macros of bsr_strips.cu; `room` is a field of the lists."""
    return (
        ("HEIGHT", height),
        ("DEPTH", depth),
        ("TOKENS", config.tokens),
        ("ROWS", config.rows),
        ("WARPGROUPS", config.warpgroups),
        ("ACROSS", config.across),
        ("STRIPS", strips_of(depth, config.tokens, config.across)),
        ("ROOM", room),
        ("FP16", int(dtype == torch.float16)),
        *(("THREADS", config.threads), ("RING_BYTES", RING_BYTES), ("WORKERS", WORKERS)),
        *(("NO_STRIP", NO_STRIP), ("LAST", LAST), ("END", END)),
    )


def unsupported_operands(x: Tensor, w: Bsr, transposed: bool) -> str | None:
    """Return why the kernel cannot run on these operands, or None."""
    (n, k), (r, c), values = w.shape, w.block, w.values
    depth = n if transposed else k
    if reason := unsupported_product(x, w, transposed):
        return reason
    if not depth_of(r) or not depth_of(c):
        return f"expected sides of blocks that a multiple of 8 from 16 to 64 divides, found {r}x{c}"
    if depth % 8:
        return f"expected a multiple of 8 columns to read, found {depth}"
    return too_large((n, k), len(values), len(values) * r * c // 8, len(x))


def prepare(operands: Operands, w: Bsr, x: Tensor, tuned: Tuned, *, transposed: bool) -> Launch:
    """Unite the rows and assign the work; take a table's configuration, or time a few."""
    if reason := unsupported_operands(x, w, transposed):
        raise Unsupported(reason)
    sizes = blocked(len(x), *w.shape, operands.problem["dtype"], w.block, len(w.values))
    name = "bsr_strips_dgrad" if transposed else "bsr_strips"
    workers = multiprocessors(x.device)
    ways = {1: tiles_of(w, transposed)}
    searched = [] if operands.pinned else configurations(ways[1], len(x), workers)
    searched = searched if tuned == "wide" else searched[:TRIED]
    # Aligned strips are not measured yet, so the default, which layers take too, has none.
    if not operands.pinned and w.block[not transposed] % ALIGNED:
        ways[2] = tiles_of(w, transposed, across=2)
        more = configurations(ways[2], len(x), workers)
        searched += more if tuned == "wide" else more[:TRIED_ALIGNED]
    configs, by = choose(name, Config, operands, sizes, tuned, searched)
    for across in {config.across for config in configs} - {*ways}:
        ways[across] = tiles_of(w, transposed, across)
    dtype, constants = w.values.dtype, []
    for config in configs:
        tiles = ways[config.across]
        room = tiles.lists(config, len(x), workers).room
        constants.append(constants_of(config, tiles.height, tiles.depth, room, dtype))
    cuda.compile_ahead("bsr_strips", constants)
    candidates = [launch(x, w, c, ways[c.across], transposed=transposed) for c in configs]
    return fastest_launch(configs, candidates, by, x.device)


KERNEL = kernel_of("linear", prepare, cuda.unsupported_on_hopper)

DGRAD = kernel_of("linear_dgrad", prepare, cuda.unsupported_on_hopper)
"""Input gradient with blocks of odd sizes, in CUDA C++ for Hopper: dX = dY @ W."""
