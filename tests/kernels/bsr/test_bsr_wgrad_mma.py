"""bsr_wgrad_mma: its items and work lists, emulated in NumPy, and its choices on a GPU."""

from typing import Any

import numpy as np
import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels.bsr import bsr_wgrad_mma
from sparsebench.kernels.bsr.bsr_wgrad_mma import (
    MOST_SLOTS,
    RING_BYTES,
    ROW_BYTES,
    STAGES,
    WARPS,
    Config,
    configurations,
    items_of,
    room_of,
    slots_of,
    work_of,
)
from tests.compiling.nvcc import hopper
from tests.kernels.bsr.cases import SHAPES, WGRAD_MMA
from tests.kernels.bsr.examples import (
    activations,
    assert_lists_right,
    assert_right_gradient,
    moved,
    pattern_of,
)
from tests.tools.marks import crossed

DONE = 2**31


def emulated(pattern: Bsr, dy: torch.Tensor, x: torch.Tensor, config: Config, workers: int) -> Any:
    """Emulate the device; what is not loaded is missing, and no block may be written twice."""
    m, depth, work = len(dy), config.depth, work_of(pattern, len(dy), config, workers)
    room, size = work.loads.shape[1] - 4, config.depth * ROW_BYTES
    operands = [np.pad(a.numpy(), ((0, depth), (0, 64))) for a in (x, dy)]
    values = np.full(pattern.values.shape, np.nan, np.float32)
    partials: dict[tuple[int, int], list[Any]] = {}
    adds = np.zeros(work.partials, np.int64)
    assert (work.starts[0], work.starts[-1]) == (0, len(work.loads))
    for loads, (item, count, first, share, of, add, *_) in zip(work.loads, work.sums, strict=True):
        step, steps, apart, _ = loads[room:]
        assert steps == count
        tokens = (step + apart * np.arange(steps))[:, None] * depth + np.arange(depth)
        tokens = tokens.reshape(-1)
        assert (tokens < m + depth).all()
        stage = [
            None if box < 0 else operands[box & 1][tokens, box >> 1 :][:, :32]
            for box in loads[:room]
        ]
        for of_warp in work.slots[item]:
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
def test_configurations_fit_registers_and_shared_memory(shape) -> None:
    pattern = pattern_of(shape)
    configs = configurations(pattern, shape[0], 132)
    assert configs
    for config in configs:
        items = items_of(pattern, config.across, config.down)
        assert slots_of(items) <= MOST_SLOTS
        assert sum(len(warp) for item in items for warp in item.warps) == len(pattern.columns)
        assert all(len(item.warps) == WARPS for item in items)
        assert RING_BYTES // (room_of(items) * ROW_BYTES * config.depth) >= STAGES


@hopper
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "shape",
    [
        (4096, 4096, 4096, (16, 16), 0.1),
        (1030, 2048, 4096, (16, 16), 0.26),
        (64, 10240, 10240, (16, 16), 0.065),
        (1000, 2000, 1488, (16, 16), 0.1),
    ],
)
def test_the_configurations_of_a_search_are_right_on_a_gpu(shape, dtype) -> None:
    pattern = moved(pattern_of(shape), dtype)
    dy, x = (a.cuda().to(pattern.values.dtype) for a in activations(shape))
    for config in configurations(pattern, len(dy), 132)[:2]:
        program = bsr_wgrad_mma.launch(dy, x, pattern, config)
        for _ in range(2):
            dy.copy_(torch.randn_like(dy))  # redrawn in place
            program.out.fill_(float("nan"))
            assert_right_gradient(program(), dy, x, pattern, (shape, config))
