"""Weight gradient in BSR of small blocks, CUDA C++ for Hopper: dW = dY[m, n].T @ X[m, k].

bsr_wgrad_small.cu is the kernel and draws its work: two warpgroups sum cells of 32 x 32, gathered
from anywhere in dW so that they share their loads. _wgrad_small_schedule.py decides which cells are
summed together and assigns them to CTAs. This file chooses a configuration and launches. It
supports

    blocks    any multiple of 8 rows and 8 columns, fp16 or bf16; blocks of 8 and 16 are summed with
              their neighbours in a cell; edge blocks may extend beyond W and are zero there
    sizes     any m, n and k
    dY, X     rows of any stride that is a multiple of 16 bytes

Sums are in fp32 over all tokens and always in the same order: equal operands give equal bits.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.tuned_table import multiprocessors
from sparsebench.kernels._common.work_list import WORKERS
from sparsebench.kernels.bsr import bsr_wgrad
from sparsebench.kernels.bsr._wgmma_pairs import SIDE
from sparsebench.kernels.bsr._wgrad_small_schedule import (
    PIECE,
    WIDTH,
    cells_of,
    items_of,
    last_of,
    room_of,
    work_of,
)
from sparsebench.kernels.bsr.bsr_wgrad import (
    LARGEST,
    RING_BYTES,
    SHARED_BYTES,
    THREADS,
    Plan,
    Strides,
    bind,
)

UNITS = 2, 4, 6
FEWEST, MOST = 5, 22  # strips of an item
GROWTH = 0.3  # a cell loads about strips ** -0.3
DEEP = 12  # strips: with more, steps of 64 tokens would leave three stages or fewer
ROUNDS = 3  # items of a worker, at most, for which strips are looked for
STEPS = 3  # rounds of the search that starts from the best of these
TRIED = 4
PARTIAL = 2 * 4 * WIDTH * WIDTH  # fp32 sums of a unit in both halves
# Tensor maps of dy and x; loads, sums, places; starts; values, width; partials, counters.
ARGUMENTS = cuda.Layout("256s", *"PPP", f"{4 * WORKERS}s", *"PiPP")


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


def configurations(pattern: Bsr, m: int, workers: int) -> list[Config]:
    """Return a few, by the predicted end of the last worker.

    Items with as many strips as there is room for need the fewest loads. Items with fewer strips
    fill whole rounds of all workers, and multiply less if their cells fit into fewer units.
    """
    there = cells_of(pattern).there
    items = items_of(there, UNITS[-1], MOST)
    loads, cells = sum(item.loads for item in items), int(there.sum())
    fill = cells / max(1, sum(len(item.units) for item in items))
    ends = {(UNITS[-1], MOST): last_of(items, m, UNITS[-1], workers)}

    def try_out(units: int, strips: int) -> None:
        if FEWEST <= strips <= MOST and (units, strips) not in ends:
            ends[units, strips] = last_of(items_of(there, units, strips), m, units, workers)

    for rounds in range(1, ROUNDS + 1):
        # The number of strips at which there are `workers * rounds` items.
        even = int((loads * MOST**GROWTH / (workers * rounds)) ** (1 / (1 + GROWTH)))
        for strips in (max(FEWEST, even), max(FEWEST, even) + 1):
            mine = cells * strips / max(1, loads * (MOST / strips) ** GROWTH)
            enough = (units for units in UNITS if 2 * units * fill >= mine)
            try_out(next(enough, UNITS[-1]), strips)
    for _ in range(STEPS):
        units, strips = min(ends, key=lambda way: ends[way])
        try_out(units, strips - 1)
        try_out(units, strips + 1)
    best = sorted(ends, key=lambda way: ends[way])[:TRIED]
    return [Config(64 if strips <= DEEP else 32, units, strips) for units, strips in best]


def launch(
    dy: Tensor, x: Tensor, pattern: Bsr, config: Config, *, watchdog: bool = False
) -> cuda.BoundKernel:
    """Return the kernel of dW's values [blocks, r, c]. Raises Unsupported.

    The pattern's values are not read. With `watchdog`, a kernel that hangs stops and prints where
    it waited; it runs slower.
    """
    if reason := unsupported_operands(dy, x, pattern):
        raise Unsupported(reason)
    return bind(plan(pattern, len(dy), config, watchdog=watchdog), dy, x)


def plan(pattern: Bsr, m: int, config: Config, *, watchdog: bool = False) -> Plan:
    """Divide the work and upload the lists. Only shape and dtype of the pattern's values matter.

    Expects operands that `unsupported_operands` accepts. Reads the index on the host, so it waits
    for the device.
    """
    device = pattern.offsets.device
    cells, room, workers = cells_of(pattern), room_of(config.strips), multiprocessors(device)
    items = items_of(cells.there, config.units, config.strips)
    work = work_of(cells, items, m, config.depth, config.units, room, workers)
    arrays = work.loads, work.sums, work.places
    lists = tuple(torch.from_numpy(a).to(device) for a in arrays)
    starts = np.resize(work.starts, WORKERS).tobytes()
    counters = torch.zeros(work.partials, 2, dtype=torch.int32, device=device)
    (n, k), blocks, dtype = pattern.shape, (*pattern.values.shape,), pattern.values.dtype
    constants = constants_of(config, dtype)
    constants += (("WATCHDOG", 1),) if watchdog else ()
    kernel, code = cuda.load("bsr_wgrad_small", "sum_blocks", constants, SHARED_BYTES, device)

    @lru_cache(cuda.ADDRESSES)
    def arguments(
        tokens: int, dy: int, of_dy: Strides, x: int, of_x: Strides, values: int, partials: int
    ) -> cuda.Arguments:
        box = config.depth, WIDTH
        maps = cuda.tensor_map(dy, (tokens, n), of_dy, dtype, box)
        maps += cuda.tensor_map(x, (tokens, k), of_x, dtype, box)
        rest = starts, values, blocks[2], partials, counters.data_ptr()
        return ARGUMENTS(maps, *(a.data_ptr() for a in lists), *rest)

    loaded = cuda.Loaded(kernel, code, device.index, len(work.starts) - 1, THREADS, SHARED_BYTES)
    partials = work.partials, config.units * PARTIAL
    return Plan(loaded, lists, counters, partials, arguments, m, (n, k), blocks, dtype)


def constants_of(config: Config, dtype: torch.dtype) -> cuda.Constants:
    return (
        ("DEPTH", config.depth),
        ("UNITS", config.units),
        ("STRIPS", room_of(config.strips)),
        ("FP16", int(dtype == torch.float16)),
        *(("THREADS", THREADS), ("RING_BYTES", RING_BYTES), ("WORKERS", WORKERS)),
    )


def unsupported_operands(dy: Tensor, x: Tensor, pattern: Bsr) -> str | None:
    """Return why the kernel cannot run on these operands, or None; see also cuda.tensor_map."""
    if reason := bsr_wgrad.unsupported_pair(dy, x, pattern):
        return reason
    (n, k), (r, c) = pattern.shape, pattern.block
    if r % PIECE or c % PIECE or not r or not c:
        return f"expected blocks of a multiple of {PIECE} rows and columns, found {r}x{c}"
    pieces = len(pattern.columns) * r * (c // PIECE)
    if max(pieces, len(x) + SIDE, 2 * (n + r), 2 * (k + c)) > LARGEST:
        actual = f"{len(pattern.columns)} blocks of {r}x{c} in {n}x{k}, {len(x)} tokens"
        rest = f"2^31 tokens and pieces of {PIECE} values"
        return f"expected less than 2^30 rows and columns, {rest}, found {actual}"
    return None


KERNEL = bsr_wgrad.kernel_of(
    "bsr_wgrad_small", Config, unsupported_operands, configurations, launch
)
