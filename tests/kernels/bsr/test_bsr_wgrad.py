"""The Hopper kernel for dW: its lists on paper, its code compiled, and on such a GPU its sums."""

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
from sparsebench.kernels.bsr import bsr_wgrad
from sparsebench.kernels.bsr._wgrad_schedule import (
    TILES,
    Half,
    Item,
    Piece,
    fits,
    items_of,
    shared_out,
    sides_of,
    work_of,
)
from sparsebench.kernels.bsr.bsr_wgrad import CONFIGS, Config
from sparsebench.results.record import Problem
from tests.compiling.nvcc import assert_compiles_cleanly, hopper
from tests.kernels.bsr.examples import moved
from tests.tools.marks import sampled

DONE = 2**31

# m, n, k, block, part of the blocks that is stored: few tokens, and enough to cut items; slices
# alone, in pairs, in threes; edge blocks that leave W on both sides, by whole tiles too; block rows
# and columns without a block; none at all; blocks of tiles that are smaller than 64.
SHAPES = [
    (1, 320, 192, (64, 64), 0.5),
    (1000, 512, 640, (64, 64), 0.6),
    (65, 384, 576, (192, 192), 0.4),
    (300, 512, 256, (128, 64), 0.4),
    (2051, 256, 512, (64, 128), 0.4),
    (513, 200, 264, (128, 128), 0.7),
    (1500, 200, 136, (128, 192), 1.0),
    (700, 1024, 1024, (64, 64), 0.03),
    (70, 128, 128, (64, 64), 0.0),
    (300, 200, 328, (48, 40), 0.5),
    (700, 520, 504, (56, 96), 0.4),
    (2051, 480, 400, (80, 80), 0.3),
]
Shape = tuple[int, int, int, tuple[int, int], float]


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
    m, (_, r, c) = len(dy), pattern.values.shape
    depth, wide, (down, across) = config.depth, config.wide, sides_of(pattern)
    work = work_of(pattern, m, depth, wide, workers)
    operands = [np.pad(a.numpy(), ((0, depth), (0, r + c + 64))) for a in (x, dy)]
    values = np.full(pattern.values.numel(), np.nan, np.float32)
    partials = np.full((work.partials, 2, 4, 64, 64), np.nan, np.float32)
    counters = np.zeros((work.partials, 2), np.int64)

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
        slot = np.full((work.tiles + 4, len(tokens), 64), np.nan, np.float32)
        for tile, box in enumerate(loads[: work.tiles]):
            if box >= 0:
                assert box % 16 < 2
                width = down + down % 16 if box & 1 else across + across % 16
                slot[tile, :, :width] = operands[box & 1][tokens, box & ~1 :][:, :width]
        for half, (dy_at, x_at, steps, tiles, first, share, of, adds, *out) in enumerate(halves):
            assert steps == step_count
            assert dy_at < work.tiles
            assert x_at + wide <= work.tiles
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


@pytest.mark.parametrize("workers", [3, 7, 60])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_lists_give_the_gradient_and_write_every_value_once(shape, config, workers):
    pattern, (dy, x) = pattern_of(shape), activations(shape)
    expected = pattern.sample(dy.T @ x).values
    found = emulated(pattern, dy, x, config, workers)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_the_example_of_slices_that_share_places():
    there = np.array([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1, 1]], bool)
    assert items_of(there, 4) == [
        Item(Half(0, [0, 1, 2, 3]), Half(1, [0, 1, 2, 3])),
        Item(Half(0, [4, 5]), Half(1, [5, 6])),
    ]
    last = items_of(there, 4)[1]
    assert (last.slices, last.places, last.starts) == ([0, 1], [4, 5, 6], [0, 1])
    assert (last.loads, last.cost(4)) == (5, 6)


def test_what_shares_nothing_goes_by_slice_and_the_most_with_the_fewest():
    there = np.zeros((4, 20), bool)
    there[0, :10], there[1, 10:13], there[2, 13:17], there[3, 17:] = True, True, True, True
    assert items_of(there, 4) == [
        Item(Half(0, [0, 1, 2, 3]), Half(0, [4, 5, 6, 7])),
        Item(Half(2, [13, 14, 15, 16]), Half(0, [8, 9])),
        Item(Half(3, [17, 18, 19]), Half(1, [10, 11, 12])),
    ]
    assert items_of(there[:, 13:17], 4)[-1] == Item(Half(2, [0, 1, 2, 3]), Half(2, []))


