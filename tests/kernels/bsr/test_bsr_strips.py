"""The kernel for odd blocks: its lists on paper, its code compiled, and on a GPU its products."""

import shutil
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._kernel import DTYPES, Operands
from sparsebench.kernels.bsr import _launch, bsr_strips
from sparsebench.kernels.bsr._small_steps import END, LAST, NO_STRIP, gathered, worked
from sparsebench.kernels.bsr.bsr_strips import (
    Config,
    boxes_of,
    costs_of,
    packed_order,
    strips_of,
    tiles_of,
)
from sparsebench.results.record import Problem
from tests.compiling.nvcc import assert_compiles_cleanly, hopper
from tests.kernels.bsr.examples import Shape, assert_right, example, moved
from tests.tools.marks import sampled

# Few rows and many, one warpgroup; every number of strips in a step; aligned strips.
CONFIGS = [Config(128, 2, 2), Config(64, 1, 1), Config(64, 3, 2), Config(256, 1, 2)]
ALIGNED = [Config(128, 2, 2, 2), Config(64, 1, 1, 2), Config(64, 3, 2, 2), Config(256, 1, 2, 2)]

# m, n, k, block, part of the blocks that is stored: full rows; edge blocks that leave W on both
# sides; blocks that are cut into tiles; tiles of odd multiples of 8; none at all.
SHAPES = [
    (100, 320, 192, (24, 24), 0.3),
    (130, 200, 328, (48, 48), 1.0),
    (65, 288, 512, (40, 40), 0.1),
    (300, 200, 264, (80, 96), 0.4),
    (257, 1000, 1000, (40, 24), 0.2),
    (513, 776, 520, (56, 56), 0.15),
    (1, 640, 640, (64, 16), 0.05),
    (4, 64, 64, (24, 48), 0.0),
]


