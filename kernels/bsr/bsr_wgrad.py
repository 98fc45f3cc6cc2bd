"""Weight gradient in BSR in CUDA C++ for Hopper: dW = dY[m, n].T @ X[m, k] where W has blocks.

bsr_wgrad.cu is the kernel and draws its pipeline: four producer warps load by TMA, and two consumer
warpgroups sum four 64 x 64 tiles of dW each. _wgrad_schedule.py decides which tiles are summed
together and assigns them to CTAs. This file chooses configurations and plans. It supports

    blocks    multiples of 64, 56, 48 or 40 rows and columns, fp16 or bf16; edge blocks may extend
              beyond W and are zero there
    sizes     any m, n and k
    dY, X     rows of any stride that is a multiple of 16 bytes

Sums are in fp32 over all tokens and always in the same order: equal operands give equal bits.
"""

from dataclasses import dataclass

import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.operator import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.bsr._call import BsrCall, bsr_engine
from sparsebench.kernels.bsr._wgmma_pairs import SIDE
from sparsebench.kernels.bsr._wgrad_launch import (
    RING_BYTES,
    THREADS,
    gradient_of,
    unsupported_sizes,
)
from sparsebench.kernels.bsr._wgrad_schedule import ALIGNED, TILES, sides_of, work_of

PARTIAL = 2 * SIDE * SIDE  # fp32 sums in a column of an item: one tile of each half
# Tensor maps of dy and x; loads, sums, starts, values; width; partials, counters.
ARGUMENTS = cuda.Layout("256s", *"PPPPiPP")


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    depth  tokens in a step: 64, or 32 with twice as many stages
    wide   tiles of dW that a warpgroup sums at a time: 4 or 2
    """

    depth: int
    wide: int


CONFIGS = tuple(Config(depth, wide) for depth in (64, 32) for wide in (4, 2))


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return all four, by the predicted end of the last worker."""
    refuse(unsupported_call(w, call))
    workers = multiprocessors(w.columns.device)

    def end(config: Config) -> float:
        return work_of(w, call.m, config.depth, config.wide, workers).last

    return sorted(CONFIGS, key=end)


def plan(w: Bsr, call: BsrCall, config: Config, *, watchdog: bool = False) -> Product:
    """Divide the work and upload the lists. Reads the index on the host.

    With `watchdog`, a kernel that hangs stops and prints where it waited; it runs slower.
    """
    refuse(unsupported_call(w, call))
    device, sides = w.columns.device, sides_of(w)
    work = work_of(w, call.m, config.depth, config.wide, multiprocessors(device))
    lists = tuple(torch.from_numpy(a).to(device) for a in (work.loads, work.sums, work.starts))
    down, across = (side + side % ALIGNED for side in sides)
    return gradient_of(
        "bsr_wgrad",
        w,
        call,
        constants_of(config, work.tiles, sides, call.dtype),
        ((config.depth, down), (config.depth, across)),
        ARGUMENTS,
        lists,
        starts=(),
        width=(w.block[1],),
        workers=len(work.starts) - 1,
        partials=(work.partials, config.wide * PARTIAL),
        watchdog=watchdog,
    )


def constants_of(
    config: Config, tiles: int, sides: tuple[int, int], dtype: torch.dtype
) -> cuda.Constants:
    """Return the macros of bsr_wgrad.cu; `sides` are height and width of a tile."""
    return (
        *(("HEIGHT", sides[0]), ("WIDTH", sides[1])),
        ("DEPTH", config.depth),
        ("TILES", tiles),
        ("WIDE", config.wide),
        ("FP16", int(dtype == torch.float16)),
        *(("THREADS", THREADS), ("RING_BYTES", RING_BYTES), ("SIDE", SIDE), ("BOXES", max(TILES))),
    )


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    r, c = w.block
    if not all(sides_of(w)):
        return f"expected blocks of multiples of 40, 48, 56 or 64 rows and columns, found {r}x{c}"
    return unsupported_sizes(w, call, max(r, c), len(w.columns) * r * c // 2)


KERNEL = bsr_engine("bsr_wgrad", "wgrad", choices, plan, unsupported_on_hopper, Config)
