"""Linear layer with blocks of even sides in CUDA C++ for Hopper: Y[m, n] = X[m, k] @ W[n, k].T.

bsr_strips.cu is the kernel and draws its pipeline. _strip_tiles.py cuts W into tiles, and
_small_steps.py decides which rows go together and lists the steps. This file chooses a
configuration and launches. It supports

    blocks    of even sides from 10 on, fp16 or bf16; edge blocks may extend beyond W, and block
              rows may be empty
    sizes     k and n multiples of 8 (TMA's rows of 16 bytes), any m
    X         rows of any stride that is a multiple of 16 bytes

The kernel reads W packed, in tiles: blocks are cut into equal parts, as large as the kernel takes
(80 x 80 into 80 x 40, 96 x 96 into 96 x 48). No zero is stored. If the width of a tile is an odd
multiple of 8, the kernel multiplies eight columns of zeros, and a NaN of X in the eight columns
beside a block reaches the block's rows. Alternatively, blocks are cut at multiples of 16 columns,
wherever they begin, so that X comes in aligned strips; then tiles that a block half fills contain
zeros. Blocks that no tile divides (12, 20) are always gathered into such tiles, and a NaN of X
reaches all rows of a tile.

`DGRAD` is the same kernel over W.T: index and blocks are transposed when they are packed.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import gcd

import numpy as np
import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.made_once import made_while_used
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.work_list import WORKERS, Ints, starts_of, uploaded
from sparsebench.kernels.bsr._call import BsrCall, bsr_engine
from sparsebench.kernels.bsr._launch import Packing, product_of, unsupported_product
from sparsebench.kernels.bsr._small_steps import END, LAST, NO_STRIP, StepLayout, StepLists, work
from sparsebench.kernels.bsr._strip_tiles import (
    LEAST_GATHERED,
    Config,
    Tiles,
    boxes_of,
    depth_of,
    packed_order,
    row_bytes,
    strips_of,
    tiles_of,
)

TOKENS, ROWS = (64, 128, 256), range(1, 9)  # tokens of an item; rows of a warpgroup in it
RING_BYTES = 222 * 1024  # bytes of all stages
SHARED_BYTES = RING_BYTES + 1024 + 2048 + 1536  # alignment to 1024 may take 1023; zeros
NO_MAP = bytes(cuda.MAP_BYTES)  # of a second box
ALIGNED = 32  # columns of an aligned strip
FIRST_ALIGNED = 2  # configurations with aligned strips after as many without


def costs_of(lists: StepLists, tiles: Tiles, config: Config) -> Ints:
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


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return the likeliest `configurations`; if blocks are not aligned, also in aligned strips."""
    workers, tiles = multiprocessors(w.columns.device), tiles_of(w, call.transposed)
    likeliest = configurations(tiles, call.m, workers)
    if tiles.across > 1 or w.block[not call.transposed] % ALIGNED == 0:
        return likeliest
    aligned = configurations(tiles_of(w, call.transposed, across=2), call.m, workers)
    first = FIRST_ALIGNED
    return [*likeliest[:first], *aligned[:first], *likeliest[first:]]


def plan(w: Bsr, call: BsrCall, config: Config) -> Product:
    """Unite the rows, list the steps and assign them. Reads the index on the host."""
    m, dtype, device = call.m, call.dtype, w.columns.device
    tiles = tiles_of(w, call.transposed, config.across)
    if not tiles.possible(config):
        size = f"{tiles.height}x{tiles.depth}"
        raise Unsupported(f"expected fewer tokens or rows with tiles of {size}, found {config}")
    workers = multiprocessors(device)
    layout = tiles.layout(config, m, workers)
    lists = tiles.listed(layout)
    constants = constants_of(config, tiles.height, tiles.depth, lists.room, dtype)
    kernel = cuda.load("bsr_strips", "multiply_tiles", constants, SHARED_BYTES, device)
    costs = costs_of(lists, tiles, config)
    steps, bounds = work(lists, costs, m, config.tokens, workers)
    rest = uploaded(steps, device), uploaded(lists.units, device)
    boxes, starts = [*boxes_of(tiles.depth, tiles.across), 0][:2], starts_of(bounds)

    @lru_cache(cuda.ADDRESSES)
    def arguments(
        tokens: int, x: int, strides: tuple[int, int], packed: int, y: int
    ) -> cuda.Arguments:
        of_x = x, (tokens, call.depth), strides, dtype
        tail = tokens % config.tokens or config.tokens
        sides = product((config.tokens, tail), boxes)  # of struct Maps
        x_maps = [cuda.tensor_map(*of_x, side) if side[1] else NO_MAP for side in sides]
        each, rows = (a.data_ptr() for a in rest)
        return kernel.arguments(*x_maps, starts, packed, each, rows, y, tokens, call.width)

    loaded = kernel.on(len(bounds) - 1, config.threads)
    packing = _packing(tiles, layout, device, call.transposed)
    return product_of(call, loaded, arguments, rest, len(w.columns), packing)


@made_while_used
def _packing(tiles: Tiles, layout: StepLayout, device: torch.device, transposed: bool) -> Packing:
    """Return how W's blocks are copied into the order of the lists."""
    order = packed_order(tiles, tiles.listed(layout)).numpy()
    return Packing.of(order, device, transposed, tiles.piece)


def constants_of(
    config: Config, height: int, depth: int, room: int, dtype: torch.dtype
) -> cuda.Constants:
    """Return the macros of bsr_strips.cu; `room` is a field of the lists."""
    return (
        *(("HEIGHT", height), ("DEPTH", depth), ("TOKENS", config.tokens), ("ROWS", config.rows)),
        *(("WARPGROUPS", config.warpgroups), ("ACROSS", config.across)),
        *(("STRIPS", strips_of(depth, config.tokens, config.across)), ("ROOM", room)),
        ("FP16", int(dtype == torch.float16)),
        *(("THREADS", config.threads), ("RING_BYTES", RING_BYTES), ("WORKERS", WORKERS)),
        *(("NO_STRIP", NO_STRIP), ("LAST", LAST), ("END", END)),
    )


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    r, c = w.block
    if not depth_of(r) or not depth_of(c):
        return f"expected blocks of even sides from {LEAST_GATHERED} on, found {r}x{c}"
    return unsupported_product(call, len(w.columns) * r * c // gcd(r, c, 8))


KERNEL = bsr_engine(
    "bsr_strips", "linear", choices, plan, unsupported_on_hopper, Config, unsupported_call
)

DGRAD = replace(KERNEL, op="linear_dgrad")
"""Input gradient with blocks of even sides, in CUDA C++ for Hopper: dX = dY @ W."""