@pytest.mark.parametrize(("density", "wide", "most"), [(0.5, 4, 6.6), (0.2, 4, 7.6), (0.1, 2, 9.8)])
def test_every_tile_is_in_one_item_and_items_share_their_loads(density, wide, most):
    there = np.random.default_rng(0).random((64, 64)) < density
    items = items_of(there, wide)
    tiles = [(half.slice, place) for item in items for half in item for place in half.places]
    assert sorted(tiles) == list(zip(*(at.tolist() for at in np.nonzero(there)), strict=True))
    assert all(fits(item, max(TILES), wide) for item in items)
    assert sum(item.loads for item in items) / len(tiles) * 8 < most


def test_blocks_of_128_load_six_tiles_for_eight():
    pattern = pattern_of((1, 512, 2048, (128, 128), 1.0))
    work = work_of(pattern, 4096, 64, 4, 132)
    assert work.tiles == 6
    assert {int(sum(boxes >= 0)) for boxes in work.loads[:, :6]} == {6}


def random_costs(items: int) -> Any:
    return np.random.default_rng(3).integers(6, 10, items).astype(float)


def shares(costs: Any, steps: int = 64) -> list[list[Piece]]:
    """Share out among 132 workers, with no less than four steps in a piece."""
    return shared_out(costs, np.full(len(costs), 72), steps, 4, 132)[0]


