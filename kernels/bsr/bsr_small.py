"""Linear layer with small blocks in CUDA C++ for Hopper: Y[m, n] = X[m, k] @ W[n, k].T.

bsr_small.cu is the kernel and contains a diagram of its pipeline: block rows share the strips of X
that they touch, and every block is a separate product. _small_steps.py decides which rows go
together and builds the list of steps. This file chooses configurations and plans. It supports

    blocks    8x8, or multiples of 16 (blocks larger than 32: at most 256 tokens), fp16 or bf16;
              edge blocks may extend beyond W, and block rows may be empty
    sizes     k and n multiples of 8 (TMA needs 16-byte-aligned rows), any m
    X         rows of any stride that is a multiple of 16 bytes

The kernel reads W packed: the blocks in the order in which they are multiplied. The tensor cores
consume k in steps of 16, so four 8 × 8 blocks are merged into one 16 × 16 block, with zeros where a
block is missing. Other blocks are split into pieces of 32 or 16. `DGRAD` is the same kernel over
the transposed pattern. For the transpose, it groups block columns instead of block rows, and wgmma
reads each block MN-major; the blocks are packed in the order in which the transposed product uses
them, and none is physically transposed.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

import numpy as np
import torch
from torch import Tensor

from sparsebench.formats._format import offsets_of, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.declarations import record
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.made_once import made_once, made_while_used
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.work_list import WORKERS, Records, fill, starts_of, uploaded
from sparsebench.kernels.bsr._call import BsrCall, bsr_engine
from sparsebench.kernels.bsr._launch import Packing, product_of, unsupported_product
from sparsebench.kernels.bsr._small_steps import (
    END,
    LAST,
    NO_STRIP,
    STRIP,
    STRIPS,
    UNIT,
    StepLists,
    cut,
    lists_of,
    sources,
    swizzle,
    work,
)

BLOCKS = 16, 32
TOKENS, FEATURES = (128, 64), (256, 128, 64, 32)
RING_BYTES = 224 * 1024  # bytes of all stages
SHARED_BYTES = RING_BYTES + 2048  # alignment to 1024 may take 1023
UNITED = 16  # side of a block that unites four of 8 x 8
CUT_TOKENS = 256  # up to this many, blocks above 32 are cut; beyond, bsr_wgmma is faster


@dataclass(frozen=True)
class Config:
    """One way to run the kernel: tokens and features of a work item."""

    tokens: int
    features: int

    @property
    def warpgroups(self) -> int:
        """Return how many consumer warpgroups share an item: as many as the registers allow."""
        return min(self.features // UNIT, 2 if self.tokens > 64 else 4)

    @property
    def threads(self) -> int:
        """Return the threads of a CTA: the consumer warpgroups and one of producers."""
        return 128 * (self.warpgroups + 1)


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return what is possible, by the bytes that the busiest worker loads."""
    small, m, workers = _small(w), call.m, multiprocessors(w.columns.device)
    costs: dict[Config, float] = {}
    for config in (Config(tokens, features) for tokens in TOKENS for features in FEATURES):
        if config.tokens < 2 * max(m, 64):
            lists = _lists(small, config, call.transposed)
            each = lists.costs(min(m, config.tokens), small.block[0])
            costs[config] = max(each.sum() * -(-m // config.tokens) / workers, each.max())
    return sorted(costs, key=lambda config: costs[config])


def plan(w: Bsr, call: BsrCall, config: Config) -> Product:
    """Unite the rows, list the steps and assign them. Reads the index on the host."""
    m, dtype, device, transposed = call.m, call.dtype, w.columns.device, call.transposed
    small = _small(w)
    b, lists = small.block[0], _lists(small, config, transposed)
    constants = constants_of(config, lists.room, b, dtype, transposed, m <= config.tokens)
    kernel = cuda.load("bsr_small", "multiply_blocks", constants, SHARED_BYTES, device)
    costs = lists.costs(min(m, config.tokens), b)
    steps, bounds = work(lists, costs, m, config.tokens, multiprocessors(device))
    starts, firsts = starts_of(bounds), firsts_of(steps[bounds[:-1]], config.tokens)
    rest = uploaded(steps, device), uploaded(lists.units, device)
    packing = _packing(w, config.features, config.warpgroups, transposed)

    @lru_cache(cuda.ADDRESSES)
    def arguments(
        tokens: int, x: int, strides: tuple[int, int], packed: int, y: int
    ) -> cuda.Arguments:
        rows = tokens if m <= config.tokens else config.tokens  # of a box (ONCE)
        of_x, tail = (x, (tokens, call.depth), strides, dtype), tokens % rows or rows
        x_maps = [cuda.tensor_map(*of_x, (height, STRIP)) for height in (rows, tail)]
        each, units = (a.data_ptr() for a in rest)
        more = packed, each, units, y, tokens, call.width
        return kernel.arguments(*x_maps, starts, firsts, *more)

    grid = len(bounds) - 1
    loaded = kernel.on(grid, config.threads, early=True)
    return product_of(call, loaded, arguments, rest, len(w.columns), packing)


def firsts_of(steps: Records, tokens: int) -> bytes:
    """Return struct Firsts, for the step that each worker starts with."""
    firsts = np.zeros(WORKERS, record("bsr_small", "First"))
    tile_and_blocks = steps["token"] // tokens << 8 | steps["blocks"]
    fill(firsts, strips=steps["strips"], tile_and_blocks=tile_and_blocks, first=steps["first"])
    return firsts.tobytes()


def constants_of(
    config: Config, room: int, block: int, dtype: torch.dtype, transposed: bool, once: bool
) -> cuda.Constants:
    """Return the macros of bsr_small.cu: `room` of the lists; `once` if there is one token tile."""
    return (
        *(("BLOCK", block), ("TOKENS", config.tokens), ("FEATURES", config.features)),
        *(("WARPGROUPS", config.warpgroups), ("ROOM", room), ("TRANSPOSED", int(transposed))),
        *(("ONCE", int(once)), ("FP16", int(dtype == torch.float16))),
        *(("THREADS", config.threads), ("RING_BYTES", RING_BYTES), ("WORKERS", WORKERS)),
        *(("STRIPS", STRIPS), ("NO_STRIP", NO_STRIP), ("LAST", LAST), ("END", END)),
    )


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    r, c = w.block
    if (r, c) != (8, 8) and (r % BLOCKS[0] or c % BLOCKS[0]):
        return f"expected blocks of 8x8 or of multiples of 16, found {r}x{c}"
    if max(r, c) > BLOCKS[-1] and call.m > CUT_TOKENS:
        return f"blocks of {r}x{c}: expected up to {CUT_TOKENS} tokens, found {call.m}"
    return unsupported_product(call, len(w.columns) * r * c // 8)


@made_while_used
def _packing(w: Bsr, features: int, warpgroups: int, transposed: bool) -> Packing:
    """Return how W's blocks are copied into the order of the lists."""
    small, places = _fitting(w)
    order = lists_of(_small(w), features, warpgroups, transposed).order
    source = sources(torch.from_numpy(order), torch.from_numpy(swizzle(small.block[0])))
    of_pieces = source if places is None else places[source.long()]
    return Packing.of(of_pieces.numpy(), w.columns.device)


@made_once
def _small(w: Bsr) -> Bsr:
    """Return W's pattern in blocks of 16 or 32."""
    return _fitting(w)[0]


def _fitting(w: Bsr) -> tuple[Bsr, Tensor | None]:
    """Return W's pattern in blocks of 16 or 32, and where their pieces come from.

    int32 [pieces]: the position in W's blocks of each piece of 8 columns, or -1 for zeros; None if
    the blocks are as stored. Larger blocks are cut, and four of 8 x 8 are united.
    """
    r, c = w.block
    if r == c and r in BLOCKS:
        return w, None
    (n, k), blocks, piece = w.shape, len(w.values), UNITED // 2
    if r == piece:
        pieces = torch.arange(blocks * r * c // piece, dtype=torch.int32)
        return _united(w, pieces.view(blocks, r, c // piece))
    side = gcd(r, c, BLOCKS[-1])
    down, across, wide = r // side, c // side, c // piece
    numbers = torch.arange(blocks * down * across, dtype=torch.int32).view(blocks, down, across)
    grid = -(-n // side), -(-k // side)
    small = cut(Bsr(grid, w.offsets.cpu(), w.columns.cpu(), numbers), 1)
    block, row = small.values.flatten() // (down * across), small.values.flatten() // across % down
    first = (block * r + row * side) * wide + small.values.flatten() % across * (side // piece)
    within = torch.arange(side)[:, None] * wide + torch.arange(side // piece)
    places = (first[:, None, None] + within).int()
    return _pattern(w, small.offsets, small.columns, side), places.flatten()


def _united(w: Bsr, pieces: Tensor) -> tuple[Bsr, Tensor]:
    """Unite blocks of 8 x 8 in fours; their pieces are rows."""
    rows, columns = rows_of(w.offsets.cpu()), w.columns.cpu().long()
    down, across = (-(-size // UNITED) for size in w.shape)
    place, at = (rows // 2 * across + columns // 2).unique(return_inverse=True)
    united = torch.full((len(place), 2, UNITED // 2, 2), -1, dtype=torch.int32)
    united[at, rows % 2, :, columns % 2] = pieces[:, :, 0]
    index = offsets_of(place // across, down), (place % across).int()
    return _pattern(w, *index, UNITED), united.flatten()


def _pattern(w: Bsr, offsets: Tensor, columns: Tensor, side: int) -> Bsr:
    """Return a pattern with blocks of `side`, whose values are never read."""
    values = w.values.new_empty((1, 1, 1)).expand(len(columns), side, side)
    return Bsr(w.shape, offsets, columns, values)


def _lists(w: Bsr, config: Config, transposed: bool) -> StepLists:
    return lists_of(w, config.features, config.warpgroups, transposed)


KERNEL = bsr_engine(
    "bsr_small", "linear", choices, plan, unsupported_on_hopper, Config, unsupported_call
)

DGRAD = replace(KERNEL, op="linear_dgrad")
"""Input gradient with small blocks, in CUDA C++ for Hopper: wgmma reads the blocks MN-major."""
