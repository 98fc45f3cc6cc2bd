"""Build the epilogue of spense_wgmma for this machine, with stand-ins for PTX.

Taken from the text: structs, scales, activations, stores, partial sums and the fixup. A stand-in
for a TMA store reads shared memory as late as it may.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from sparsebench.kernels.spense.spense_wgmma import Config
from tests.emulation.cuda_on_cpu import library_of, without_ptx
from tests.tools.paths import cuda_source

KERNEL = "// the kernel's own text\n"  # the place of the kernel in the code of a test
IN_CPP = """
using std::max;
struct TensorMap { char* to; long bytes, rows; };  // of a row, and rows
static Meeting groups[64][6];
static void warpgroup_sync(int barrier) { meet(groups[now->cta][barrier], 128); }
#define __expf expf
static float __fdividef(float a, float b) { return a / b; }
static float4 __ldcg(const float4* p) { return *p; }
static int ld_acquire(const int* counter) { others_first(); return *counter; }
static void red_release_add_1(int* counter) { ++*counter; }

// The columns of 8 x 8 pieces, as rows: lane 8 j + r has the address of row r of piece j.
static void stmatrix_trans(u32 place, const u32* words, int pieces) {
  memcpy(warp()[lane()], words, 4 * pieces);
  warp_in_step();
  const int piece = lane() / 8, row = lane() % 8;
  if (piece < pieces)
    for (int c = 0; c < 8; c++) {
      const u32 word = warp()[4 * c + row / 2][piece];
      const unsigned short bits = word >> 16 * (row % 2);
      memcpy(dynamic_shared() + place + 2 * c, &bits, 2);
    }
  warp_in_step();
}
static void stmatrix_x2_trans(u32 place, u32 a, u32 b) {
  const u32 words[] = {a, b};
  stmatrix_trans(place, words, 2);
}
static void stmatrix_x4_trans(u32 place, const float* s) {
  const u32 words[] = {pack_pair(s[0], s[1]), pack_pair(s[2], s[3]), pack_pair(s[4], s[5]),
                       pack_pair(s[6], s[7])};
  stmatrix_trans(place, words, 4);
}
static void st_shared_u8(u32 at, u32 value) { dynamic_shared()[at] = value; }
static u32 e4m3(float f) {  // to nearest, ties to even; at most 448
  const u32 sign = std::signbit(f) ? 0x80 : 0;
  const float a = min(std::fabs(f), 448.f), least = 1 / 64.f;
  if (f != f) return sign | 0x7f;
  const int e = a < least ? -6 : std::ilogb(a);
  return sign | ((e + 6 << 3) + (int)std::nearbyint(std::ldexp(a, 3 - e)));
}
static u32 cvt_e4m3x2(float low, float high) { return e4m3(low) | e4m3(high) << 8; }

struct Store { const TensorMap* map; u32 from; int column, row; };
static std::vector<std::vector<Store>> pending[64][16];  // a warp's groups of stores, the last open
static auto& mine_pending() { return pending[now->cta][now->thread / 32]; }
static void tma_store(const TensorMap* map, u32 from, int column, int row) {
  mine_pending().back().push_back({map, from, column, row});
}
static void tma_store_commit() { mine_pending().emplace_back(); }
template <int LEFT> static void tma_store_wait_read();
static void fence_proxy_async() {}
"""
AFTER_KERNEL = """
template <int BYTES> static void land_stores(int left) {  // rows of so many bytes, swizzled
  auto& groups = mine_pending();
  for (; (int)groups.size() > left + 1; groups.erase(groups.begin()))
    for (const Store& s : groups[0])
      for (int r = 0; r < (TOKENS % STORE_TOKENS ? STORE_TOKENS / 2 : STORE_TOKENS); r++)
        for (int b = 0; b < BYTES; b++) {
          const u32 at = s.from + r * BYTES + b;
          const long row = s.row + r, byte = 2l * s.column + b;
          if (row < s.map->rows && byte < s.map->bytes)
            s.map->to[row * s.map->bytes + byte] =
                dynamic_shared()[at ^ (at >> 7 & (BYTES / 16 - 1)) << 4];
        }
}
static void load_sums(float (&d)[8 * STORES], const float* of) {  // a thread's of [64][TOKENS]
  const int thread = threadIdx.x % 128;
  for (int j = 0; j < TOKENS / 2; j++)
    d[j] = of[(16 * (thread / 32) + thread % 32 / 4 + j / 2 % 2 * 8) * TOKENS +
              j / 4 * 8 + thread % 4 * 2 + j % 2];
}
"""


@dataclass(frozen=True)
class Case:
    """m tokens, hidden units, steps of k, the fraction that is sparse, and CTAs."""

    config: Config
    m: int
    units: int
    steps: int
    sparse: float
    ctas: int


PARTIAL_SUMS = "// ---- stream-K: partial sums and their reduction ----"


def section(source: str, start: str, end: str) -> str:
    return source[source.index(start) : source.index(end)]


@cache
def on_cpu(test: str, constants: Any) -> Any:
    """Build the code after the products, and `test`; IN_CPP and cuda_on_cpu.h replace PTX."""
    kernel, tiles = cuda_source("spense_wgmma.cu"), cuda_source("spense_tiles.cuh")
    shared = cuda_source("hopper.cuh")
    parts = section(tiles, "constexpr int SPARSE_BYTES", "template <int BYTES, int STAGES>")
    parts += section(kernel, "struct alignas(16) Fixup", PARTIAL_SUMS)
    parts += "using Accumulators = float[8 * STORES];\n"
    parts += shared[shared.index("__device__ __forceinline__ u32 stmatrix_address") :]
    parts += cuda_source("scales.cuh").replace("#pragma once", "")
    parts += section(tiles, "// ---- epilogue: hidden units ----", "// ---- an item ----")
    parts += tiles[tiles.index("template <class Write>") :]
    parts += section(kernel, PARTIAL_SUMS, "// ---- the kernel ----")
    source = '#include <cmath>\n#include "cuda_on_cpu.h"\n' + IN_CPP
    return library_of(source + test.replace(KERNEL, without_ptx(parts) + AFTER_KERNEL), constants)
