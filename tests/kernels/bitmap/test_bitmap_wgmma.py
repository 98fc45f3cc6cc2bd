"""bitmap_wgmma: its threads on a CPU, what it refuses, its machine code, and on a GPU."""

import ctypes
import re
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats.bitmap import Bitmap
from sparsebench.kernels.bitmap import bitmap_mma, bitmap_wgmma
from sparsebench.kernels.bitmap.bitmap_wgmma import Config
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc, hopper
from tests.emulation import cuda_on_cpu
from tests.emulation.cuda_on_cpu import device_code, library_of
from tests.kernels.bitmap.test_bitmap_mma import STAND_INS as ALL, example

cuda_on_cpu.PTX_HEADERS += ("wgmma_registers.cuh",)
RECORDS = ALL[ALL.index("  #include <cmath>") : ALL.index("  static void bulk_load")]
RECORDS = re.sub(".*__popc.*", "", RECORDS) + ALL[ALL.index("  #define multiplying") :]
from tests.tools.marks import needs_gxx, sampled
from tests.tools.paths import cuda_source

BF16, FP16 = torch.bfloat16, torch.float16
STAND_INS = """
  #include "warpgroup_on_cpu.h"
  #define WGMMA_A(N, a, b) add_registers(d, N, a, b, true, false)
"""


@cache
def on_cpu(config: Config, dtype: torch.dtype, late: bool) -> Any:
    """Build the kernel's source for this machine."""
    device = cuda_source("hopper.cuh")
    start = device.index("__device__ __forceinline__ u64 smem_descriptor")
    descriptor = device[start : device.index("__device__", start + 1)]
    code = device_code("bitmap_wgmma.cu", "hold")
    source = STAND_INS + RECORDS + descriptor + "#define hold(a)\n" + code
    source += """
      static void** a;
      template <class T> T& at(int i) { return *(T*)a[i]; }
      static void run() {
        multiply_records(at<TensorMap>(0), at<Weights>(1), at<u16*>(2), at<int>(3), at<int>(4),
                         at<int>(5));
      }
      extern "C" void call(void** args, int grid, size_t bytes) {
        a = args;
        launch(grid, THREADS, 1, bytes, run);
      }
    """
    return library_of(source, (*config.constants(dtype), ("LATE", int(late))))


CASES = [
    (Config(32, 1, 2, 1, 2), 3, 21, 150, 776, 0.5, BF16),
    (Config(48, 2, 1, 2, 3), 2, 40, 200, 528, 0.7, FP16),
    (Config(64, 1, 3, 1, 2), 1, 50, 60, 1032, 0.9, BF16),
    (Config(96, 1, 2, 2, 2, table=False), 2, 70, 90, 264, 0.3, FP16),
]
CASES += [(replace(config, table=not config.table), *rest) for config, *rest in CASES]


@needs_gxx
@pytest.mark.parametrize(
    ("config", "workers", "m", "n", "k", "sparsity", "dtype"), sampled(CASES, 0, 3, 5), ids=str
)
def test_its_threads_give_the_product_on_a_cpu(
    config: Config,
    workers: int,
    m: int,
    n: int,
    k: int,
    sparsity: float,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w = example(m, n, k, sparsity, dtype)
    monkeypatch.setattr(bitmap_mma, "load", lambda *given: (None, "code"))
    monkeypatch.setattr(bitmap_mma, "multiprocessors", lambda device: workers)
    monkeypatch.setattr(bitmap_wgmma, "load", lambda *given: (None, "code"))
    monkeypatch.setattr(bitmap_wgmma, "tensor_map", map_on_cpu)
    program = bitmap_wgmma.launch(x, w, config)
    program.out.fill_(float("nan"))
    shared = ctypes.c_size_t(config.shared_bytes(w.room, m, 2))
    kernel = on_cpu(config, dtype, workers % 2 == 0)
    kernel.call(program.args[0], program.loaded.grid, shared)
    right = (x.float() @ w.to_dense().float().T).to(dtype)
    torch.testing.assert_close(program.out, right, rtol=0, atol=0)


def map_on_cpu(address: int, shape: Any, strides: Any, dtype: Any, box: Any) -> bytes:
    """Return struct TensorMap of wgmma_on_cpu.h."""
    return struct.pack("Q6i", address, *shape, 2 * strides[0], *box, 128).ljust(128, b"\0")


@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (11008, 4096), (28672, 8192), (40, 264)])
@pytest.mark.parametrize("m", [17, 40, 64, 128])
def test_every_configuration_fits_and_covers_the_rows_of_a_worker(n: int, k: int, m: int) -> None:
    found = bitmap_wgmma.configurations(n, k, m, 4928, 132)
    assert found or (m, n) == (128, 28672)  # registers
    for config in found:
        assert config.warps <= bitmap_wgmma.WARPS[config.tokens]
        assert config.shared_bytes(4928, m, 2) <= bitmap_mma.SHARED_BYTES
        assert config.rows * min(132, -(-n // 16)) * 16 >= n
        assert config.tokens >= m


@by_nvcc
@pytest.mark.parametrize(
    "config",
    sampled(
        [
            *(Config(64, 2, 3, 1, 2, table) for table in (False, True)),
            *(Config(96, 2, 2, 1, 2, table) for table in (False, True)),
            *(Config(128, 1, 3, 1, 2, table) for table in (False, True)),
        ],
        *(0, 3),
    ),
    ids=str,
)
def test_it_compiles_without_a_spill_or_a_serialised_product(
    config: Config, tmp_path: Path
) -> None:
    assert_compiles_cleanly("bitmap_wgmma", config.constants(BF16), tmp_path)


@hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "sparsity"),
    [(17, 4096, 4096, 0.5), (40, 2070, 1040, 0.8), (64, 11008, 2048, 0.3), (121, 48, 5136, 0.97)],
)
def test_the_products_are_right_on_a_gpu(
    m: int, n: int, k: int, sparsity: float, dtype: torch.dtype
) -> None:
    x, w = example(m, n, k, sparsity, dtype)
    x, w = x.cuda(), Bitmap.from_dense(w.to_dense().cuda())
    right = (x.double() @ w.to_dense().double().T).to(dtype)
    found = bitmap_wgmma.offered(m, w, x.device)
    bitmap_mma.compile_ahead("bitmap_wgmma", [config.constants(dtype) for config in found])
    for config in found:
        program = bitmap_wgmma.launch(x, w, config)
        for _ in range(3):
            program.out.fill_(float("nan"))
            torch.testing.assert_close(program(), right, rtol=0, atol=0)
