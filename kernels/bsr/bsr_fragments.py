"""Linear layer with blocks below 64 in CUDA C++ for Hopper: Y[m, n] = X[m, k] @ W[n, k].T.

bsr_fragments.cu is the kernel and draws its pipeline: a warpgroup holds the X of 16 columns in
registers and multiplies it by the blocks of all its rows. _strip_tiles.py cuts W into tiles 16
deep, and _small_steps.py decides which rows go together and lists the steps. This file chooses a
configuration and launches. It supports

    blocks    of even sides from 10 on, fp16 or bf16; edge blocks may extend beyond W, and block
              rows may be empty
    sizes     k and n multiples of 8 (TMA's rows of 16 bytes), any m
    X         rows of any stride that is a multiple of 16 bytes

The kernel reads W packed in tiles that begin at multiples of 16 columns, with zeros where a tile
has no block. So a NaN of X reaches all rows of a tile.

`DGRAD` is the same kernel over W.T: index and blocks are transposed when they are packed.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd

import numpy as np
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.tuned_table import Tuned, blocked, choose, multiprocessors
from sparsebench.kernels._common.work_list import WORKERS, Ints
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.kernels.bsr._launch import Plan, bind, kernel_of, too_large, unsupported_product
from sparsebench.kernels.bsr._small_steps import (
    END,
    LAST,
    NO_STRIP,
    STRIP,
    STRIPS,
    UNIT,
    Layout,
    Lists,
    listed,
    worked,
)
from sparsebench.kernels.bsr._strip_tiles import (
    DEEP,
    LEAST_GATHERED,
    ROOMS,
    Tiles,
    depth_of,
    packed_order,
    tiles_of,
)

TOKENS, ROWS, CLUSTERS = (64, 128, 256), range(1, 9), (1, 2)
ACROSS, WARPGROUPS = STRIP // DEEP, 2
THREADS = 128 * (WARPGROUPS + 1)
RING_BYTES = 222 * 1024  # bytes of all stages
SHARED_BYTES = RING_BYTES + 1024  # alignment to 1024 may take 1023
REGISTERS = 192  # of a thread for sums and X, at most: a consumer has 224
# Maps of x and of its last tile, starts; w, steps, seats, y; m and width.
ARGUMENTS = cuda.Layout("256s", f"{4 * WORKERS}s", *"PPPPii")
HAND_OVER, CLOCK = 4000, 38  # bytes that TMA loads in the time of a step's hand-over, and a clock
TRIED = 8  # configurations that a short search times: the best by the byte model


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens, rows  of a CTA's work item: tokens, and rows of tiles of each of two warpgroups
    cluster       CTAs that share the tiles of W, each with different tokens: 1 or 2
    """

    tokens: int
    rows: int
    cluster: int = 1
    together: int = 2
    switch: int = 0

    @property
    def strips(self) -> int:
        """Return how many strips a step holds."""
        return STRIPS if self.tokens <= 128 else 2


def unit_of(height: int, rows: int) -> int:
    """Return how many rows of tiles are stored together: two of 16 features, 64 bytes of Y."""
    return 2 if 2 * height <= UNIT and rows % 2 == 0 else 1


def possible(config: Config, height: int) -> bool:
    """Return whether registers hold the sums and X, and a step the tiles of any strip."""
    tiles = config.tokens // 64
    fragments = 2 * 4 * tiles * (1 if tiles > 2 else 2)
    registers = tiles * config.rows * height // 2 + fragments
    tile_bytes = 2 * height * DEEP
    return (
        registers <= REGISTERS
        and ACROSS * config.rows * WARPGROUPS * tile_bytes <= ROOMS[-1] * 1024
    )


