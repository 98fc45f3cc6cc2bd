"""Weight gradient in BSR of blocks of 16, CUDA C++ for Hopper: dW = dY[m, n].T @ X[m, k].

bsr_wgrad_mma.cu is the kernel and draws its work: each warp sums single blocks by mma.sync, where
bsr_wgrad_small multiplies cells of 32 x 32. This file groups W's blocks into items that share
loads, assigns them to CTAs, and launches. It supports

    blocks    16 x 16, fp16 or bf16; edge blocks may extend beyond W and are zero there
    sizes     any m, n and k
    dY, X     rows of any stride that is a multiple of 16 bytes

Sums are in fp32 over all tokens and always in the same order: equal operands give equal bits.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.operator import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.work_list import WORKERS, Ints
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.bsr._call import BsrCall, bsr_engine
from sparsebench.kernels.bsr._wgmma_pairs import checked
from sparsebench.kernels.bsr._wgrad_launch import (
    RING_BYTES,
    THREADS,
    gradient_of,
    unsupported_sizes,
)
from sparsebench.kernels.bsr._wgrad_schedule import SHORTEST, Piece, shared_out

SIDE, WIDTH, ROW_BYTES, WARPS = 16, 32, 64, 8
MOST_SLOTS = 16  # of a warp: 128 sums of a thread
FEWEST_BLOCKS = 24  # of an item, if items may have more: they would share few loads
DENSEST = 0.26  # stored part of W up to which bsr_wgrad_small takes longer (NOTES.md)
STAGES = 3  # fewest stages of the ring
# Costs are in loads of a strip of 64 tokens: TMA takes 61 ns for one on one SM.
BLOCK, WRITTEN = 0.2, 0.3  # shared memory's time for a block of 64 tokens, and for a strip
PARTIAL = 0.77  # of a block, written and read
TRIED = 4
# Tensor maps of dy and x; loads, sums, slots; starts; values; partials, counters.
ARGUMENTS = cuda.Layout("256s", *"PPP", f"{4 * WORKERS}s", *"PPP")


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    depth   tokens in a step: 32 or 16
    across  groups of strips of X
    down    groups of strips of dY, for each of these
    """

    depth: int
    across: int
    down: int


@dataclass(frozen=True)
class Item:
    """Strips of dY and of X to load, and the blocks of each warp: [row, column, block]."""

    dy: Ints
    x: Ints
    warps: list[Ints]


@dataclass(frozen=True)
class Work:
    """The arrays that bsr_wgrad_mma.cu reads: Loads, Sums, Slot, and where a worker's pieces start.

    partials  sums of parts of items
    last      predicted end of the last worker, in loads of a strip of 64 tokens
    held      whether products take longer than loads in most items
    """

    loads: Ints
    sums: Ints
    slots: Ints
    starts: Ints
    partials: int
    last: float
    held: bool


