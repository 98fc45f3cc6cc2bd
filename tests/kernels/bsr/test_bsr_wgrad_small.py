"""bsr_wgrad_small: its cells, its items and its work lists, emulated in NumPy."""

from typing import Any

import numpy as np
import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels.bsr._wgrad import room_of
from sparsebench.kernels.bsr.bsr_wgrad_small import Config, cells_of, work_of
from tests.kernels.bsr.cases import SHAPES, WGRAD_SMALL
from tests.kernels.bsr.examples import assert_lists_right, example
from tests.tools.marks import crossed

DONE = 2**31


def emulated(pattern: Bsr, dy: torch.Tensor, x: torch.Tensor, config: Config, workers: int) -> Any:
    """Emulate the device; what is not loaded is NaN, and no value may be written twice."""
    m, (_, r, c), (depth, units) = len(dy), pattern.values.shape, (config.depth, config.units)
    work, room = work_of(pattern, m, config, workers), room_of(config.strips)
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
        first_step, step_count, apart, _ = loads[room:]
        begins = (first_step + apart * np.arange(step_count)) * depth
        tokens = (begins[:, None] + np.arange(depth)).reshape(-1)
        slot = np.full((room, len(tokens), 32), np.nan, np.float32)
        for at, box in enumerate(loads[:room]):
            if box >= 0:
                slot[at] = operands[box & 1][:, box >> 1 :][tokens, :32]
        for half, (count, steps, first, share, of, adds, places, _, *words) in enumerate(halves):
            assert steps == step_count
            for unit in range(count):
                read = np.array([(w & 0x3FFF, w >> 16) for w in words[2 * unit :][:2]]) // strip
                a, b = (slot[[at, at + apart_from]] for at, apart_from in read)
                for quad, x_strip in enumerate(b, 2 * unit):
                    sums = np.concatenate([strip.T for strip in a]) @ x_strip
                    if of == 1:
                        put(work.places[places + quad], sums)
                    else:
                        partials[first + share, half, quad] = sums
            if of > 1:
                counters[first, half] += adds
    assert set(np.unique(counters)) <= {0, DONE}
    for halves in work.sums:
        for half, (count, _, first, share, of, _, places, *_) in enumerate(halves):
            quads = range(2 * count * share // of, 2 * count * (share + 1) // of)
            for quad in quads if of > 1 else ():
                put(work.places[places + quad], partials[first : first + of, half, quad].sum(0))
    return values.reshape(pattern.values.shape)


@pytest.mark.parametrize(
    ("shape", "config", "workers"),
    crossed(SHAPES["bsr_wgrad_small"], WGRAD_SMALL, [3, 7, 60]),
    ids=str,
)
def test_the_lists_give_the_gradient_and_write_every_value_once(shape, config, workers):
    assert_lists_right(emulated, shape, config, workers)


@pytest.mark.parametrize(
    ("block", "cells"), [(8, 1), (16, 1), (32, 1), (24, 1), (40, 4), (48, 4), (64, 4), (96, 9)]
)
def test_a_block_is_in_as_few_cells_as_possible(block, cells):
    units = cells_of(example((1, 10 * block, 10 * block, block, 0.01))[0])
    assert units.there.sum() == cells
    assert not any((firsts % 16).any() for firsts in (units.dy, units.x))
