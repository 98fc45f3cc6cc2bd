"""bsr_gathered: its tiles, its machine code without a GPU, and on a GPU.

Its products in Triton's interpreter are in triton_interpreted.py.
"""

from pathlib import Path

import pytest
import torch
from on_triton import SHARED_BYTES, complaint_about
from sample import sampled
from triton.compiler import ASTSource

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.harness.bench.correctness import TF32, Expected, check
from sparsebench.harness.catalog import load_op
from sparsebench.kernels._common.triton import options, precision_of
from sparsebench.kernels._kernel import DTYPES, Operands
from sparsebench.kernels.bsr import bsr_gathered
from sparsebench.kernels.bsr.bsr_gathered import Config
from sparsebench.results.record import Problem

BLOCKS = ((8, 8), (10, 10), (16, 16), (32, 32), (16, 8))
ITEMSIZE = {"bf16": 2, "fp32": 4, "tf32": 4}
INDICES = {"columns", "offsets", "order"}
VALUES = {"x", "w", "y"}


def test_blocks_of_a_group_lie_side_by_side_and_empty_places_are_beyond_w() -> None:
    w = torch.zeros(48, 128).half()
    w[:16, [16, 48, 64, 80, 112]] = torch.tensor([1.0, 2, 3, 4, 5]).half()  # blocks 1, 3, 4, 5, 7
    w[32:, 0] = 6
    packed = bsr_gathered.pack(Bsr.from_dense(w, block=16), Config(16, 16, 4, 1, 2, 4))
    assert packed.offsets.tolist() == [0, 2, 2, 3]
    assert packed.columns.view(-1, 4).tolist() == [
        [1, 3, 4, 5],
        [7, 8, 8, 8],
        [0, 8, 8, 8],
        [8] * 4,
    ]
    assert packed.values.shape == (3, 16, 64)
    assert packed.values[:, 0, ::16].tolist() == [[1, 2, 3, 4], [5, 0, 0, 0], [6, 0, 0, 0]]
    assert packed.order.tolist() == [0, 2, 1]


def test_no_problem_has_more_than_five_configurations() -> None:
    for block in BLOCKS:
        for dtype, size in ITEMSIZE.items():
            for m in (1, 17, 64, 65, 4096):
                found = bsr_gathered.configurations(m, block, size, precision_of(dtype))
                assert 1 <= len(set(found)) == len(found) <= 5
                assert {c.gather * bsr_gathered.width_of(block[1]) * size for c in found} == {128}


def test_blocks_that_are_wide_are_refused() -> None:
    w, x = torch.zeros(64, 128).half(), torch.zeros(3, 128).half()
    operands = {"w": Bsr.from_dense(w, block=64)}, {"x": x}
    with pytest.raises(Unsupported, match="at most 32 wide, found 64x64"):
        bsr_gathered.prepare(Operands(Problem("linear", {"dtype": "fp16"}), *operands, torch.mm))
    operands = {"w": Bsr.from_dense(w, block=16)}, {"x": torch.zeros(128, 3).half().T}
    with pytest.raises(Unsupported, match=r"contiguous rows of X, found strides \[1, 3\]"):
        bsr_gathered.prepare(Operands(Problem("linear", {"dtype": "fp16"}), *operands, torch.mm))


COMPILED = [
    (block, dtype, m, capability)
    for capability in SHARED_BYTES
    for block in BLOCKS
    for dtype in ITEMSIZE
    if block[1] * ITEMSIZE[dtype] <= 64
    for m in (64, 4096)
]


@pytest.mark.compiles
@pytest.mark.parametrize(("block", "dtype", "m", "capability"), sampled(COMPILED, 5))
def test_every_configuration_compiles_without_a_spill(
    block: tuple[int, int],
    dtype: str,
    m: int,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # a compile, not a memory of one
    names, complaints = bsr_gathered._multiply.arg_names, []
    for config in bsr_gathered.configurations(m, block, ITEMSIZE[dtype], precision_of(dtype)):
        constants = bsr_gathered.constants_of(config, block)
        stored = dict.fromkeys(VALUES, f"*{dtype.replace('tf32', 'fp32')}")
        types = dict.fromkeys(names, "i32") | dict.fromkeys(INDICES, "*i32") | stored
        types |= dict.fromkeys(constants, "constexpr")
        aligned = {*INDICES, *VALUES, *({"m", "n", "k", "r", "x_stride"} if block[0] == 16 else ())}
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in sorted(aligned)}
        source = ASTSource(bsr_gathered._multiply, types, constants, attributes)
        complaints += [complaint_about(source, capability, options(config.warps, "pointers"))]
    assert not any(complaints), complaints


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp32"])
@pytest.mark.parametrize(
    ("m", "n", "k", "block"),
    [
        *((33, 520, 776, 16), (1500, 520, 776, 16), (1500, 523, 1033, 8)),
        *((257, 1000, 1000, 10), (64, 4096, 4096, 16), (129, 544, 800, 32)),
    ],
)
def test_every_configuration_is_right_on_a_gpu(m: int, n: int, k: int, block: int, dtype: str):
    torch.manual_seed(0)
    kept = torch.rand(-(-n // block), -(-k // block)) < 0.3
    mask = kept.repeat_interleave(block, 0).repeat_interleave(block, 1)[:n, :k]
    w, x = (t.to("cuda", DTYPES[dtype]) for t in (torch.randn(n, k) * mask, torch.randn(m, k)))
    if reason := bsr_gathered.unsupported_block((block, block), w.element_size()):
        pytest.skip(reason)
    stored, op, exact = Bsr.from_dense(w, block=block), load_op("linear"), (w.double(), x.double())
    right = Expected(
        *(op.definition(*exact), op.spread(*exact), w.dtype, op.depth(*exact)),
        products=TF32 if dtype == "tf32" else 0.0,
    )
    sizes = m, (block, block), w.element_size(), precision_of(dtype)
    for config in bsr_gathered.configurations(*sizes):
        program = bsr_gathered.launch(x, stored, config)
        program().fill_(float("nan"))
        assert check(program(), right).reason is None, config
