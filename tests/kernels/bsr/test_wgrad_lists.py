"""The lists of bsr_wgrad, bsr_wgrad_mma and bsr_wgrad_small, emulated in NumPy, and their items.

What is not loaded is NaN or missing, and no value may be written twice.
"""

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels.bsr import bsr_wgrad, bsr_wgrad_mma, bsr_wgrad_small
from sparsebench.kernels.bsr._wgrad import RING_BYTES, STRIP_BYTES, ItemList, division_of, room_of
from tests.kernels.bsr.cases import SHAPES, WGRAD_MMA, WGRAD_SMALL
from tests.kernels.bsr.examples import example
from tests.tools.marks import crossed

DONE = 2**31


def by_tiles(pattern: Bsr, dy: Tensor, x: Tensor, config: Any, workers: int) -> Any:
    m, (_, r, c) = len(dy), pattern.values.shape
    depth, wide, (down, across) = config.depth, config.wide, bsr_wgrad.sides_of(pattern)
    work = bsr_wgrad.GRADIENT.work(pattern, m, config, workers)
    room = dict(work.constants)["TILES"]
    operands = [np.pad(a.numpy(), ((0, depth), (0, r + c + 64))) for a in (x, dy)]
    values = np.full(pattern.values.numel(), np.nan, np.float32)
    partials = np.full((work.cut, 2, 4, 64, 64), np.nan, np.float32)
    counters = np.zeros((work.cut, 2), np.int64)

    def put(out: int, column: int, sums: Any) -> None:
        top, left = 8 * (out >> 1 & 1), 8 * (out & 1)
        rows = np.arange(top, top + down)
        columns = np.arange(max(left, column), min(left + across, column + sums.shape[1]))
        at = (out >> 2) * 8 + (rows[:, None] - top) * c + columns - left
        sums = sums[rows[:, None], columns - column]
        assert np.isnan(values[at]).all()
        values[at] = sums

    assert work.starts[0] == 0
    assert work.starts[-1] == len(work.loads)
    for loads, halves in zip(work.loads, work.sums[:-1], strict=True):
        boxes, first_step, step_count, apart = loads
        begins = (first_step + apart * np.arange(step_count)) * depth
        tokens = (begins[:, None] + np.arange(depth)).reshape(-1)
        slot = np.full((room + 4, len(tokens), 64), np.nan, np.float32)
        for tile, box in enumerate(boxes[:room]):
            if box >= 0:
                assert box % 16 < 2
                width = down + down % 16 if box & 1 else across + across % 16
                slot[tile, :, :width] = operands[box & 1][tokens, box & ~1 :][:, :width]
        for half, (dy_at, x_at, steps, tiles, part, out) in enumerate(halves):
            first, share, of, adds = part
            assert steps == step_count
            assert dy_at < room
            assert x_at + wide <= room
            sums = [slot[dy_at].T @ tile for tile in slot[x_at : x_at + wide]]
            for tile in range(tiles):
                if of == 1:
                    put(out[tile], 0, sums[tile])
                else:
                    partials[first + share, half, tile] = sums[tile]
            if tiles and of > 1:
                counters[first, half] += adds
    assert set(np.unique(counters)) <= {0, DONE}
    for halves in work.sums[:-1]:
        for half, (_, _, _, tiles, part, out) in enumerate(halves):
            first, share, of, _ = part
            units = range(2 * tiles * share // of, 2 * tiles * (share + 1) // of)
            for unit in units if of > 1 else ():
                sums = partials[first : first + of, half, unit // 2].sum(0)
                column = unit % 2 * 32
                put(out[unit // 2], column, sums[:, column : column + 32])
    return values.reshape(pattern.values.shape)


def by_blocks(pattern: Bsr, dy: Tensor, x: Tensor, config: Any, workers: int) -> Any:
    m, depth, work = (
        len(dy),
        config.depth,
        bsr_wgrad_mma.GRADIENT.work(pattern, len(dy), config, workers),
    )
    size = config.depth * STRIP_BYTES
    operands = [np.pad(a.numpy(), ((0, depth), (0, 64))) for a in (x, dy)]
    values = np.full(pattern.values.shape, np.nan, np.float32)
    partials: dict[tuple[int, int], list[Any]] = {}
    adds = np.zeros(work.cut, np.int64)
    assert (work.starts[0], work.starts[-1]) == (0, len(work.loads))
    for loads, (item, count, part, _) in zip(work.loads, work.sums[:, 0], strict=True):
        first, share, of, add = part
        boxes, step, steps, apart, _ = loads
        assert steps == count
        tokens = (step + apart * np.arange(steps))[:, None] * depth + np.arange(depth)
        tokens = tokens.reshape(-1)
        assert (tokens < m + depth).all()
        stage = [
            None if box < 0 else operands[box & 1][tokens, box >> 1 :][:, :32] for box in boxes
        ]
        for of_warp in work.places[item]:
            left: Any = None
            for dy_at, x_at, block, fresh in of_warp:
                strip, half = divmod(dy_at, size)
                left = stage[strip][:, half // 2 :][:, :16] if fresh else left
                if block < 0:
                    continue
                strip, half = divmod(x_at, size)
                partial = left.T @ stage[strip][:, half // 2 :][:, :16]
                partials.setdefault((first if of > 1 else -1, block), [None] * of)[share] = partial
        if of > 1:
            adds[first] += add
    assert set(np.unique(adds)) <= {0, DONE}
    for (_, block), parts in partials.items():
        assert np.isnan(values[block]).all()
        values[block] = sum(parts)
    return values


def by_cells(pattern: Bsr, dy: Tensor, x: Tensor, config: Any, workers: int) -> Any:
    m, (_, r, c), (depth, units) = len(dy), pattern.values.shape, (config.depth, config.units)
    work, room = bsr_wgrad_small.GRADIENT.work(pattern, m, config, workers), room_of(config.strips)
    operands = [np.pad(a.numpy(), ((0, depth), (0, r + c + 64))) for a in (x, dy)]
    values = np.full(pattern.values.numel(), np.nan, np.float32)
    partials = np.full((work.cut, 2, 2 * units, 64, 32), np.nan, np.float32)
    counters = np.zeros((work.cut, 2), np.int64)
    strip = depth * 64 // 16  # in a descriptor

    def put(places: Any, sums: Any) -> None:
        for (i, j), place in np.ndenumerate(places):
            if place >= 0:
                at = place * 8 + np.arange(8)[:, None] * c + np.arange(8)
                assert np.isnan(values[at]).all()
                values[at] = sums[i * 8 : i * 8 + 8, j * 8 : j * 8 + 8]

    assert work.starts[0] == 0
    assert work.starts[-1] == len(work.loads)
    for loads, halves in zip(work.loads, work.sums, strict=True):
        boxes, first_step, step_count, apart, _ = loads
        begins = (first_step + apart * np.arange(step_count)) * depth
        tokens = (begins[:, None] + np.arange(depth)).reshape(-1)
        slot = np.full((room, len(tokens), 32), np.nan, np.float32)
        for at, box in enumerate(boxes):
            if box >= 0:
                slot[at] = operands[box & 1][:, box >> 1 :][tokens, :32]
        for half, (count, steps, part, places, _, descriptors) in enumerate(halves):
            first, share, of, adds = part
            assert steps == step_count
            for unit in range(count):
                words = map(int, descriptors[unit])
                read = np.array([(w & 0x3FFF, w >> 16) for w in words]) // strip
                a, b = (slot[[at, at + apart_from]] for at, apart_from in read)
                for quad, x_strip in enumerate(b, 2 * unit):
                    sums = np.concatenate([strip.T for strip in a]) @ x_strip
                    if of == 1:
                        put(work.places["at"][places + quad], sums)
                    else:
                        partials[first + share, half, quad] = sums
            if of > 1:
                counters[first, half] += adds
    assert set(np.unique(counters)) <= {0, DONE}
    for halves in work.sums:
        for half, (count, _, part, places, *_) in enumerate(halves):
            first, share, of, _ = part
            quads = range(2 * count * share // of, 2 * count * (share + 1) // of)
            for quad in quads if of > 1 else ():
                put(
                    work.places["at"][places + quad],
                    partials[first : first + of, half, quad].sum(0),
                )
    return values.reshape(pattern.values.shape)


def name_of(value: Any) -> str:
    return str(getattr(value, "__name__", value))


WORKERS = [3, 7, 60]
CASES = [
    *crossed([by_tiles], SHAPES["bsr_wgrad"], bsr_wgrad.CONFIGS, WORKERS),
    *crossed([by_blocks], SHAPES["bsr_wgrad_mma"], WGRAD_MMA, WORKERS),
    *crossed([by_cells], SHAPES["bsr_wgrad_small"], WGRAD_SMALL, WORKERS),
]


@pytest.mark.parametrize(("emulated", "shape", "config", "workers"), CASES, ids=name_of)
def test_the_lists_give_the_gradient_and_write_every_value_once(emulated, shape, config, workers):
    pattern, x, dy = example(shape)
    values = emulated(pattern, dy, x, config, workers)
    np.testing.assert_allclose(values, pattern.sample(dy.T @ x).values, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("items", [1, 26, 51, 64, 102, 132, 140, 264, 300])
def test_every_step_is_assigned_once_and_the_predicted_end_is_right(items):
    costs, steps = np.random.default_rng(3).integers(6, 10, items).astype(float), 64
    division = division_of(ItemList([], costs, np.full(items, 72)), 64 * steps, 64, 132)
    covered = np.zeros((items, steps), int)
    for item, share, of in division.pieces:
        covered[item, share::of] += 1
        assert steps // of >= 4
    assert (covered == 1).all()
    assert 1 < len(division.starts) <= 133
    assert (np.diff(division.starts) > 0).all()
    item, _, of = division.pieces.T
    ends = np.add.reduceat(costs[item] * -(-steps // of) + 72 * (of > 1), division.starts[:-1])
    assert ends.max() == division.last
    assert division.last <= min(
        costs.max() * steps * -(-items // 132), 2 * costs.sum() * steps / 132 + 4 * costs.max() + 72
    )


@pytest.mark.parametrize(
    "shape",
    [
        *SHAPES["bsr_wgrad_mma"],
        (64, 2048, 2048, (16, 16), 0.2),
        (64, 5120, 5120, (16, 16), 0.01),
        (300, 1024, 512, (16, 16), 1.0),
    ],
)
def test_choices_fit_registers_and_shared_memory(shape) -> None:
    pattern, _, _ = example(shape)
    configs = bsr_wgrad_mma.GRADIENT.choices(pattern, shape[0], 132)
    assert configs
    for config in configs:
        items = bsr_wgrad_mma.items_of(pattern, config.across, config.down)
        assert bsr_wgrad_mma.slots_of(items) <= bsr_wgrad_mma.MOST_SLOTS
        assert sum(len(warp) for item in items for warp in item.sums) == len(pattern.columns)
        assert all(len(item.sums) == bsr_wgrad_mma.WARPS for item in items)
        work = bsr_wgrad_mma.GRADIENT.work(pattern, shape[0], config, 132)
        room = work.loads["boxes"].shape[1]
        assert RING_BYTES // (room * STRIP_BYTES * config.depth) >= bsr_wgrad_mma.STAGES


@pytest.mark.parametrize(
    ("block", "cells"), [(8, 1), (16, 1), (32, 1), (24, 1), (40, 4), (48, 4), (64, 4), (96, 9)]
)
def test_a_block_is_in_as_few_cells_as_possible(block, cells):
    units = bsr_wgrad_small.cells_of(example((1, 10 * block, 10 * block, block, 0.01))[0])
    assert units.there.sum() == cells
    assert not any((firsts % 16).any() for firsts in (units.dy, units.x))