def items_of(pattern: Bsr, across: int, down: int) -> list[Item]:
    """Put each block into one of `across` x `down` items, which have about as many blocks."""
    rows, columns = checked(pattern)
    blocks = np.stack([rows, columns, np.arange(len(rows))], 1)
    n, k = (-(-side // WIDTH) for side in pattern.shape)
    strips = np.zeros((n, k), np.int64)
    np.add.at(strips, (rows // 2, columns // 2), 1)
    of_column = _balanced(strips.sum(0), min(across, k))
    items = []
    for group in range(of_column.max() + 1):
        counts = strips[:, of_column == group].sum(1)
        of_row = _balanced(counts, min(down, n))
        mine = blocks[of_column[blocks[:, 1] // 2] == group]
        for part in range(of_row.max() + 1):
            some = mine[of_row[mine[:, 0] // 2] == part]
            if len(some):
                dy, x = (np.unique(some[:, axis] // 2) for axis in (0, 1))
                items.append(Item(dy, x, np.array_split(some, WARPS)))
    return items


def _balanced(counts: Ints, groups: int) -> Ints:
    """Return a group for each count, so that sums are alike: to the least group, largest first."""
    sums, group = np.zeros(groups), np.zeros(len(counts), np.int64)
    for at in np.argsort(-counts, kind="stable"):
        group[at] = sums.argmin()
        sums[group[at]] += counts[at] + 1e-3
    return group


def slots_of(items: list[Item]) -> int:
    """Return the slots of a warp that all items need, an even number."""
    most = max((len(warp) for item in items for warp in item.warps), default=1)
    return most + most % 2


def room_of(items: list[Item]) -> int:
    """Return the strips of a stage: each of four warps loads the same number."""
    return -(-max((len(item.dy) + len(item.x) for item in items), default=1) // 4) * 4


def work_of(pattern: Bsr, m: int, config: Config, workers: int) -> Work:
    """Group the blocks, and divide the sums over m tokens among workers."""
    items, depth = items_of(pattern, config.across, config.down), config.depth
    room, slots = room_of(items), slots_of(items)
    strips = np.array([len(item.dy) + len(item.x) for item in items])
    products = WRITTEN * strips + BLOCK * WARPS * slots
    costs = np.maximum(strips, products) * depth / 64
    partials = np.full(len(items), PARTIAL * WARPS * slots)
    lists, last = shared_out(costs, partials, -(-m // depth), -(-SHORTEST // depth), workers)
    pieces = [piece for given in lists for piece in given]
    starts = np.array([0, *accumulate(len(given) for given in lists)], np.int32)
    loads, sums, cut = _lists(pieces, items, -(-m // depth), room)
    held = bool(2 * np.count_nonzero(products > strips) > len(items))
    return Work(loads, sums, _slots(items, slots, depth), starts, cut, last, held)


def _lists(pieces: list[Piece], items: list[Item], steps: int, room: int) -> tuple[Ints, Ints, int]:
    loads, sums = np.full((len(pieces), room + 4), -1, np.int32), np.zeros((len(pieces), 8), int)
    firsts: dict[int, int] = {}
    cut = 0
    for at, piece in enumerate(pieces):
        item, count = items[piece.item], -(-(steps - piece.share) // piece.of)
        boxes = *(item.dy * WIDTH * 2 + 1), *(item.x * WIDTH * 2)
        loads[at, : len(boxes)] = boxes
        loads[at, room:] = piece.share, count, piece.of, 0
        if piece.of > 1 and piece.item not in firsts:
            firsts[piece.item], cut = cut, cut + piece.of
        adds = 1 if piece.share or piece.of == 1 else 2**31 - (piece.of - 1)
        part = firsts.get(piece.item, 0), piece.share, piece.of, adds
        sums[at] = piece.item, count, *part, 0, 0
    return loads, sums.astype(np.int32), cut


def _slots(items: list[Item], slots: int, depth: int) -> Ints:
    """Return struct Slot: [items, WARPS, slots, 4]. A slot without a block repeats the last one."""
    given = np.zeros((len(items), WARPS, slots, 4), np.int32)
    given[..., 2] = -1
    for mine, item in zip(given, items, strict=True):
        for of_warp, blocks in zip(mine, item.warps, strict=True):
            if not len(blocks):
                continue
            rows, columns, number = blocks.T
            dy, x = np.searchsorted(item.dy, rows // 2), np.searchsorted(item.x, columns // 2)
            size, count = depth * ROW_BYTES, len(blocks)
            of_warp[:count, 0] = dy * size + rows % 2 * 32
            of_warp[:count, 1] = (x + len(item.dy)) * size + columns % 2 * 32
            of_warp[:count, 2] = number
            of_warp[count:, :2] = of_warp[count - 1, :2]
            of_warp[:count, 3] = np.diff(rows, prepend=-1) != 0
    return given


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return a few, by the predicted end of the last worker."""
    refuse(unsupported_call(w, call))
    blocks, m, workers = len(w.columns), call.m, multiprocessors(w.columns.device)
    room = WARPS * MOST_SLOTS * 0.97  # blocks of an item: warps have a few more or less
    fewest = int(blocks / room) + 1
    rounds = range(-(-fewest // workers), -(-fewest // workers) + 3)
    numbers = {-(-workers * some // parts) for some in rounds for parts in (1, 2, 3, 4)}
    fitting = [number for number in numbers if fewest <= number <= blocks // FEWEST_BLOCKS]
    ends = _ends(w, m, workers, fitting)
    number = max(fewest, blocks // FEWEST_BLOCKS)
    while not ends and number <= 2 * fewest * room:
        ends = _ends(w, m, workers, [number])
        number *= 2
    return sorted(ends, key=lambda config: ends[config])[:TRIED]


def _ends(pattern: Bsr, m: int, workers: int, numbers: list[int]) -> dict[Config, float]:
    """Return the predicted end of each way to make about so many items that is possible."""
    n, k = pattern.shape
    ends = {}
    for number in numbers:
        even = round((number * k / n) ** 0.5)
        for across in range(max(1, even - 1), even + 2):
            down = max(1, number // across)
            items = items_of(pattern, across, down)
            stage = room_of(items) * ROW_BYTES
            depth = next((d for d in (32, 16) if RING_BYTES // (stage * d) >= STAGES), 0)
            if depth and slots_of(items) <= MOST_SLOTS:
                config = Config(depth, across, down)
                ends[config] = work_of(pattern, m, config, workers).last
    return ends


def plan(w: Bsr, call: BsrCall, config: Config, *, watchdog: bool = False) -> Product:
    """Divide the work and upload the lists.

    With `watchdog`, a kernel that hangs stops and prints where it waited; it runs slower.
    """
    refuse(unsupported_call(w, call))
    device = w.columns.device
    work = work_of(w, call.m, config, multiprocessors(device))
    slots, room = work.slots.shape[2], work.loads.shape[1] - 4
    box = config.depth, WIDTH
    return gradient_of(
        "bsr_wgrad_mma",
        w,
        call,
        constants_of(config, slots, room, work.held, call.dtype),
        (box, box),
        ARGUMENTS,
        tuple(torch.from_numpy(a).to(device) for a in (work.loads, work.sums, work.slots)),
        starts=(np.resize(work.starts, WORKERS).tobytes(),),
        width=(),
        workers=len(work.starts) - 1,
        partials=(work.partials, WARPS * slots * SIDE * SIDE),
        watchdog=watchdog,
    )


def constants_of(
    config: Config, slots: int, room: int, held: bool, dtype: torch.dtype
) -> cuda.Constants:
    """Return the macros of bsr_wgrad_mma.cu; `room` is of strips in a stage."""
    return (
        *(("DEPTH", config.depth), ("SLOTS", slots), ("STRIPS", room)),
        *(("THREADS", THREADS), ("RING_BYTES", RING_BYTES), ("WORKERS", WORKERS)),
        *(("HELD", int(held)), ("FP16", int(dtype == torch.float16))),
    )


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    if w.block != (SIDE, SIDE):
        return f"expected blocks of 16x16, found {w.block[0]}x{w.block[1]}"
    return unsupported_sizes(w, call, WIDTH, len(w.columns))


KERNEL = bsr_engine("bsr_wgrad_mma", "wgrad", choices, plan, unsupported_on_hopper, Config)
