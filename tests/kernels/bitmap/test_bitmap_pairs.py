"""bitmap_pairs: how W is packed, its threads on a CPU, its configurations, and its machine code.

On the CPU the kernel's own source runs thread by thread, with the arguments of its launch.
warpgroup_on_cpu.h computes what the PTX ISA says that the instructions do.
"""

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats._format import has_value
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.unstructured import UnstructuredCall
from sparsebench.kernels.bitmap import bitmap_pairs
from sparsebench.kernels.bitmap.bitmap_pairs import Config
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc
from tests.emulation.cuda_on_cpu import device_code, entry_point, library_of, run_here
from tests.kernels.contract import Example, run_engine
from tests.tools.marks import needs_gxx, sampled
from tests.tools.paths import cuda_source

BF16, FP16 = torch.bfloat16, torch.float16


# ---- records ----


def unpacked(pairs: bitmap_pairs.Pairs, n: int, k: int) -> Tensor:
    """Return W [n, k] in bf16, from the bytes that the kernel reads, tile by tile."""
    down, across = -(-n // 64), -(-k // 128)
    whole = torch.zeros(down * 64, across * 128, dtype=torch.int16)
    bounds = (pairs.bounds * 16).tolist()
    places = bitmap_pairs._places(torch.device("cpu")).tolist()
    none = torch.empty(0, 1, 16384, dtype=torch.uint8)
    for tile, (start, end) in enumerate(pairwise(bounds)):
        row, column = tile // across * 64, tile % across * 128
        head = pairs.heads.flatten(0, 1)[tile][None, None]
        first = Spense((64, 128), BF16, (64, 128), head, none).to_dense().view(torch.int16)
        second = torch.zeros(64 * 64, dtype=torch.int16)
        for word in pairs.lists[start:end].view(torch.int32).tolist():
            second[places.index(word >> 16)] = (word & 0xFFFF ^ 0x8000) - 0x8000
        groups = first.view(64, 32, 4)[..., :2]
        listed = second.view(64, 32, 2)
        assert not has_value(groups[listed != 0]).any()
        groups[listed != 0] = listed[listed != 0]
        whole[row : row + 64, column : column + 128] = first
    return whole[:n, :k].view(BF16)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.7, 1.0])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (200, 264), (70, 8)])
def test_the_records_hold_every_element_once(n: int, k: int, sparsity: float) -> None:
    mask = torch.rand(n, k, generator=torch.Generator().manual_seed(n)) >= sparsity
    dense = (torch.randn(n, k) * mask).to(BF16)
    pairs = bitmap_pairs.pack(dense)
    assert torch.equal(unpacked(pairs, n, k), dense)
    assert (pairs.bounds.diff() * 16).amax() == pairs.room <= 4 * 4096


def test_at_half_zeros_the_records_have_three_quarters_of_the_bytes() -> None:
    scores = torch.rand(512, 1024, generator=torch.Generator().manual_seed(0))
    for sparsity, part in ((0.5, 0.755), (0.7, 0.615), (0.8, 0.58)):
        pairs = bitmap_pairs.pack((scores >= sparsity).to(BF16))
        assert pairs.stored_bytes / (2 * scores.numel()) == pytest.approx(part, abs=0.01)


def test_a_weight_is_packed_once_and_again_after_it_was_written() -> None:
    w = Bitmap.from_dense(torch.ones(64, 128, dtype=BF16))
    pairs = bitmap_pairs.pairs_of(w)
    assert bitmap_pairs.pairs_of(w) is pairs
    w.records.zero_()
    assert bitmap_pairs.pairs_of(w) is not pairs


# ---- the threads, on a CPU ----

STAND_INS = """
  #include "warpgroup_on_cpu.h"
  static uint4 load_128(u32 a) { return *(uint4*)in_shared(a); }
  static u32 load_32(u32 a) { return *(u32*)in_shared(a); }
  static void store_32(u32 a, u32 v) { *(u32*)in_shared(a) = v; }
  static void store_16(u32 a, u32 v) { *(unsigned short*)in_shared(a) = v; }
  static void clear_128(u32 a) { std::memset(in_shared(a), 0, 16); }
  static float load_float_of(u32 a, int cta) {
    return *(float*)(of_cluster(cta).dynamic.data() + (a & 0xffffff));
  }
  static void hold(const uint4&) {}
  #define consumers_sync() in_step(15, CONSUMERS)
"""