def emulated(w: Bsr, x: torch.Tensor, config: Config, transposed: bool) -> np.ndarray:
    """Do with the lists what the device does; no element is written twice."""
    tiles = tiles_of(w, transposed, config.across)
    height, depth, lists = tiles.height, tiles.depth, tiles.lists(config, len(x), 5)
    steps, bounds = worked(lists, costs_of(lists, tiles, config), len(x), config.tokens, workers=5)
    values = w.values.half()  # a piece of 16 bytes has eight elements
    values = values.transpose(1, 2).contiguous() if transposed else values
    order = packed_order(tiles, lists)
    packed = gathered(values.view(-1, 1, 8), order.clamp(0)).float()
    packed[: len(order)][order < 0] = 0
    size = len(tiles.row), depth // 8, height, 8
    blocks = packed[: len(tiles.row) * height * depth // 8].view(size).transpose(1, 2)
    blocks = blocks.reshape(-1, height, depth).numpy() if size[0] else ()
    padded = np.pad(x.half().float().numpy(), ((0, config.tokens), (0, 64)))  # zero outside of X
    y = np.full((len(x), w.shape[1] if transposed else w.shape[0]), np.nan, np.float32)
    for (start, end), group in product(pairwise(bounds.tolist()), range(config.warpgroups)):
        sums = np.zeros((config.rows, config.tokens, height), np.float32)
        for step in steps[start:end]:
            count, token, item, first = step[0].tolist()
            strips = step[1].view(np.uint16).tolist()
            counts, what = step[2 + group, :2].tolist()
            places = int(step[2 + group, 2:].view(np.uint64)[0])
            at = first + (what & 0xFF)
            assert count * height * depth * 2 <= lists.room * 1024
            for row in range(config.rows):
                for _ in range(counts >> 4 * row & 15):
                    place = places & 7
                    slot, late = divmod(place, 2) if depth % 16 else (place, 0)
                    slot, beside = divmod(slot, config.across)
                    assert slot < strips_of(depth, config.tokens, config.across)
                    assert strips[slot] != NO_STRIP
                    column = (
                        strips[slot] * depth * config.across // 16 * 16 + 8 * late + 16 * beside
                    )
                    assert late * 8 + depth <= sum(boxes_of(depth, config.across))
                    tile = padded[token : token + config.tokens, column : column + depth]
                    sums[row] += tile @ blocks[at].T
                    places, at = places >> 3, at + 1
            assert at <= first + count
            if what & LAST:
                own = lists.units[item].reshape(config.warpgroups, -1)[group]
                for row, unit in enumerate(own.tolist()):
                    column = unit * height
                    part = y[
                        token : token + config.tokens, max(0, column) : max(0, column + height)
                    ]
                    assert np.isnan(part).all()
                    part[:] = sums[row, : part.shape[0], : part.shape[1]]
                sums[:] = 0
        assert what & END
    return y


@pytest.mark.parametrize("config", [*CONFIGS, *ALIGNED], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_lists_give_the_product_and_write_every_element_once(shape, transposed, config):
    w, x, dy = example(shape)
    if not tiles_of(w, transposed, config.across).possible(config):
        return  # refused, below
    w, (x, dy) = replace(w, values=w.values.half().float()), (a.half().float() for a in (x, dy))
    dense = w.to_dense()
    found = emulated(w, dy if transposed else x, config, transposed)
    expected = dy @ dense if transposed else x @ dense.T
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("block", "tile", "turned"),
    [
        ((24, 24), (24, 24), (24, 24)),
        ((80, 96), (80, 48), (96, 80)),
        ((128, 72), (64, 24), (72, 64)),
        ((16, 120), (16, 40), (40, 16)),
        ((48, 112), (48, 56), (56, 48)),
    ],
)
def test_a_tile_is_the_largest_equal_part_of_a_block_that_the_kernel_takes(block, tile, turned):
    w = Bsr.from_dense(torch.ones(256, 256), block=[*block])
    for transposed, sides in ((False, tile), (True, turned)):
        tiles = tiles_of(w, transposed)
        assert (tiles.height, tiles.depth) == sides
        assert len(tiles.row) == -(-256 // sides[0]) * -(-256 // sides[1])


@pytest.mark.parametrize("block", [24, 48, 80, 96])
def test_a_step_has_room_for_every_tile_of_a_full_strip(block):
    w = Bsr.from_dense(torch.ones(8 * block, 2 * block).half(), block=block)
    tiles = tiles_of(w, transposed=False)
    for config in bsr_strips.configurations(tiles, 4096, 132):
        lists = tiles.lists(config, 4096, 132)
        assert lists.steps[:, 0, 0].max() * 2 * tiles.height * tiles.depth <= lists.room * 1024


def test_aligned_strips_have_no_column_twice_and_half_tiles_have_zeros():
    w = Bsr.from_dense(torch.ones(48, 96).half(), block=24)
    tiles = tiles_of(w, transposed=False, across=2)
    assert (tiles.depth, tiles.columns) == (16, 6)
    assert (tiles.pieces >= 0).all()  # full rows: a tile is half of one block, half of the next
    alone = Bsr.from_dense(torch.eye(96).half()[:24], block=24)
    assert (tiles_of(alone, transposed=False, across=2).pieces < 0).sum() == 24  # columns 24 to 31
    assert boxes_of(16, 2) == [32]
    found = [strips_of(16, tokens, 2) for tokens in bsr_strips.TOKENS]
    assert found == [4, 4, 2]


def test_values_that_are_packed_have_zeros_where_there_is_no_block():
    w, _, _ = example((1, 48, 72, (24, 24), 0.5))
    w = replace(w, values=w.values.half())
    tiles = tiles_of(w, transposed=False, across=2)
    order = packed_order(tiles, tiles.lists(Config(64, 1, 1, 2), 64, 1))
    zeros = (order < 0).nonzero()[:, 0]
    shape = (64, 72), (*w.values.shape,), (64, 48)
    plan = _launch.Plan(None, (), lambda *a: a, *shape, torch.float16, order.clamp(0), zeros=zeros)
    bound = _launch.bind(plan, torch.zeros(64, 72).half(), w.values)
    packed = bound.tensors[1].view(-1, 8)
    assert (packed[zeros] == 0).all()
    assert sorted(packed[order >= 0].flatten().tolist()) == sorted(w.values.flatten().tolist())


def test_rows_that_share_strips_are_multiplied_together():
    there = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]])
    w = Bsr.from_dense(there.repeat_interleave(24, 0).repeat_interleave(24, 1).float(), block=24)
    lists = tiles_of(w, transposed=False).lists(Config(64, 1, 2), 64, 2)
    assert sorted(sorted(pair) for pair in lists.units.tolist()) == [[0, 2], [1, 3]]
    assert lists.strips.tolist() == [2, 2]


@pytest.mark.parametrize("m", [1, 64, 65, 300, 4096])
def test_the_byte_model_offers_only_what_fits(m):
    w, _, _ = example((m, 960, 960, (48, 48), 0.2))
    tiles = tiles_of(w, transposed=False)
    found = bsr_strips.configurations(tiles, m, 132)
    assert found
    assert all(config.tokens < m + 64 and tiles.possible(config) for config in found)
    if m == 4096:
        assert found[0].tokens * found[0].rows * found[0].warpgroups * 48 >= 128 * 128


def test_what_the_kernel_cannot_read_is_refused_before_anything_is_built():
    w, x, dy = example((4, 120, 96, (24, 24), 1.0))
    half = replace(w, values=w.values.half())

    def refused(x: torch.Tensor, w: Bsr, transposed: bool = False) -> str:
        with pytest.raises(Unsupported) as raised:
            bsr_strips.launch(x, w, CONFIGS[0], transposed=transposed)
        return str(raised.value)

    assert "found torch.float32 and torch.float32" in refused(x, w)
    assert "expected activations of 96 columns, found shape [4, 120]" in refused(dy.half(), half)
    assert "of 120 columns, found shape [4, 96]" in refused(x.half(), half, True)
    for block in (10, 8, 36, 88):
        odd = Bsr.from_dense(w.to_dense().half(), block=block)
        assert f"from 16 to 64 divides, found {block}x{block}" in refused(x.half(), odd)
    narrow = Bsr.from_dense(w.to_dense()[:, :90].half().contiguous(), block=24)
    assert "multiple of 8 columns to read, found 90" in refused(x[:, :90].half(), narrow)
    odd = Bsr.from_dense(w.to_dense()[:60].half().contiguous(), block=24)
    assert "multiple of 8 columns to write, found 60" in refused(x.half(), odd)
    large = Bsr.from_dense(torch.ones(160, 160).half(), block=80)
    with pytest.raises(Unsupported, match="tiles of 80x80, found Config"):
        bsr_strips.plan(large, 300, Config(256, 2, 2))
    with pytest.raises(FormatError, match="expected ascending columns"):
        tiles_of(replace(half, columns=half.columns.flip(0).contiguous()), transposed=False)


