"""The kernel whose X stays in shared memory: its packing on paper, its code, on a GPU its sums."""

import shutil
from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import DTYPES, Operands
from sparsebench.kernels.bsr import bsr_resident
from sparsebench.kernels.bsr.bsr_resident import Config, pack, pitch_of, turned, words_of
from sparsebench.results.record import Problem
from tests.compiling.nvcc import assert_compiles_cleanly
from tests.kernels.bsr.examples import Shape, assert_right, example, moved
from tests.tools.marks import sampled

CONFIGS = [Config(16, 4), Config(32, 8), Config(48, 4), Config(112, 16), Config(16, 8, 2)]
CONFIGS += [Config(16, 16, 4), Config(32, 4, 4)]
BLOCKS = [(10, 10), (8, 8), (24, 24), (20, 50), (2, 6), (64, 16)]

# m, n, k, block, part of the blocks that is stored: edge blocks that leave W, few tokens, rows
# without a block, none at all.
SHAPES = [
    (37, 200, 320, (10, 10), 0.3),
    (100, 130, 72, (8, 8), 0.5),
    (5, 62, 48, (6, 14), 0.4),
    (257, 300, 512, (16, 24), 0.05),
    (1, 128, 256, (16, 20), 1.0),
    (20, 100, 104, (8, 34), 0.0),
]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_packed_block_has_the_words_of_a_lane_in_the_order_of_the_products(block):
    r, c = block
    values = torch.randn(3, r, c)
    packed = pack(values)
    assert packed.shape == (3, 32, words_of(block), 2)
    assert pack(values[:0]).shape == (1, 32, words_of(block), 2)  # no block: a place for a load
    high, deep = -(-r // 8), (c + 7) // 16
    padded = torch.nn.functional.pad(values, (0, -c % 16, 0, -r % 8))
    for lane in range(32):
        row, column = lane // 4, lane % 4 * 2
        words = [
            padded[1, 8 * part + row, at + column : at + column + 2]
            for step in range(deep)
            for part in range(high)
            for at in (16 * step, 16 * step + 8)
        ]
        if c > 16 * deep:
            words += [
                padded[1, 8 * part + row, 16 * deep + column : 16 * deep + column + 2]
                for part in range(high)
            ]
        assert torch.equal(packed[1, lane], torch.stack(words))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_turned_matrix_is_the_transpose(shape):
    w, *_ = example(shape)
    there = turned(w)
    assert there.block == w.block[::-1]
    assert torch.equal(there.to_dense(), w.to_dense().T)


@pytest.mark.parametrize("k", [8, 16, 1000, 1024, 4096])
def test_eight_rows_of_the_tile_lie_in_different_banks(k):
    pitch = pitch_of(k)
    assert 2 * k <= pitch <= 2 * k + 16
    assert len({(row * pitch // 4 + word) % 32 for row in range(8) for word in range(4)}) == 32


def test_what_the_kernel_cannot_read_is_refused_before_anything_is_built():
    w, x, _ = example((4, 60, 96, (6, 12), 1.0))
    half = replace(w, values=w.values.half())

    def refused(x: torch.Tensor, w: Bsr) -> str:
        with pytest.raises(Unsupported) as raised:
            bsr_resident.launch(x, w, CONFIGS[0])
        return str(raised.value)

    assert "found torch.float32 and torch.float32" in refused(x, w)
    assert "of 96 columns, found shape [4, 90]" in refused(x[:, :90].half(), half)
    for block in (9, 66):
        odd = Bsr.from_dense(w.to_dense().half(), block=block)
        assert f"even numbers, found {block}x{block}" in refused(x.half(), odd)
    narrow = Bsr.from_dense(w.to_dense()[:, :90].half().contiguous(), block=6)
    assert "a multiple of 8 and of Y of 2, found 90 and 60" in refused(x[:, :90].half(), narrow)
    assert "found strides [97, 1]" in refused(torch.zeros(4, 97).half()[:, :96], half)


@pytest.mark.parametrize("kernel", [bsr_resident.KERNEL, bsr_resident.DGRAD])
def test_other_devices_are_refused(kernel):
    problem = Problem(kernel.op, {"dtype": "bf16"})
    reason = kernel.unsupported(problem, torch.device("cpu"))
    assert reason == "needs an NVIDIA GPU of compute capability 8.0 or newer, found cpu"


@pytest.mark.compiles
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("config", sampled(CONFIGS), ids=str)
def test_every_variant_compiles_without_a_spill(config, tmp_path):
    for block, dtype in (((10, 10), torch.bfloat16), ((8, 24), torch.float16)):
        constants = bsr_resident.constants_of(config, block, dtype)
        assert_compiles_cleanly("bsr_resident", constants, tmp_path)


def on_gpu(shape: Shape, dtype: str) -> tuple[Bsr, torch.Tensor]:
    w, x, _ = example(shape)
    return moved(w, dtype), x.cuda().to(DTYPES[dtype])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(not find_spec("cupy"), reason="needs CuPy")
@pytest.mark.parametrize(("config", "dtype"), [*product(CONFIGS, ["bf16", "fp16"])], ids=str)
def test_the_products_are_right_on_a_gpu(config, dtype):
    for shape in SHAPES:
        w, x = on_gpu(shape, dtype)
        program = bsr_resident.launch(x, w, config)
        for _ in range(2):
            program.out.fill_(float("nan"))
            program()
        assert_right(program.out, x, w, False, shape)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(not find_spec("cupy"), reason="needs CuPy")
def test_a_nan_beside_a_block_stays_out_of_its_rows():
    w, *_ = example((1, 40, 40, (10, 10), 1.0))
    dense = w.to_dense().cuda().half()
    dense[:10, 10:20] = 0  # block row 0 does not touch columns 10 to 19, its neighbours do
    x = torch.randn(30, 40, device="cuda").half()
    x[:, 10] = float("nan")
    y = bsr_resident.launch(x, Bsr.from_dense(dense, block=10), CONFIGS[0])()
    assert y[:, :10].isfinite().all()
    assert y[:, 10:].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(not find_spec("cupy"), reason="needs CuPy")
@pytest.mark.parametrize("kernel", [bsr_resident.KERNEL, bsr_resident.DGRAD])
def test_a_prepared_launch_is_captured_and_reads_rewritten_activations(kernel):
    transposed = kernel is bsr_resident.DGRAD
    w, _ = on_gpu((100, 1000, 1000, (10, 10), 0.2), "bf16")
    x = torch.randn(100, 1000, device="cuda").bfloat16()
    given = {"dy" if transposed else "x": torch.zeros_like(x)}
    operands = Operands(Problem(kernel.op, {"dtype": "bf16"}), {"w": w}, given, torch.matmul)
    launch = kernel.prepare(operands)
    again = kernel.prepare(replace(operands, pinned=launch.choice))
    assert (again.choice, again.code) == (launch.choice, launch.code)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = launch()
    next(iter(given.values())).copy_(x)
    y.fill_(float("nan"))
    graph.replay()
    assert_right(y, x, w, transposed, launch.choice)
