"""slide_wgmma: middle boxes, work lists, and machine code. test_contract.py has its products."""

import ctypes
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsebench.formats._format import BITS
from sparsebench.formats.slide import columns_of
from sparsebench.formats.spense import DTYPES as STORED
from sparsebench.formats.spense import Spense
from sparsebench.kernels.spense import spense_wgmma
from sparsebench.kernels.spense._stream_k import schedule
from sparsebench.kernels.spense.spense_wgmma import UNIT, Config
from tests.compiling.nvcc import CLEAN, assert_compiles_cleanly, by_nvcc
from tests.emulation.cuda_on_cpu import library_of
from tests.kernels.spense.test_spense_wgmma import assert_metadata_stays
from tests.tools.marks import needs_gxx, sampled
from tests.tools.paths import cuda_source

# ---- middle boxes ----


def swizzled(rows: Tensor) -> Tensor:
    """Return bytes [rows, 128] as TMA writes them: piece p of row r at p ^ r % 8."""
    place = torch.arange(8) ^ torch.arange(len(rows))[:, None] % 8
    return rows.unflatten(1, (8, 16)).gather(1, place[..., None].expand(-1, -1, 16)).flatten(1)


@needs_gxx
@pytest.mark.parametrize("dtype", spense_wgmma.DTYPES, ids=str)
@pytest.mark.parametrize("config", [Config(16, 1, 4), Config(48, 1, 4, 1, 2)], ids=str)
def test_the_idle_warps_write_the_columns_of_odd_windows(config, dtype) -> None:
    columns = 2 * 128 // dtype.itemsize
    x = torch.randn(config.tokens, columns).to(dtype)
    boxes = [swizzled(half.contiguous().view(torch.uint8)) for half in x.chunk(2, 1)]
    shared = torch.cat([*boxes, torch.zeros_like(boxes[0])]).contiguous()
    library = library_of(EXPANDERS, spense_wgmma.constants_of(config, dtype, windows=True))
    library.run(ctypes.c_void_p(shared.data_ptr()))
    lifted_columns = columns_of(columns, 6, 8, dtype.itemsize)[columns : columns * 3 // 2]
    expected = x.view(BITS[dtype.itemsize])[:, lifted_columns].contiguous().view(torch.uint8)
    assert torch.equal(shared[2 * config.tokens :], swizzled(expected))


KERNEL = cuda_source("spense_tiles.cuh")
EXPANDERS = """
#include <cstring>
typedef unsigned int u32;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct { int x; } threadIdx;
char* memory;
u32 __byte_perm(u32 a, u32 b, u32 places) {
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    const u32 place = places >> 4 * i & 7;
    result |= ((place < 4 ? a : b) >> place % 4 * 8 & 255) << 8 * i;
  }
  return result;
}
uint4 ld_shared_uint4(u32 at) { uint4 v; memcpy(&v, memory + at, 16); return v; }
void st_shared_uint4(u32 at, const uint4& v) { memcpy(memory + at, &v, 16); }
#define __device__
#define __forceinline__ inline
constexpr int EXPANDERS = WARPGROUPS < 3 ? 3 - WARPGROUPS : 1;
MIDDLE_BOXES
extern "C" void run(char* boxes) {
  memory = boxes;
  const u32 box = TOKENS * ROW_BYTES;
  for (threadIdx.x = 32 * (WARPGROUPS + 1); threadIdx.x < 128; threadIdx.x++)
    expand_box(0, box, 2 * box);
}
""".replace(
    "MIDDLE_BOXES",
    KERNEL[KERNEL.index("__device__ __forceinline__ uint2 middle_of") :].split(
        "__device__ __forceinline__ void expanders_sync"
    )[0],
)


@pytest.mark.parametrize("size", [1, 2])
def test_two_of_three_boxes_of_the_lifted_columns_are_boxes_of_x(size: int) -> None:
    width = 128 // size
    boxes = columns_of(10 * width, 6, 8, size).unflatten(0, (-1, width))
    for box, columns in enumerate(boxes):
        if box % 3 < 2:
            assert columns.tolist() == [
                *range((box - box // 3) * width, (box - box // 3 + 1) * width)
            ]
    assert len(boxes) % (2 * UNIT) == 0


# ---- work lists ----


@pytest.mark.parametrize("m", [16, 300, 5000])
@pytest.mark.parametrize("shape", [(5120, 30), (51200, 48), (640, 3)], ids=str)
def test_items_start_and_end_at_whole_units(shape: tuple[int, int], m: int) -> None:
    n, k_tiles = shape
    tiles = torch.empty((-(-n // 64), k_tiles, 9216), device="meta")
    nothing = torch.empty((0, k_tiles, 16384), device="meta")
    w = Spense((n, 128 * k_tiles), torch.bfloat16, (n, 128 * k_tiles), tiles, nothing)
    work = schedule(w, m, 128, 1, 132, unit=UNIT)
    items = work.items[: work.starts[-1]]
    assert not (items["k_tile"] % UNIT).any()
    assert not (items["k_tiles"] % UNIT).any()
    done = np.zeros((-(-n // 128), -(-m // 128), k_tiles), int)
    for group, token, first, count, *_ in items:
        done[group, token // 128, first : first + count] += 1
    assert (done == 1).all()


# ---- machine code ----


CONFIGS = [Config(256, 2, 4), Config(16, 1, 4), Config(64, 2, 5), Config(256, 1, 4)]
CONFIGS += [Config(48, 1, 4, 1, 2), Config(112, 1, 4, 2, 2), Config(128, 1, 4, 2, 5)]
CONFIGS += [Config(128, 2, 4), Config(32, 1, 6), Config(16, 1, 4, 1, 8), Config(80, 2, 4, 1)]


@by_nvcc
@pytest.mark.parametrize(
    ("config", "dtype"), sampled([*product(CONFIGS, [STORED[1], STORED[2]])]), ids=str
)
def test_it_compiles_without_a_spill_or_a_serialised_product(config, dtype, tmp_path) -> None:
    """Allow a spill of five registers in one configuration, which a search times like the rest."""
    constants = spense_wgmma.constants_of(config, dtype, windows=True)
    spills = config == Config(128, 2, 4) and dtype.itemsize == 1
    clean = "20 bytes spill stores, 36 bytes spill loads" if spills else CLEAN
    assert_compiles_cleanly(
        "spense_wgmma", constants, tmp_path, clean=clean, look=assert_metadata_stays
    )
