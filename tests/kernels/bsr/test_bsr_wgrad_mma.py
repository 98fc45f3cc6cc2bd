"""bsr_wgrad_mma: its items and work lists, emulated in NumPy, and its choices."""

from typing import Any

import numpy as np
import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels.bsr._wgrad import RING_BYTES, STRIP_BYTES
from sparsebench.kernels.bsr.bsr_wgrad_mma import (
    MOST_SLOTS,
    STAGES,
    WARPS,
    Config,
    choices,
    items_of,
    slots_of,
    work_of,
)
from tests.kernels.bsr.cases import SHAPES, WGRAD_MMA
from tests.kernels.bsr.examples import assert_lists_right, example
from tests.tools.marks import crossed

DONE = 2**31


def emulated(pattern: Bsr, dy: torch.Tensor, x: torch.Tensor, config: Config, workers: int) -> Any:
    """Emulate the device; what is not loaded is missing, and no block may be written twice."""
    m, depth, work = len(dy), config.depth, work_of(pattern, len(dy), config, workers)
    room, size = work.loads.shape[1] - 4, config.depth * STRIP_BYTES
    operands = [np.pad(a.numpy(), ((0, depth), (0, 64))) for a in (x, dy)]
    values = np.full(pattern.values.shape, np.nan, np.float32)
    partials: dict[tuple[int, int], list[Any]] = {}
    adds = np.zeros(work.cut, np.int64)
    assert (work.starts[0], work.starts[-1]) == (0, len(work.loads))
    for loads, (item, count, first, share, of, add, *_) in zip(
        work.loads, work.sums[:, 0], strict=True
    ):
        step, steps, apart, _ = loads[room:]
        assert steps == count
        tokens = (step + apart * np.arange(steps))[:, None] * depth + np.arange(depth)
        tokens = tokens.reshape(-1)
        assert (tokens < m + depth).all()
        stage = [
            None if box < 0 else operands[box & 1][tokens, box >> 1 :][:, :32]
            for box in loads[:room]
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


@pytest.mark.parametrize(
    ("shape", "config", "workers"), crossed(SHAPES["bsr_wgrad_mma"], WGRAD_MMA, [3, 7, 60]), ids=str
)
def test_the_lists_give_the_gradient_and_write_every_block_once(shape, config, workers) -> None:
    assert_lists_right(emulated, shape, config, workers)


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
    configs = choices(pattern, shape[0], 132)
    assert configs
    for config in configs:
        items = items_of(pattern, config.across, config.down)
        assert slots_of(items) <= MOST_SLOTS
        assert sum(len(warp) for item in items for warp in item.sums) == len(pattern.columns)
        assert all(len(item.sums) == WARPS for item in items)
        room = work_of(pattern, shape[0], config, 132).loads.shape[1] - 4
        assert RING_BYTES // (room * STRIP_BYTES * config.depth) >= STAGES