def library(constants: cuda.Constants, late: bool) -> Any:
    """Build the kernel's source for this machine."""
    device = cuda_source("wgmma.cuh")
    start = device.index("__device__ __forceinline__ u64 smem_descriptor")
    descriptor = device[start : device.index("__device__", start + 1)]
    call = """
        multiply_pairs(at<TensorMap>(0), at<Weights>(1), at<u16*>(2), at<int>(3), at<int>(4),
                       at<int>(5));
    """
    source = STAND_INS + descriptor + device_code("bitmap_pairs.cu")
    return library_of(source + entry_point(call, split="SPLIT"), constants, late)


def described(address: int, shape: Any, strides: Any, dtype: Any, box: tuple[int, int]) -> bytes:
    """Return the TensorMap of wgmma_on_cpu.h."""
    return struct.pack("Piiiiii96x", address, *shape, 2 * strides[0], *box, 128)


def on_cpu(patch: pytest.MonkeyPatch, late: bool = True) -> None:
    run_here(patch, lambda function, constants: library(constants, late).call)
    patch.setattr(cuda, "tensor_map", described)


CASES = [
    (Config(32, 2, 1, 1, 3), Example(20, 200, 392, 0.5), BF16),
    (Config(16, 1, 2, 2, 4), Example(16, 70, 520, 0.7), FP16),
    (Config(64, 3, 1, 3, 2), Example(50, 130, 400, 0.3), BF16),
    (Config(16, 2, 2, 1, 4), Example(3, 33, 1160, 1.0), FP16),
    (Config(48, 1, 1, 8, 2), Example(33, 64, 1096, 0.4), BF16),
    (Config(16, 1, 2, 1, 4), Example(9, 64, 648, 0.5), BF16),
]


@needs_gxx
@pytest.mark.parametrize("late", sampled([True, False], 0))
@pytest.mark.parametrize(("config", "example", "dtype"), sampled(CASES, 0, 1, 3), ids=str)
def test_its_threads_give_the_product_on_a_cpu(config, example, dtype, late, monkeypatch) -> None:
    on_cpu(monkeypatch, late)
    assert run_engine(bitmap_pairs.KERNEL, example, dtype, configs=[config])


@needs_gxx
def test_nan_and_infinity_are_where_the_definition_has_them(monkeypatch) -> None:
    config, example, _ = CASES[0]
    on_cpu(monkeypatch)
    dense = example.dense(BF16)
    dense[3, 5], dense[7, 140], dense[9] = float("nan"), float("inf"), -0.0
    x = torch.randint(-2, 3, (example.m, example.k)).to(BF16)
    call = UnstructuredCall("linear", example.m)
    y = bitmap_pairs.plan(Bitmap.from_dense(dense), call, config).run(x)
    right = (x.float() @ dense.float().T).to(BF16)
    torch.testing.assert_close(y, right, rtol=0, atol=0, equal_nan=True)


@needs_gxx
def test_zeros_of_w_may_leave_out_what_is_not_finite_in_x(monkeypatch) -> None:
    on_cpu(monkeypatch)
    dense, x = torch.zeros(64, 128, dtype=BF16), torch.ones(16, 128, dtype=BF16)
    dense[:, 0] = 1
    x[0, 2], x[1, 0] = float("nan"), float("nan")
    config, call = Config(16, 1, 1, 1, 2), UnstructuredCall("linear", 16)
    y = bitmap_pairs.plan(Bitmap.from_dense(dense), call, config).run(x)
    assert (y[0] == 1).all()
    assert y[1].isnan().all()


# ---- configurations, and the code ----


@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (5120, 13824), (64, 128), (8, 8)])
@pytest.mark.parametrize("m", [1, 24, 64, 128])
@pytest.mark.parametrize("room", [0, 3600, 4 * 4096])
def test_configurations_fit_however_many_elements_a_record_has(n, k, m, room) -> None:
    configs = [*bitmap_pairs.configurations(n, k, m, room)]
    assert configs
    for config in configs:
        assert config.shared_bytes(room) <= cuda.SHARED_BYTES
        assert config.tokens >= m
        assert config.depth % config.turns == 0 < config.depth - config.turns


@by_nvcc
@pytest.mark.parametrize("dtype", sampled([BF16, FP16]), ids=str)
@pytest.mark.parametrize(
    "config",
    sampled(
        [
            Config(64, 2, 2, 1, 4),
            Config(16, 4, 1, 3, 2),
            Config(96, 3, 1, 2, 2),
            Config(128, 1, 2, 8, 4),
        ]
    ),
    ids=str,
)
def test_it_compiles_without_a_spill(config: Config, dtype: torch.dtype, tmp_path: Path) -> None:
    assert_compiles_cleanly("bitmap_pairs", bitmap_pairs.constants_of(config, dtype), tmp_path)
