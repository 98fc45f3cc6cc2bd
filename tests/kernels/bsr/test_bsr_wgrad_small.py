"""The Hopper kernel for dW of small blocks: lists on paper, code compiled, sums on such a GPU."""

import shutil
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.kernels._common import cuda
from sparsebench.kernels._kernel import DTYPES, Operands
from sparsebench.kernels.bsr import bsr_wgrad_small
from sparsebench.kernels.bsr._wgrad_small_schedule import (
    Item,
    cells_of,
    items_of,
    room_of,
    work_of,
)
from sparsebench.kernels.bsr.bsr_wgrad_small import DEEP, FEWEST, MOST, UNITS, Config
from sparsebench.results.record import Problem
from tests.compiling.nvcc import assert_compiles_cleanly, hopper
from tests.kernels.bsr.examples import moved
from tests.tools.marks import sampled

DONE = 2**31
CONFIGS = [Config(64, 2, 7), Config(32, 2, 12), Config(64, 4, 12), Config(32, 4, 18)]
CONFIGS += [Config(32, 6, 24)]

# m, n, k, block, part of the blocks that is stored: few tokens, and enough to cut items; blocks
# smaller than a cell, larger, and that share no cell; edge blocks that leave W on both sides, by
# whole strips too; block rows and columns without a block; none at all.
SHAPES = [
    (1, 160, 192, (32, 32), 0.5),
    (1000, 512, 640, (32, 32), 0.3),
    (700, 256, 320, (16, 16), 0.2),
    (2051, 128, 256, (8, 8), 0.05),
    (300, 240, 264, (24, 24), 0.3),
    (513, 400, 264, (48, 48), 0.4),
    (65, 200, 320, (40, 80), 0.5),
    (130, 200, 136, (16, 32), 0.4),
    (1500, 200, 136, (96, 24), 1.0),
    (700, 1024, 1024, (32, 32), 0.03),
    (70, 64, 128, (32, 32), 0.0),
]
Shape = tuple[int, int, int, tuple[int, int], float]


def compiled_configs() -> list[Config]:
    """Return a configuration for each machine code that `configurations` may ask for."""
    ways = {
        (depth, units, room_of(strips)): Config(depth, units, room_of(strips))
        for units in UNITS
        for strips in range(FEWEST, MOST + 1)
        for depth in (64, 32)
        if depth == 32 or strips <= DEEP
    }
    return [*ways.values()]


