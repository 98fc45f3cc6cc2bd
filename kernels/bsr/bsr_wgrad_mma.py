"""Weight gradient in BSR of blocks of 16, CUDA C++ for Hopper: dW = dY[m, n].T @ X[m, k].

bsr_wgrad_mma.cu is the kernel and draws its work: each warp sums single blocks by mma.sync, where
bsr_wgrad_small multiplies cells of 32 x 32. This file groups W's blocks of 16 x 16 into items that
share loads, and _wgrad.py assigns them to CTAs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.declarations import record
from sparsebench.kernels._common.work_list import Ints, Records, fill
from sparsebench.kernels.bsr._call import BsrCall
from sparsebench.kernels.bsr._wgmma_lists import checked
from sparsebench.kernels.bsr._wgrad import (
    RING_BYTES,
    STRIP,
    STRIP_BYTES,
    Division,
    Gradient,
    Item,
    ItemList,
    Prediction,
    WgradWork,
    room_of,
    strips_of,
    unsupported_sizes,
    work_from,
)

SIDE, WARPS = 16, 8
MOST_SLOTS = 16  # of a warp: 128 sums of a thread
FEWEST_BLOCKS = 24  # of an item, if items may have more: they would share few loads
DENSEST = 0.26  # stored part of W up to which bsr_wgrad_small takes longer (NOTES.md)
STAGES = 3  # fewest stages of the ring
# Costs are in loads of a strip.
BLOCK, WRITTEN = 0.2, 0.3  # shared memory's time for a block, and for a strip
PARTIAL = 0.77  # of a block, written and read


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


def items_of(pattern: Bsr, across: int, down: int) -> list[Item]:
    """Put each block into one of `across` x `down` items, which have about as many blocks.

    Item.sums has the blocks of each warp: [row, column, block].
    """
    rows, columns = checked(pattern)
    blocks = np.stack([rows, columns, np.arange(len(rows))], 1)
    n, k = (-(-side // STRIP) for side in pattern.shape)
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
                dy, x = (np.unique(some[:, axis] // 2).tolist() for axis in (0, 1))
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
    most = max((len(warp) for item in items for warp in item.sums), default=1)
    return most + most % 2


def _room(items: list[Item]) -> int:
    return room_of(max((item.loads for item in items), default=1))


def listed(pattern: Bsr, config: Config) -> ItemList:
    """Return the items; the cost of a step is the larger of its loads and its products."""
    items = items_of(pattern, config.across, config.down)
    strips, blocks = np.array([item.loads for item in items]), WARPS * slots_of(items)
    products = WRITTEN * strips + BLOCK * blocks
    return ItemList(items, np.maximum(strips, products), np.full(len(items), PARTIAL * blocks))


def written(pattern: Bsr, config: Config, listed: ItemList, division: Division) -> WgradWork:
    """Write the lists; HELD where products take longer than loads in most items."""
    items, depth, slots = listed.items, config.depth, slots_of(listed.items)
    held = 2 * np.count_nonzero(listed.costs > [item.loads for item in items]) > len(items)
    dy, x = (np.arange(-(-side // STRIP)) * STRIP for side in pattern.shape)
    room, sums = _room(items), np.zeros((len(items), 1), record("bsr_wgrad_mma", "Sums"))
    sums["item"] = np.arange(len(items))[:, None]
    work = work_from(
        *("bsr_wgrad_mma", division, strips_of(items, dy, x, room), sums),
        partial=WARPS * slots * SIDE * SIDE,
        boxes=((depth, STRIP), (depth, STRIP)),
        constants=(("SLOTS", slots), ("STRIPS", room), ("HELD", int(held))),
        places=_slots(items, slots, depth * STRIP_BYTES),
    )
    firsts, last = dict[int, int](), 0  # partial sums are numbered in the order of the pieces
    for (item, _, of), sums_of in zip(division.pieces.tolist(), work.sums, strict=True):
        if of > 1 and item not in firsts:
            firsts[item], last = last, last + of
        sums_of["part"]["first"] = firsts.get(item, 0)
    return work


def _slots(items: list[Item], slots: int, size: int) -> Records:
    """Return Slot [items, WARPS, slots]. A slot without a block repeats the last one.

    A strip has `size` bytes in a stage.
    """
    listed = np.zeros((len(items), WARPS, slots), record("bsr_wgrad_mma", "Slot"))
    listed["block"] = -1
    for mine, item in zip(listed, items, strict=True):
        for of_warp, blocks in zip(mine, item.sums, strict=True):
            if count := len(blocks):
                rows, columns, number = blocks.T
                dy, x = np.searchsorted(item.dy, rows // 2), np.searchsorted(item.x, columns // 2)
                of_warp["dy"][:count] = dy * size + rows % 2 * 32
                of_warp["x"][:count] = (x + len(item.dy)) * size + columns % 2 * 32
                for strip in ("dy", "x"):
                    of_warp[strip][count:] = of_warp[strip][count - 1]
                fill(of_warp, block=number, fresh=np.diff(rows, prepend=-1) != 0)
    return listed


def tried(prediction: Prediction) -> list[Config]:
    """Return those that fill whole rounds of all workers."""
    pattern, workers = prediction.pattern, prediction.workers
    blocks, room = len(pattern.columns), WARPS * MOST_SLOTS * 0.97  # warps have a few more or less
    fewest = int(blocks / room) + 1
    rounds = range(-(-fewest // workers), -(-fewest // workers) + 3)
    numbers = {-(-workers * some // parts) for some in rounds for parts in (1, 2, 3, 4)}
    fitting = [number for number in numbers if fewest <= number <= blocks // FEWEST_BLOCKS]
    configs = [config for number in fitting for config in _possible(prediction, number)]
    number = max(fewest, blocks // FEWEST_BLOCKS)
    while not configs and number <= 2 * fewest * room:
        configs = [*_possible(prediction, number)]
        number *= 2
    return configs


def _possible(prediction: Prediction, number: int) -> Iterator[Config]:
    """Yield the ways to make about so many items that registers and shared memory hold."""
    n, k = prediction.pattern.shape
    even = round((number * k / n) ** 0.5)
    for across in range(max(1, even - 1), even + 2):
        config = Config(32, across, max(1, number // across))
        items = prediction.list(config).items
        stage = _room(items) * STRIP_BYTES
        depth = next((d for d in (32, 16) if RING_BYTES // (stage * d) >= STAGES), 0)
        if depth and slots_of(items) <= MOST_SLOTS:
            yield replace(config, depth=depth)


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    if w.block != (SIDE, SIDE):
        return f"expected blocks of 16x16, found {w.block[0]}x{w.block[1]}"
    return unsupported_sizes(w, call, STRIP, len(w.columns))


GRADIENT = Gradient("bsr_wgrad_mma", Config, listed, tried, written)
KERNEL = GRADIENT.engine(unsupported_call)
