// Stands in for hopper.cuh and wgmma.cuh: copies by TMA into swizzled boxes, and wgmma from shared memory, as the
// PTX ISA defines them. If it is `late`, a copy lands when its barrier is waited for, and a product reads
// its operands when its group is waited for: a stage released too early is seen.

#pragma push_macro("THREADS")  // of a kernel; there a parameter of a template has this name
#undef THREADS
#include "grid_on_cpu.h"
#pragma pop_macro("THREADS")

struct TensorMap {  // of a matrix in memory, for boxes of 16-bit elements
  const char* from;
  int rows, columns, step, box_rows, box_columns, pitch;
  char rest[96];  // as large as the driver's
};

static char* in_shared(u32 at) {
  const u32 size = mine().dynamic.size();
  return at < size ? dynamic_shared() + at : fixed_shared() + (at - size);
}
static u32 swizzled(u32 at, int pitch) { return at ^ (at >> 7 & (pitch / 16 - 1)) << 4; }

static void tma_load(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  if (column % 16) std::fprintf(stderr, "a box between 32 bytes\n"), std::abort();
  for (int r = 0; r < map->box_rows; r++)
    for (int c = 0; c < map->box_columns; c += 8) {
      char piece[16] = {};
      for (int i = 0; i < 8; i++)
        if (row + r < map->rows && column + c + i < map->columns)
          std::memcpy(piece + 2 * i, map->from + (size_t)(row + r) * map->step +
                                         2 * (column + c + i), 2);
      counted_copy(mine(), swizzled(to + r * map->pitch + 2 * c, map->pitch), piece, 16, barrier);
    }
}

// ---- wgmma: A is K-major and swizzled; B has no swizzle, 8 x 8 elements are 128 bytes ----

struct Product { float* d; int n; u64 a, b; };
static std::map<Fiber*, std::vector<std::vector<Product>>> products;

static void multiply_now(const Product& p) {
  const auto field = [](u64 descriptor, int bit) { return (u32)(descriptor >> bit & 0x3fff) << 4; };
  const int mode = p.a >> 62, pitch = mode == 1 ? 128 : mode == 2 ? 64 : 32;
  const int lane = now->thread % 32, warp = now->thread / 32 % 4;
  for (int i = 0; i < p.n / 2; i++) {
    const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      const u32 a = field(p.a, 0) + row / 8 * field(p.a, 32) + row % 8 * pitch + 2 * k;
      const u32 b = field(p.b, 0) + n / 8 * field(p.b, 32) + n % 8 * 16 +
                    k / 8 * field(p.b, 16) + k % 8 * 2;
      unsigned short x, y;
      std::memcpy(&x, in_shared(swizzled(a, pitch)), 2);
      std::memcpy(&y, in_shared(b & 0x3ffff), 2);
      p.d[i] += to_float(x) * to_float(y);
    }
  }
}
template <int N, int A_TRANS = 0, int B_TRANS = 0> struct Wgmma {
  static void multiply(float* d, u64 a, u64 b) {
    if (late) products[now].back().push_back({d, N, a, b});
    else multiply_now({d, N, a, b});
  }
};
static void wgmma_fence() {
  if (products[now].empty()) products[now].emplace_back();
}
static void wgmma_commit() { products[now].emplace_back(); }
template <int LEFT> void wgmma_wait() {
  auto& groups = products[now];
  while (groups.size() > LEFT + 1) {
    for (const Product& p : groups.front()) multiply_now(p);
    groups.erase(groups.begin());
  }
}