@pytest.mark.parametrize("kernel", [bsr_strips.KERNEL, bsr_strips.DGRAD])
def test_other_devices_are_refused(kernel):
    problem = Problem(kernel.op, {"dtype": "bf16"})
    reason = kernel.unsupported(problem, torch.device("cpu"))
    assert reason == "needs an NVIDIA GPU of compute capability 9.0, found cpu"


@pytest.mark.compiles
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("config", sampled([*CONFIGS, Config(128, 3, 2), *ALIGNED], 0, -4), ids=str)
def test_every_variant_compiles_without_a_spill_or_a_serialised_product(config, tmp_path):
    whats = (48, 48, 23, torch.bfloat16), (24, 40, 5, torch.float16), (40, 24, 42, torch.bfloat16)
    if config.across > 1:
        whats = tuple((height, 16, *rest) for height, _, *rest in whats)
    for height, depth, room, dtype in whats:
        constants = bsr_strips.constants_of(config, height, depth, room, dtype)
        # C7519: a fence before each row's products, whose registers a branch may have left alone.
        assert_compiles_cleanly("bsr_strips", constants, tmp_path, allowed="(C7519)")


@pytest.mark.skipif(not find_spec("cupy"), reason="needs CuPy")
def test_nvrtc_compiles_it():
    constants = bsr_strips.constants_of(CONFIGS[0], 48, 48, 23, torch.float16)
    assert cuda.compiled("bsr_strips", constants).startswith(b"\x7fELF")
    assert cuda.compiled("bsr_strips", (*constants, ("WATCHDOG", 1))).startswith(b"\x7fELF")


def on_gpu(shape: Shape, dtype: str, transposed: bool) -> tuple[Bsr, torch.Tensor]:
    w, x, dy = example(shape)
    return moved(w, dtype), (dy if transposed else x).cuda().to(DTYPES[dtype])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("config", [*CONFIGS, *ALIGNED], ids=str)
def test_the_products_are_right_on_a_hopper_gpu(config, transposed, dtype):
    for shape, watchdog in product([(1000, 1536, 1280, (48, 40), 0.2), *SHAPES], (True, False)):
        w, x = on_gpu(shape, dtype, transposed)
        if not tiles_of(w, transposed, config.across).possible(config):
            continue
        program = bsr_strips.launch(x, w, config, transposed=transposed, watchdog=watchdog)
        for _ in range(3):
            program.out.fill_(float("nan"))
            program()
        torch.cuda.synchronize()
        assert_right(program.out, x, w, transposed, (shape, watchdog))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("config", [*CONFIGS, *ALIGNED], ids=str)
def test_a_nan_beside_a_block_stays_out_of_its_rows(config):
    w, _, _ = example((1, 96, 96, (24, 24), 1.0))
    dense = w.to_dense().cuda().half()
    dense[:24, 24:48] = 0  # block row 0 does not touch columns 24 to 47, its neighbours do
    x = torch.randn(300, 96, device="cuda").half()
    x[:, 40] = float("nan")  # eight columns beside a block are read with it
    y = bsr_strips.launch(x, Bsr.from_dense(dense, block=24), config)()
    assert y[:, :24].isfinite().all()
    assert y[:, 24:].isnan().all()


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("block", [24, 40, 48, 96])
@pytest.mark.parametrize("kernel", [bsr_strips.KERNEL, bsr_strips.DGRAD])
def test_a_prepared_launch_is_captured_and_reads_rewritten_activations(kernel, block):
    transposed = kernel is bsr_strips.DGRAD
    w, x = on_gpu((1000, 1536, 1280, (block, block), 0.1), "bf16", transposed)
    wide = x.new_zeros(len(x), x.shape[1] + 64)[:, : x.shape[1]]  # rows with a gap between them
    given = {"dy" if transposed else "x": wide}
    operands = Operands(Problem(kernel.op, {"dtype": "bf16"}), {"w": w}, given, torch.matmul)
    launch = kernel.prepare(operands)
    again = kernel.prepare(replace(operands, pinned=launch.choice))
    assert (again.choice, again.code) == (launch.choice, launch.code)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = launch()
    wide.copy_(x)
    y.fill_(float("nan"))
    graph.replay()
    assert_right(y, x, w, transposed, launch.choice)
