"""bsr_wgrad: its items, how they are cut, and its work lists, emulated in NumPy."""

from typing import Any

import numpy as np
import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels.bsr._wgrad import divided
from sparsebench.kernels.bsr.bsr_wgrad import CONFIGS, Config, sides_of, work_of
from tests.kernels.bsr.cases import SHAPES
from tests.kernels.bsr.examples import assert_lists_right
from tests.tools.marks import crossed

DONE = 2**31


def emulated(pattern: Bsr, dy: torch.Tensor, x: torch.Tensor, config: Config, workers: int) -> Any:
    """Emulate the device; what is not loaded is NaN, and no value may be written twice."""
    m, (_, r, c) = len(dy), pattern.values.shape
    depth, wide, (down, across) = config.depth, config.wide, sides_of(pattern)
    work = work_of(pattern, m, config, workers)
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
        first_step, step_count, apart = loads[9:]
        begins = (first_step + apart * np.arange(step_count)) * depth
        tokens = (begins[:, None] + np.arange(depth)).reshape(-1)
        slot = np.full((room + 4, len(tokens), 64), np.nan, np.float32)
        for tile, box in enumerate(loads[:room]):
            if box >= 0:
                assert box % 16 < 2
                width = down + down % 16 if box & 1 else across + across % 16
                slot[tile, :, :width] = operands[box & 1][tokens, box & ~1 :][:, :width]
        for half, (dy_at, x_at, steps, tiles, first, share, of, adds, *out) in enumerate(halves):
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
        for half, (_, _, _, tiles, first, share, of, _, *out) in enumerate(halves):
            units = range(2 * tiles * share // of, 2 * tiles * (share + 1) // of)
            for unit in units if of > 1 else ():
                sums = partials[first : first + of, half, unit // 2].sum(0)
                column = unit % 2 * 32
                put(out[unit // 2], column, sums[:, column : column + 32])
    return values.reshape(pattern.values.shape)


@pytest.mark.parametrize(
    ("shape", "config", "workers"), crossed(SHAPES["bsr_wgrad"], CONFIGS, [3, 7, 60]), ids=str
)
def test_the_lists_give_the_gradient_and_write_every_value_once(shape, config, workers):
    assert_lists_right(emulated, shape, config, workers)


@pytest.mark.parametrize("items", [1, 26, 51, 64, 102, 132, 140, 264, 300])
def test_every_step_is_assigned_once_and_the_predicted_end_is_right(items):
    costs, steps = np.random.default_rng(3).integers(6, 10, items).astype(float), 64
    division = divided(costs, np.full(items, 72), 64 * steps, 64, 132)
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