def lists_of(tiles: Tiles, config: Config, m: int, workers: int) -> Lists:
    """Unite the rows and list the steps, in as many groups as fill the last round of items."""
    unit = unit_of(tiles.height, config.rows)
    size, units = config.rows * WARPGROUPS // unit, -(-tiles.rows // unit)
    of_tokens, at_once = -(-m // (config.tokens * config.cluster)), workers // config.cluster
    least = -(-units // size)
    rounds = -(-least * of_tokens // at_once)
    layout = Layout(
        rows=config.rows * WARPGROUPS,
        warpgroups=WARPGROUPS,
        unit=unit,
        across=ACROSS,
        strips=config.strips,
        block_bytes=2 * tiles.height * DEEP,
        rooms=ROOMS,
        groups=min(units, rounds * at_once // of_tokens),
        by_place=True,
    )
    return listed(tiles.row, tiles.column, units, -(-tiles.columns // ACROSS), layout)


def costs_of(lists: Lists, height: int, config: Config) -> Ints:
    """Return the cost of each group for a CTA, in bytes that TMA loads in that time."""
    tiles = config.tokens // 64
    loads = lists.strips * (config.tokens * 2 * STRIP)
    loads = loads + lists.blocks * (2 * height * DEEP // config.cluster)
    products = lists.blocks * (tiles * max(height // 2, 10) * CLOCK)
    storing = config.tokens * config.rows * WARPGROUPS * height  # half of Y's bytes
    costs: Ints = np.maximum(loads, products) + HAND_OVER * np.diff(lists.first) + storing
    return costs


def configurations(tiles: Tiles, m: int, workers: int) -> list[Config]:
    """Return what is possible for these tiles and m tokens, by the busiest worker's cost."""
    costs: dict[Config, float] = {}
    for config in (Config(*each) for each in product(TOKENS, ROWS, CLUSTERS)):
        tokens = config.tokens * config.cluster
        if tokens >= m + 64 or not possible(config, tiles.height):
            continue
        each = costs_of(lists_of(tiles, config, m, workers), tiles.height, config)
        items = len(each) * -(-m // tokens)
        costs[config] = max(each.mean() * -(-items // (workers // config.cluster)), each.max())
    return sorted(costs, key=lambda config: costs[config])


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
    tiles = tiles or tiles_of(w, transposed, ACROSS)
    if not possible(config, tiles.height):
        raise Unsupported(
            f"expected fewer tokens or rows with tiles {tiles.height} high, found {config}"
        )
    workers = multiprocessors(device)
    lists = lists_of(tiles, config, m, workers)
    constants = constants_of(config, tiles.height, lists.room, dtype)
    constants += (("WATCHDOG", 1),) if watchdog else ()
    kernel, code = cuda.load("bsr_fragments", "multiply_tiles", constants, SHARED_BYTES, device)
    tokens, costs = config.tokens * config.cluster, costs_of(lists, tiles.height, config)
    steps, bounds = worked(lists, costs, m, tokens, workers // config.cluster)
    starts = np.zeros(WORKERS, np.int32)
    starts[: len(bounds)] = bounds
    uploaded = tuple(torch.from_numpy(a).to(device) for a in (steps, lists.units))
    depth, width = (n, k) if transposed else (k, n)
    first_steps = starts.tobytes()

    @lru_cache(cuda.ADDRESSES)
    def arguments(
        tokens: int, x: int, strides: tuple[int, int], packed: int, y: int
    ) -> cuda.Arguments:
        of_x = x, (tokens, depth), strides, dtype
        tail = tokens % config.tokens or config.tokens
        x_maps = [cuda.tensor_map(*of_x, (rows, STRIP)) for rows in (config.tokens, tail)]
        each, seats = (a.data_ptr() for a in uploaded)
        return ARGUMENTS(b"".join(x_maps), first_steps, packed, each, seats, y, tokens, width)

    grid = (len(bounds) - 1) * config.cluster
    loaded = cuda.Loaded(kernel, code, device.index, grid, THREADS, SHARED_BYTES)
    sizes = m, depth, (blocks, r, c), width, dtype
    source = packed_order(tiles, lists).to(device)
    return Plan(loaded, uploaded, arguments, *sizes, source, transposed, tiles.piece)


def constants_of(config: Config, height: int, room: int, dtype: torch.dtype) -> cuda.Constants:
    """Return the macros of bsr_fragments.cu; `room` is a field of the lists."""
    return (
        ("HEIGHT", height),
        ("TOKENS", config.tokens),
        ("ROWS", config.rows),
        ("UNIT", unit_of(height, config.rows)),
        ("CLUSTER", config.cluster),
        ("TOGETHER", config.together),
        ("SWITCH", config.switch),
        ("WARPGROUPS", WARPGROUPS),
        ("STRIPS", config.strips),
        ("ROOM", room),
        ("FP16", int(dtype == torch.float16)),
        *(("THREADS", THREADS), ("RING_BYTES", RING_BYTES), ("WORKERS", WORKERS)),
        *(("NO_STRIP", NO_STRIP), ("LAST", LAST), ("END", END)),
    )


def unsupported_operands(x: Tensor, w: Bsr, transposed: bool) -> str | None:
    (n, k), (r, c), values = w.shape, w.block, w.values
    depth = n if transposed else k
    if reason := unsupported_product(x, w, transposed):
        return reason
    if not depth_of(r) or not depth_of(c):
        return f"expected blocks of even sides from {LEAST_GATHERED} on, found {r}x{c}"
    if depth % 8:
        return f"expected a multiple of 8 columns to read, found {depth}"
    return too_large((n, k), len(values), values.numel() // gcd(r, c, 8), len(x))


def prepare(operands: Operands, w: Bsr, x: Tensor, tuned: Tuned, *, transposed: bool) -> Launch:
    """Unite the rows and assign the work; take a table's configuration, or time a few."""
    if reason := unsupported_operands(x, w, transposed):
        raise Unsupported(reason)
    sizes = blocked(len(x), *w.shape, operands.problem["dtype"], w.block, len(w.values))
    name = "bsr_fragments_dgrad" if transposed else "bsr_fragments"
    workers, tiles = multiprocessors(x.device), tiles_of(w, transposed, ACROSS)
    searched = [] if operands.pinned else configurations(tiles, len(x), workers)
    searched = searched if tuned == "wide" else searched[:TRIED]
    configs, by = choose(name, Config, operands, sizes, tuned, searched)
    dtype = w.values.dtype
    rooms = [lists_of(tiles, config, len(x), workers).room for config in configs]
    cuda.compile_ahead(
        "bsr_fragments",
        [constants_of(c, tiles.height, r, dtype) for c, r in zip(configs, rooms, strict=True)],
    )
    candidates = [launch(x, w, config, tiles, transposed=transposed) for config in configs]
    return fastest_launch(configs, candidates, by, x.device)


KERNEL = kernel_of("linear", prepare, unsupported_on_hopper)

DGRAD = kernel_of("linear_dgrad", prepare, unsupported_on_hopper)
"""Input gradient with blocks below 64, in CUDA C++ for Hopper: dX = dY @ W."""