def pattern_of(shape: Shape) -> Bsr:
    """Return a random pattern; its values mean nothing."""
    _, n, k, (r, c), density = shape
    rows, columns = -(-n // r), -(-k // c)
    order = np.random.default_rng(1).permutation(rows * columns).reshape(rows, columns)
    there = order < density * rows * columns
    offsets = np.concatenate([[0], there.sum(1).cumsum()]).astype(np.int32)
    values = torch.full((int(offsets[-1]), r, c), float("nan"))
    index = torch.from_numpy(offsets), torch.from_numpy(np.nonzero(there)[1].astype(np.int32))
    return Bsr((n, k), *index, values)


def activations(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dY [m, n] and X [m, k]."""
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(shape[0], size, generator=generator) for size in shape[1:3])


def emulated(pattern: Bsr, dy: torch.Tensor, x: torch.Tensor, config: Config, workers: int) -> Any:
    """Do with the lists what the device does; what was not loaded is NaN, nothing written twice."""
    m, (_, r, c), (depth, units) = len(dy), pattern.values.shape, (config.depth, config.units)
    cells, room = cells_of(pattern), room_of(config.strips)
    items = items_of(cells.there, units, config.strips)
    work = work_of(cells, items, m, depth, units, room, workers)
    operands = [np.pad(a.numpy(), ((0, depth), (0, r + c + 64))) for a in (x, dy)]
    values = np.full(pattern.values.numel(), np.nan, np.float32)
    partials = np.full((work.partials, 2, 2 * units, 64, 32), np.nan, np.float32)
    counters = np.zeros((work.partials, 2), np.int64)
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


@pytest.mark.parametrize("workers", [3, 7, 60])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_lists_give_the_gradient_and_write_every_value_once(shape, config, workers):
    pattern, (dy, x) = pattern_of(shape), activations(shape)
    expected = pattern.sample(dy.T @ x).values
    found = emulated(pattern, dy, x, config, workers)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_the_example_of_cells_that_share_strips():
    rows = ["#.#..#..", "...#..#.", "#.#..#.#", "#.#.#..."]
    there = np.array([[cell == "#" for cell in row] for row in rows])
    assert items_of(there, 2, 7) == [
        Item([0, 2, 3], [0, 2, 5, 7], [(0, 1, 0, 1, 15), (2, 2, 0, 1, 5), (0, 1, 2, 3, 11)]),
        Item([1, 3], [3, 6, 4], [(0, 0, 0, 1, 5), (1, 1, 2, 2, 1)]),
    ]


@pytest.mark.parametrize(
    ("density", "units", "strips", "loads", "cells"),
    [
        (0.5, 6, 20, 0.44, 3.0),
        (0.2, 6, 16, 0.58, 2.7),
        (0.1, 4, 12, 0.77, 2.5),
        (0.05, 2, 8, 1.03, 2.4),
    ],
)
def test_every_cell_is_in_one_item_and_items_share_their_loads(
    density, units, strips, loads, cells
):
    there = np.random.default_rng(0).random((128, 128)) < density
    items, found = items_of(there, units, strips), np.zeros(there.shape, int)
    for item in items:
        assert item.loads <= strips
        assert len(item.units) <= 2 * units
        for *four, has in item.units:
            assert four[0] <= four[1]
            assert four[2] <= four[3]
            for at in range(4):
                found[item.dy[four[at % 2]], item.x[four[2 + at // 2]]] += has >> at & 1
    assert (found == there).all()
    assert sum(item.loads for item in items) / there.sum() < loads
    assert there.sum() / sum(len(item.units) for item in items) > cells


@pytest.mark.parametrize(
    ("block", "cells"), [(8, 1), (16, 1), (32, 1), (24, 1), (40, 4), (48, 4), (64, 4), (96, 9)]
)
def test_a_block_is_in_as_few_cells_as_can_be(block, cells):
    found = cells_of(pattern_of((1, 10 * block, 10 * block, (block, block), 0.01)))
    assert found.there.sum() == cells
    assert not any((firsts % 16).any() for firsts in (found.dy, found.x))


def test_items_of_few_strips_make_whole_rounds():
    pattern = pattern_of((1, 4096, 4096, (32, 32), 0.1))
    first = bsr_wgrad_small.configurations(pattern, 4096, 132)[0]
    items = items_of(cells_of(pattern).there, first.units, first.strips)
    assert 120 < len(items) <= 132


def test_without_a_block_one_worker_has_nothing_to_do():
    cells = cells_of(pattern_of((70, 64, 128, (32, 32), 0.0)))
    work = work_of(cells, items_of(cells.there, 4, 12), 70, 64, 4, 12, 132)
    assert work.starts.tolist() == [0, 0]
    assert work.partials == 0


def refused(pattern: Bsr, dy: torch.Tensor, x: torch.Tensor) -> str:
    given = {"dy": dy, "x": x}
    problem = Problem("linear_wgrad", {"dtype": "bf16"})
    with pytest.raises(Unsupported) as raised:
        bsr_wgrad_small.prepare(Operands(problem, {}, given, torch.matmul, None, pattern))
    return str(raised.value)


def test_what_the_kernel_cannot_sum_is_refused_before_anything_is_built():
    pattern = pattern_of((4, 128, 192, (32, 32), 1.0))
    half = replace(pattern, values=pattern.values.half())
    dy, x = torch.zeros(4, 128).half(), torch.zeros(4, 192).half()
    assert "found torch.float16, torch.bfloat16 and" in refused(half, dy, x.bfloat16())
    assert "and a pattern of torch.float32" in refused(pattern, dy.float(), x.float())
    assert "expected dY [m, 128] and X [m, 192], found shapes [3" in refused(half, dy[:3], x)
    odd = pattern_of((4, 128, 192, (32, 12), 1.0))
    odd = replace(odd, values=odd.values.half())
    assert "multiple of 8 rows and columns, found 32x12" in refused(odd, dy, x)


def test_other_devices_are_refused():
    problem = Problem("linear_wgrad", {"dtype": "fp16"})
    reason = bsr_wgrad_small.KERNEL.unsupported(problem, torch.device("cpu"))
    assert reason == "needs an NVIDIA GPU of compute capability 9.0, found cpu"


@pytest.mark.compiles
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("config", sampled(compiled_configs()), ids=str)
def test_every_variant_compiles_without_a_spill_or_a_serialised_product(config, tmp_path):
    for dtype in (torch.float16, torch.bfloat16):
        constants = bsr_wgrad_small.constants_of(config, dtype)
        assert_compiles_cleanly("bsr_wgrad_small", constants, tmp_path)


@pytest.mark.skipif(not find_spec("cupy"), reason="needs CuPy")
def test_nvrtc_compiles_it():
    constants = bsr_wgrad_small.constants_of(CONFIGS[0], torch.float16)
    assert cuda.compiled("bsr_wgrad_small", constants).startswith(b"\x7fELF")
    assert cuda.compiled("bsr_wgrad_small", (*constants, ("WATCHDOG", 1))).startswith(b"\x7fELF")


def on_gpu(shape: Shape, dtype: str) -> tuple[Bsr, torch.Tensor, torch.Tensor]:
    return moved(pattern_of(shape), dtype), *(
        a.cuda().to(DTYPES[dtype]) for a in activations(shape)
    )


def assert_right(values: Any, dy: Any, x: Any, pattern: Bsr, what: Any) -> None:
    """Hold the values against the definition; what a block has outside of W is zero."""
    dy, x = dy.double(), x.double()
    spread = (dy.square().T @ x.square()).sqrt()
    expected = Expected(dy.T @ x, spread, values.dtype, len(x))
    found = check(replace(pattern, values=values), expected, pattern)
    assert found.reason is None, f"{what}: {found.reason}"


# Beside the shapes above, some with more items than workers, and with items cut.
LARGE = [
    (4096, 1024, 1024, (32, 32), 0.3),
    (1030, 4096, 4096, (16, 16), 0.3),
    (2000, 2048, 4096, (48, 48), 0.1),
    (4096, 2048, 2048, (32, 32), 0.05),
]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_sums_are_right_on_a_hopper_gpu_and_the_same_bits_every_time(config, dtype):
    for shape, watchdog in product([*LARGE, *SHAPES], (True, False)):
        pattern, dy, x = on_gpu(shape, dtype)
        program = bsr_wgrad_small.launch(dy, x, pattern, config, watchdog=watchdog)
        found = []
        for _ in range(3):
            program.out.fill_(float("nan"))
            found.append(program().clone())
        torch.cuda.synchronize()
        assert_right(found[0], dy, x, pattern, (shape, watchdog))
        assert all(
            torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairwise(found)
        )


@pytest.mark.gpu
@hopper
def test_a_nan_stays_in_its_row_and_column():
    pattern, dy, x = on_gpu((3000, 512, 512, (16, 16), 0.5), "bf16")
    dy[:, 70], x[:, 130] = float("nan"), float("nan")
    values = bsr_wgrad_small.launch(dy, x, pattern, Config(32, 8, 20))()
    dense = replace(pattern, values=values).to_dense().isnan()
    there = replace(pattern, values=torch.ones_like(values)).to_dense() == 1
    there[torch.arange(512) != 70] &= torch.arange(512, device="cuda") == 130
    assert torch.equal(dense, there)


@pytest.mark.gpu
@hopper
def test_a_prepared_launch_is_captured_and_sums_rewritten_activations():
    pattern, dy, x = on_gpu((1000, 1536, 1280, (32, 32), 0.1), "bf16")
    wide = [a.new_zeros(len(a), a.shape[1] + 64)[:, : a.shape[1]] for a in (dy, x)]
    given = dict(zip(("dy", "x"), wide, strict=True))  # rows with a gap between them
    problem = Problem("linear_wgrad", {"dtype": "bf16"})
    operands = Operands(problem, {}, given, torch.matmul, None, pattern)
    launch = bsr_wgrad_small.prepare(operands)
    again = bsr_wgrad_small.prepare(replace(operands, pinned=launch.choice))
    assert (again.choice, again.code) == (launch.choice, launch.code)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gradient = launch()
    for factor in (1, 2, 3):
        wide[0].copy_(dy * factor)
        wide[1].copy_(x)
        gradient.values.fill_(float("nan"))
        graph.replay()
        assert_right(gradient.values, dy * factor, x, pattern, launch.choice)
