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

import numpy as np
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.operator import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.work_list import WORKERS
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.bsr._call import BsrCall, bsr_engine
from sparsebench.kernels.bsr._wgrad_launch import (
    RING_BYTES,
    THREADS,
    gradient_of,
    unsupported_sizes,
)
from sparsebench.kernels.bsr._wgrad_small_schedule import (
    PIECE,
    WIDTH,
    cells_of,
    items_of,
    last_of,
    room_of,
    work_of,
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


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return a few, by the predicted end of the last worker.

    Items with as many strips as there is room for need the fewest loads. Items with fewer strips
    fill whole rounds of all workers, and multiply less if their cells fit into fewer units.
    """
    refuse(unsupported_call(w, call))
    there, m, workers = cells_of(w).there, call.m, multiprocessors(w.columns.device)
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


def plan(w: Bsr, call: BsrCall, config: Config, *, watchdog: bool = False) -> Product:
    """Divide the work and upload the lists. Reads the index on the host.

    With `watchdog`, a kernel that hangs stops and prints where it waited; it runs slower.
    """
    refuse(unsupported_call(w, call))
    device, cells, room = w.columns.device, cells_of(w), room_of(config.strips)
    items = items_of(cells.there, config.units, config.strips)
    sizes = call.m, config.depth, config.units, room, multiprocessors(device)
    work = work_of(cells, items, *sizes)
    box = config.depth, WIDTH
    return gradient_of(
        "bsr_wgrad_small",
        w,
        call,
        constants_of(config, call.dtype),
        (box, box),
        ARGUMENTS,
        tuple(torch.from_numpy(a).to(device) for a in (work.loads, work.sums, work.places)),
        starts=(np.resize(work.starts, WORKERS).tobytes(),),
        width=(w.block[1],),
        workers=len(work.starts) - 1,
        partials=(work.partials, config.units * PARTIAL),
        watchdog=watchdog,
    )


def constants_of(config: Config, dtype: torch.dtype) -> cuda.Constants:
    return (
        ("DEPTH", config.depth),
        ("UNITS", config.units),
        ("STRIPS", room_of(config.strips)),
        ("FP16", int(dtype == torch.float16)),
        *(("THREADS", THREADS), ("RING_BYTES", RING_BYTES), ("WORKERS", WORKERS)),
    )


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    r, c = w.block
    if r % PIECE or c % PIECE or not r or not c:
        return f"expected blocks of a multiple of {PIECE} rows and columns, found {r}x{c}"
    return unsupported_sizes(w, call, max(r, c), len(w.columns) * r * (c // PIECE))


KERNEL = bsr_engine("bsr_wgrad_small", "wgrad", choices, plan, unsupported_on_hopper, Config)