@pytest.mark.parametrize("items", [1, 26, 51, 64, 102, 132, 140, 264, 300])
def test_every_step_of_an_item_is_somebodys_and_the_last_ends_when_it_says(items):
    costs, steps = random_costs(items), 64
    lists, last = shared_out(costs, np.full(items, 72), steps, 4, 132)
    covered = np.zeros((items, steps), int)
    for piece in (piece for pieces in lists for piece in pieces):
        covered[piece.item, piece.share :: piece.of] += 1
        assert steps // piece.of >= 4
    assert (covered == 1).all()
    assert len(lists) <= 132
    assert all(pieces for pieces in lists)
    ends = [
        sum(costs[p.item] * -(-steps // p.of) + 72 * (p.of > 1) for p in pieces) for pieces in lists
    ]
    assert max(ends) == last
    assert last <= min(
        costs.max() * steps * -(-items // 132), 2 * costs.sum() * steps / 132 + 4 * costs.max() + 72
    )


def test_items_that_come_out_even_are_left_whole():
    lists = shares(np.full(264, 6.0))
    assert {piece.of for pieces in lists for piece in pieces} == {1}
    assert {len(pieces) for pieces in lists} == {2}


def test_few_items_are_cut_and_nobody_has_two_parts():
    lists = shares(np.full(33, 6.0))
    assert sorted(lists) == [[Piece(i, share, 4)] for i in range(33) for share in range(4)]


def test_a_few_items_more_than_workers_are_cut_and_the_rest_is_summed_after():
    lists = shares(np.full(143, 6.0))
    assert [pieces[-1].of for pieces in lists] == [1] * 132
    assert {len(pieces) for pieces in lists} == {2}


def test_few_tokens_are_not_cut():
    assert sorted(shares(np.full(10, 6.0), 7)) == [[Piece(item, 0, 1)] for item in range(10)]


def test_without_a_block_one_worker_has_nothing_to_do():
    work = work_of(pattern_of((70, 128, 128, (64, 64), 0.0)), 70, 64, 4, 132)
    assert work.starts.tolist() == [0, 0]
    assert work.partials == 0


@pytest.mark.parametrize("of", [2, 3, 132])
def test_a_counter_turns_when_the_last_piece_is_there_and_is_ready_for_the_next_launch(of):
    adds = [DONE - (of - 1), *[1] * (of - 1)]
    counter = 0
    for launch in range(4):
        before = counter
        for arrived, i in enumerate(np.random.default_rng(launch).permutation(of), 1):
            counter = (counter + adds[i]) % 2**32
            assert ((counter ^ before) >= DONE) == (arrived == of)
        assert counter % DONE == 0


def refused(pattern: Bsr, dy: torch.Tensor, x: torch.Tensor) -> str:
    given = {"dy": dy, "x": x}
    with pytest.raises(Unsupported) as raised:
        bsr_wgrad.prepare(
            Operands(
                Problem("linear_wgrad", {"dtype": "bf16"}), {}, given, torch.matmul, None, pattern
            )
        )
    return str(raised.value)


def test_what_the_kernel_cannot_sum_is_refused_before_anything_is_built():
    pattern = pattern_of((4, 128, 192, (64, 64), 1.0))
    half = replace(pattern, values=pattern.values.half())
    dy, x = torch.zeros(4, 128).half(), torch.zeros(4, 192).half()
    assert "found torch.float16, torch.bfloat16 and" in refused(half, dy, x.bfloat16())
    assert "and a pattern of torch.float32" in refused(pattern, dy, x)
    assert "and a pattern of torch.float32" in refused(pattern, dy.float(), x.float())
    assert "expected dY [m, 128] and X [m, 192], found shapes [3" in refused(half, dy[:3], x)
    assert "found shapes [4, 64] and [4, 192]" in refused(half, dy[:, :64], x)
    small = pattern_of((4, 128, 192, (64, 32), 1.0))
    small = replace(small, values=small.values.half())
    assert "multiples of 40, 48, 56 or 64 rows and columns, found 64x32" in refused(small, dy, x)


def test_other_devices_are_refused():
    problem = Problem("linear_wgrad", {"dtype": "fp16"})
    reason = bsr_wgrad.KERNEL.unsupported(problem, torch.device("cpu"))
    assert reason == "needs an NVIDIA GPU of compute capability 9.0, found cpu"


@pytest.mark.compiles
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("tiles", sampled(TILES))
@pytest.mark.parametrize("config", sampled(CONFIGS), ids=str)
def test_every_variant_compiles_without_a_spill_or_a_serialised_product(config, tiles, tmp_path):
    for sides, dtype in (((64, 64), torch.float16), ((48, 40), torch.bfloat16)):
        constants = bsr_wgrad.constants_of(config, tiles, sides, dtype)
        assert_compiles_cleanly("bsr_wgrad", constants, tmp_path)


@pytest.mark.skipif(not find_spec("cupy"), reason="needs CuPy")
def test_nvrtc_compiles_it():
    constants = bsr_wgrad.constants_of(CONFIGS[0], max(TILES), (64, 64), torch.float16)
    assert cuda.compiled("bsr_wgrad", constants).startswith(b"\x7fELF")
    assert cuda.compiled("bsr_wgrad", (*constants, ("WATCHDOG", 1))).startswith(b"\x7fELF")


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


# Beside the shapes above, some with more items than workers, and with items cut either way.
LARGE = [
    (4096, 1024, 1024, (64, 64), 0.3),
    (1030, 4096, 4096, (128, 128), 0.5),
    (2000, 4096, 4096, (64, 64), 0.2),
    (4096, 2048, 4096, (64, 64), 0.05),
    (3000, 2080, 1920, (80, 96), 0.1),
]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_sums_are_right_on_a_hopper_gpu_and_the_same_bits_every_time(config, dtype):
    for shape, watchdog in product([*LARGE, *SHAPES], (True, False)):
        pattern, dy, x = on_gpu(shape, dtype)
        program = bsr_wgrad.launch(dy, x, pattern, config, watchdog=watchdog)
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
    pattern, dy, x = on_gpu((3000, 512, 512, (64, 64), 0.5), "bf16")
    dy[:, 70], x[:, 130] = float("nan"), float("nan")
    values = bsr_wgrad.launch(dy, x, pattern, Config(64, 4))()
    dense = replace(pattern, values=values).to_dense().isnan()
    there = replace(pattern, values=torch.ones_like(values)).to_dense() == 1
    there[torch.arange(512) != 70] &= torch.arange(512, device="cuda") == 130
    assert torch.equal(dense, there)


@pytest.mark.gpu
@hopper
def test_one_plan_serves_other_operands():
    shape = (1000, 1024, 1024, (64, 64), 0.1)
    pattern, dy, x = on_gpu(shape, "bf16")
    plan = bsr_wgrad.plan(pattern, len(dy), Config(64, 2))
    for factor in (1, 2):
        values = bsr_wgrad.bind(plan, dy * factor, x)()
        assert_right(values, dy * factor, x, pattern, factor)
    with pytest.raises(Unsupported, match="planned for"):
        bsr_wgrad.bind(plan, dy[:10], x[:10])


@pytest.mark.gpu
@hopper
def test_a_prepared_launch_is_captured_and_sums_rewritten_activations():
    pattern, dy, x = on_gpu((1000, 1536, 1280, (64, 64), 0.1), "bf16")
    wide = [a.new_zeros(len(a), a.shape[1] + 64)[:, : a.shape[1]] for a in (dy, x)]
    given = dict(zip(("dy", "x"), wide, strict=True))  # rows with a gap between them
    operands = Operands(
        Problem("linear_wgrad", {"dtype": "bf16"}), {}, given, torch.matmul, None, pattern
    )
    launch = bsr_wgrad.prepare(operands)
    again = bsr_wgrad.prepare(replace(operands, pinned=launch.choice))
    assert (again.choice, again.code) == (launch.choice, launch.code)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gradient = launch()
    assert torch.equal(gradient.columns, pattern.columns)
    for factor in (1, 2, 3):
        wide[0].copy_(dy * factor)
        wide[1].copy_(x)
        gradient.values.fill_(float("nan"))
        graph.replay()
        assert_right(gradient.values, dy * factor, x, pattern, launch.choice)
