"""bitmap_mma: its threads on a CPU, what it refuses, its machine code, and on a GPU.

On the CPU the kernel's own source runs thread by thread, with the arguments of its launch.
mma_on_cpu.h stands in for the instructions, as the PTX ISA defines them.
"""

import ctypes
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bitmap import Bitmap
from sparsebench.kernels._common import cuda
from sparsebench.kernels.bitmap import bitmap_mma
from sparsebench.kernels.bitmap.bitmap_mma import Config
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc, hopper
from tests.emulation.cuda_on_cpu import device_code, entry_point, library_of
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


@cache
def on_cpu(config: Config, dtype: torch.dtype, late: bool) -> Any:
    """Build the kernel's source for this machine."""
    call = """
        multiply_records(at<Activations>(0), at<Weights>(1), at<u16*>(2), at<int>(3), at<int>(4));
    """
    source = STAND_INS + device_code("bitmap_mma.cu") + entry_point(call, split="SPLIT")
    constants = (*bitmap_mma.constants_of(config, dtype), ("LATE", int(late)))
    return library_of(source, constants)


def emulated(
    x: Tensor, w: Bitmap, config: Config, workers: int, patch: pytest.MonkeyPatch
) -> Tensor:
    patch.setattr(bitmap_mma, "load", lambda *arguments: (None, "code"))
    patch.setattr(bitmap_mma, "multiprocessors", lambda device: workers * config.split)
    program = bitmap_mma.launch(x, w, config)
    kernel = on_cpu(config, x.dtype, workers % 2 == 0)
    program.out.fill_(float("nan"))
    shared = ctypes.c_size_t(config.shared_bytes(w.room, len(x), x.itemsize))
    kernel.call(program.args[0], program.loaded.grid, shared)
    return program.out


def example(
    m: int, n: int, k: int, sparsity: float, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Bitmap]:
    """Return small integers, whose sums are exact."""
    torch.manual_seed(m + n + k)
    w = torch.randint(-2, 3, (n, k)) * (torch.rand(n, k) >= sparsity)
    w[0], w[-1] = 1, 0  # a stream of every element, and one of none
    x = torch.randint(-2, 3, (m, k))
    return x.to(dtype), Bitmap.from_dense(w.to(dtype))


BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CASES = [
    (Config(8, 2, 2, 2, 2, 2), 3, 1, 70, 1032, 0.5, BF16),
    (Config(8, 1, 3, 2, 1, 3), 2, 8, 100, 528, 0.7, FP8),
    (Config(8, 1, 1, 2, 3, 1), 2, 8, 100, 1536, 0.8, FP16),  # many blocks, each with many steps
    (Config(16, 4, 1, 2, 2, 2), 1, 45, 100, 264, 0.0, BF16),
    (Config(64, 1, 2, 3, 2, 1), 2, 50, 16, 776, 0.97, BF16),
    (Config(8, 1, 2, 2, 1, 2), 2, 5, 33, 512, 0.6, FP16),
]
CASES += [(replace(config, table=False), *rest) for config, *rest in CASES]
CASES += [
    (Config(8, 1, 2, 2, 1, 2, False, 2), 3, 8, 90, 1288, 0.5, BF16),
    (Config(8, 1, 4, 1, 1, 2, False, 8), 1, 3, 60, 304, 0.6, FP16),  # six CTAs have no tile
    (Config(16, 2, 2, 1, 2, 1, True, 4), 2, 21, 100, 1040, 0.7, FP8),  # the last CTA has one tile
]


@needs_gxx
@pytest.mark.parametrize(
    ("config", "workers", "m", "n", "k", "sparsity", "dtype"),
    sampled(CASES, 0, 1, 7, 11, -2),
    ids=str,
)
def test_its_threads_give_the_product_on_a_cpu(
    config, workers, m, n, k, sparsity, dtype, monkeypatch
) -> None:
    x, w = example(m, n, k, sparsity, dtype)
    y = emulated(x, w, config, workers, monkeypatch)
    right = (x.float() @ w.to_dense().float().T).to(y.dtype)
    torch.testing.assert_close(y, right, rtol=0, atol=0)


@needs_gxx
def test_nan_and_infinity_are_where_the_definition_has_them_at_any_stride(monkeypatch) -> None:
    x, w = example(3, 40, 520, 0.5, BF16)
    wide = torch.full((3, 544), float("nan"), dtype=BF16)[:, :520]
    x = wide.copy_(x)
    dense = w.to_dense()
    dense[3, 5], dense[7, 519], dense[9] = float("nan"), float("inf"), -0.0
    w, config = Bitmap.from_dense(dense), CASES[0][0]
    y = emulated(x, w, config, 2, monkeypatch)
    right = (x.float() @ dense.float().T).to(y.dtype)
    torch.testing.assert_close(y, right, rtol=0, atol=0, equal_nan=True)
    assert right[:, 3].isnan().all()


