"""bitmap_mma: its threads on a CPU, where NaN goes, its configurations, and its machine code.

On the CPU the kernel's own source runs thread by thread, with the arguments of its launch.
mma_on_cpu.h computes what the PTX ISA says that the instructions do.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.bitmap import Bitmap
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.unstructured import UnstructuredCall
from sparsebench.kernels.bitmap import bitmap_mma
from sparsebench.kernels.bitmap.bitmap_mma import Config
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc
from tests.emulation.cuda_on_cpu import device_code, entry_point, library_of, run_here
from tests.kernels.contract import Example, run_engine
from tests.tools.marks import needs_gxx, sampled

STAND_INS = """
  #include "mma_on_cpu.h"
  #include <cmath>
  static u32 load_32(u32 a) { return *(u32*)(dynamic_shared() + a); }
  static uint2 load_64(u32 a) { return *(uint2*)(dynamic_shared() + a); }
  static u32 load_16(u32 a) { return *(unsigned short*)(dynamic_shared() + a); }
  static void store_32(u32 a, u32 v) { *(u32*)(dynamic_shared() + a) = v; }
  static u32 prmt(u32 a, u32 b, u32 how) { return __byte_perm(a, b, how); }
  static int __popc(u32 v) { return __builtin_popcount(v); }
  static u32 upper_half(u32 v) { return (v >> 16) * 0x10001; }
  static u32 __funnelshift_r(u32 low, u32 high, u32 by) {
    return (u32)(((u64)high << 32 | low) >> (by & 31));
  }
  static void bulk_load(u32 to, const void* from, int bytes, u32 barrier) {
    counted_copy(mine(), to, from, bytes, barrier);
  }
  static void fence_proxy_async() {}
  static void fence_mbarrier_init() {}
  static void copy_of_x(u32 to, const char* from, bool there) {  // lands at once
    if (to % 16 || (u64)from % 16) std::abort();
    char* at = dynamic_shared() + to;
    there ? std::memcpy(at, from, 16) : std::memset(at, 0, 16);
  }
  #define copy_16 copy_of_x
  static void cp_async_arrive(u32 barrier) { mbarrier_arrive(barrier); }
  #define multiplying_warps_sync() in_step(1, 32 * WARPS)
  static uint4 load_128(u32 a) { return *(uint4*)(dynamic_shared() + a); }
  static u32 narrowed_fp8(u32 byte) {  // to fp16
    const int power = byte >> 3 & 15, m = byte & 7;
    const float size = power ? std::ldexp(8 + m, power - 10) : std::ldexp(m, -9);
    return narrow(byte & 128 ? -size : size);
  }
  static void widen(u32& low, u32& high, u32 four) {
    low = narrowed_fp8(four & 0xff) | narrowed_fp8(four >> 8 & 0xff) << 16;
    high = narrowed_fp8(four >> 16 & 0xff) | narrowed_fp8(four >> 24) << 16;
  }
  static unsigned short rounded(float f) {
    u32 bits;
    std::memcpy(&bits, &f, 4);
    return FP16 && VALUE_BYTES == 2 ? narrow(f) : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
"""


def library(constants: cuda.Constants, late: bool) -> Any:
    """Build the kernel's source for this machine."""
    call = """
        multiply_records(at<Activations>(0), at<Weights>(1), at<u16*>(2), at<int>(3), at<int>(4));
    """
    source = STAND_INS + device_code("bitmap_mma.cu") + entry_point(call, split="SPLIT")
    return library_of(source, constants, late)


def on_workers(patch: pytest.MonkeyPatch, workers: int, split: int) -> None:
    """Run the kernel here, as on a GPU that runs so many CTAs or clusters at a time."""
    run_here(patch, lambda function, constants: library(constants, workers % 2 == 0).call)
    patch.setattr(bitmap_mma, "multiprocessors", lambda device: workers * split)


BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CASES = [
    (Config(8, 4, 2, 2, 2), 3, Example(1, 70, 1032, 0.5), BF16),
    (Config(8, 3, 2, 1, 3), 2, Example(8, 100, 528, 0.3), FP8),
    (Config(8, 1, 2, 3, 1), 2, Example(8, 100, 1536, 0.2), FP16),  # each block has many steps
    (Config(16, 4, 2, 2, 2), 1, Example(45, 100, 264, 1.0), BF16),
    (Config(64, 2, 3, 2, 1), 2, Example(50, 16, 776, 0.03), BF16),
    (Config(8, 2, 2, 1, 2), 2, Example(5, 33, 512, 0.4), FP16),
]
CASES += [(replace(config, table=False), *rest) for config, *rest in CASES]
CASES += [
    (Config(8, 2, 2, 1, 2, False, 2), 3, Example(8, 90, 1288, 0.5), BF16),
    (Config(8, 4, 1, 1, 2, False, 8), 1, Example(3, 60, 304, 0.4), FP16),  # six have no tile
    (Config(16, 4, 1, 2, 1, True, 4), 2, Example(21, 100, 1040, 0.3), FP8),  # the last has one
]


@needs_gxx
@pytest.mark.parametrize(
    ("config", "workers", "example", "dtype"), sampled(CASES, 0, 1, 7, 11, -2), ids=str
)
def test_its_threads_give_the_product_on_a_cpu(config, workers, example, dtype, monkeypatch):
    on_workers(monkeypatch, workers, config.split)
    assert run_engine(bitmap_mma.KERNEL, example, dtype, configs=[config])


@needs_gxx
def test_nan_and_infinity_are_where_the_definition_has_them(monkeypatch) -> None:
    config, _, example, _ = CASES[0]
    on_workers(monkeypatch, 2, 1)
    dense = example.dense(BF16)
    dense[3, 5], dense[7, 519], dense[9] = float("nan"), float("inf"), -0.0
    x = torch.randint(-2, 3, (1, example.k)).to(BF16)
    y = bitmap_mma.plan(Bitmap.from_dense(dense), UnstructuredCall("linear", 1), config).run(x)
    right = (x.float() @ dense.float().T).to(BF16)
    torch.testing.assert_close(y, right, rtol=0, atol=0, equal_nan=True)
    assert right[:, 3].isnan().all()


# ---- configurations, and the code ----

LAYERS = [(14336, 4096), (28672, 8192), (4096, 14336), (1024, 4096), (40, 264)]


@pytest.mark.parametrize(("n", "k"), LAYERS)
@pytest.mark.parametrize("m", [1, 16, 64, 256])
def test_every_configuration_fits_and_covers_the_rows_of_a_worker(n: int, k: int, m: int) -> None:
    room = 6560  # of bf16 at 50 %
    configs = bitmap_mma.configurations(n, k, m, room, 2, {1: 132, 2: 66, 4: 30, 8: 15})
    assert configs
    for config in configs:
        assert config.warps <= bitmap_mma.WARPS[config.tokens]
        assert config.shared_bytes(room, m, 2) <= cuda.SHARED_BYTES
        assert config.tokens >= min(m, 64)
        assert config.split == 1 or config.row_warps * {2: 66, 4: 30, 8: 15}[config.split] * 16 >= n


def test_a_weight_with_a_dense_tile_does_not_fit_the_configuration_of_an_even_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list's choice for 14336 x 4096 and one token: a driver error ended the first call."""
    monkeypatch.setattr(cuda, "shared_bytes_of", lambda device: cuda.SHARED_BYTES)
    choice = Config(8, 7, 4, 1, 4)
    even, uneven = torch.ones(2, 16, 256, dtype=BF16)
    even[:, ::2] = 0
    assert choice.shared_bytes(Bitmap.from_dense(even).room, 1, 2) <= cuda.SHARED_BYTES
    with pytest.raises(Unsupported, match="at most 232448 bytes of shared memory, found 266736"):
        bitmap_mma.plan(Bitmap.from_dense(uneven), UnstructuredCall("linear", 1), choice)


@by_nvcc
@pytest.mark.parametrize("dtype", sampled([BF16, FP8, FP16]), ids=str)
@pytest.mark.parametrize(
    "config",
    sampled(
        [
            *(Config(8, 14, 2, 1, 2, table) for table in (True, False)),
            *(Config(16, 9, 2, 2, 2, table, 4) for table in (True, False)),
            *(Config(16, 14, 2, 1, 2, table) for table in (True, False)),
            *(Config(64, 14, 1, 2, 2, table) for table in (True, False)),
        ],
        *(0, 1),
    ),
    ids=str,
)
def test_it_compiles_without_a_spill(config: Config, dtype: torch.dtype, tmp_path: Path) -> None:
    assert_compiles_cleanly("bitmap_mma", bitmap_mma.constants_of(config, dtype), tmp_path)