# ---- what is refused ----


# ---- configurations, and the code ----

LAYERS = [(14336, 4096), (28672, 8192), (4096, 14336), (1024, 4096), (40, 264)]


@pytest.mark.parametrize(("n", "k"), LAYERS)
@pytest.mark.parametrize("m", [1, 16, 64, 256])
def test_every_configuration_fits_and_covers_the_rows_of_a_worker(n: int, k: int, m: int) -> None:
    room = 6560  # of bf16 at 50 %
    configs = bitmap_mma.configurations(n, k, m, room, 2, {1: 132, 2: 66, 4: 30, 8: 15})
    assert configs
    for config in configs:
        assert config.warps <= bitmap_mma.WARPS[config.tokens, config.group]
        assert config.shared_bytes(room, m, 2) <= bitmap_mma.SHARED_BYTES
        assert config.tokens >= min(m, 64)
        assert config.split == 1 or config.rows * {2: 66, 4: 30, 8: 15}[config.split] * 16 >= n


def test_a_weight_with_a_dense_tile_does_not_fit_the_configuration_of_an_even_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list's choice for 14336 x 4096 and one token: a driver error ended the first call."""
    monkeypatch.setattr(cuda, "shared_bytes_of", lambda device: bitmap_mma.SHARED_BYTES)
    choice = Config(8, 1, 7, 4, 1, 4)
    even, uneven = torch.ones(2, 16, 256, dtype=BF16)
    even[:, ::2] = 0
    assert choice.shared_bytes(Bitmap.from_dense(even).room, 1, 2) <= bitmap_mma.SHARED_BYTES
    with pytest.raises(Unsupported, match="at most 232448 bytes of shared memory, found 266736"):
        bitmap_mma.Product(Bitmap.from_dense(uneven), choice, torch.device("cpu"))


@by_nvcc
@pytest.mark.parametrize("dtype", sampled([BF16, FP8, FP16]), ids=str)
@pytest.mark.parametrize(
    "config",
    sampled(
        [
            *(Config(8, 1, 14, 2, 1, 2, table) for table in (True, False)),
            *(Config(8, 2, 7, 3, 1, 2, table) for table in (True, False)),
            *(Config(16, 1, 9, 2, 2, 2, table, 4) for table in (True, False)),
            *(Config(16, 2, 7, 2, 1, 2, table) for table in (True, False)),
            *(Config(64, 1, 14, 1, 2, 2, table) for table in (True, False)),
            *(Config(64, 2, 11, 1, 1, 2, table) for table in (True, False)),
        ],
        *(0, 1),
    ),
    ids=str,
)
def test_it_compiles_without_a_spill(config: Config, dtype: torch.dtype, tmp_path: Path) -> None:
    assert_compiles_cleanly("bitmap_mma", bitmap_mma.constants_of(config, dtype), tmp_path)


# ---- on a GPU ----


@hopper
@pytest.mark.parametrize("dtype", [BF16, FP16, FP8], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "sparsity"),
    [(1, 4096, 4096, 0.5), (13, 2070, 1040, 0.8), (50, 48, 5136, 0.3), (131, 4096, 2048, 0.97)],
)
def test_the_products_are_right_on_a_gpu(m, n, k, sparsity, dtype) -> None:
    x, w = example(m, n, k, sparsity, dtype)
    x, w = x.cuda(), Bitmap.from_dense(w.to_dense().cuda())
    right = (x.double() @ w.to_dense().double().T).to(torch.bfloat16 if dtype == FP8 else dtype)
    rest = w.room, x.itemsize, {s: bitmap_mma.at_once(s, x.device) for s in bitmap_mma.SPLITS}
    configs = bitmap_mma.configurations(n, k, m, *rest)
    kinds = [(config.table, config.split) for config in configs]
    some = [c for i, c in enumerate(configs) if kinds[:i].count(kinds[i]) < 3]
    bitmap_mma.compile_ahead("bitmap_mma", [bitmap_mma.constants_of(c, dtype) for c in some])
    for config in some:
        program = bitmap_mma.launch(x, w, config)
        program.out.fill_(float("nan"))
        torch.testing.assert_close(program(), right, rtol=0, atol=0)
