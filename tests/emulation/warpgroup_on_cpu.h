// Stands in for warpgroup.cuh of kernels/attention: wgmma with A in registers or shared memory,
// stmatrix, barriers of warpgroups, boxes of batched matrices, as the PTX ISA defines them. If it is
// `late`, a product reads shared memory when its group is waited for; it takes A's registers at once.

#include <cmath>

#include "wgmma_on_cpu.h"

static float __int_as_float(int bits) { return __uint_as_float(bits); }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float __shfl_xor_sync(u32 lanes, float value, int by) {
  return __uint_as_float(__shfl_xor_sync(lanes, __float_as_uint(value), by));
}
static void st_shared(u32 to, int v) { std::memcpy(in_shared(to), &v, 4); }
static int ld_shared(u32 from) {
  int v;
  std::memcpy(&v, in_shared(from), 4);
  return v;
}
static float2 ld_shared_pair(u32 from) {
  float2 v;
  std::memcpy(&v, in_shared(from), 8);
  return v;
}
static uint4 ld_shared_quad(u32 from) {
  uint4 v;
  std::memcpy(&v, in_shared(from), 16);
  return v;
}
static void st_streaming(void* to, const u32* v) {
  if ((u64)to % 16) std::abort();
  std::memcpy(to, v, 16);
}
static int evict_first() { return 0; }
static void bulk_load(u32 to, const void* from, int bytes, u32 barrier, int) {
  bulk_load(to, from, bytes, barrier);
}
static void warpgroup_sync(int barrier) { in_step(barrier, 128); }
static void barrier_sync(int barrier, int count) { in_step(barrier, count); }
static void barrier_arrive(int barrier, int count) {
  Meeting& m = mine().named[barrier];
  if (++m.arrived == count) m.arrived = 0, m.round++;
}
static void release(u32 barrier) {
  if (now->thread % 128 == 0) mbarrier_arrive(barrier);
}
template <int COUNT> void hold(float (&)[COUNT]) {}
static float exp2_approx(float x) { return std::exp2(x); }
static void tma_load(u32 to, const TensorMap* map, int column, int row, int plane, u32 barrier) {
  TensorMap of_plane = *map;
  of_plane.from += (size_t)plane * map->rows * map->step;
  tma_load(to, &of_plane, column, row, barrier);
}

// ---- wgmma: tiles are swizzled by 128 bytes, K-major or (transposed) MN-major ----

struct Operand {
  u64 descriptor;
  bool transposed;
  float at(int row, int k) const {
    const auto field = [&](int bit) { return (u32)(descriptor >> bit & 0x3fff) << 4; };
    const u32 place = transposed ? row / 64 * field(16) + row % 64 * 2 + k / 8 * field(32) +
                                       k % 8 * 128
                                 : row / 8 * field(32) + row % 8 * 128 + 2 * k;
    unsigned short bits;
    std::memcpy(&bits, in_shared(swizzled(field(0) + place, 128)), 2);
    return to_float(bits);
  }
};
struct Terms {
  float* d;
  int n;
  bool keep, registers;
  u32 words[16];
  Operand a, b;
  bool sparse = false;
};
static std::map<Fiber*, std::vector<std::vector<Terms>>> terms;

// A is 2:4 sparse. Lane 4 g + c has the codes of groups 4 c to 4 c + 3 of row g, then of row g + 8.
static void add_sparse(const Terms& p) {
  for (int i = 0; i < p.n / 2; i++) {
    const int half = i / 2 % 2, row = now->thread / 32 % 4 * 16 + lane() / 4 + 8 * half;
    const int column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    for (int group = 0; group < 8; group++)
      for (int j = 0; j < 2; j++) {
        const u32 position = p.words[group / 4] >> 16 * half + group % 4 * 4 + 2 * j & 3;
        p.d[i] += p.a.at(row, 2 * group + j) * p.b.at(column, 4 * group + position);
      }
  }
}
static void add_now(const Terms& p) {
  if (p.sparse) return add_sparse(p);
  float a[2][16];
  for (int r = 0; r < 2; r++)
    for (int k = 0; k < 16; k++) {
      const u32 word = p.words[k % 8 / 2 * 4 + r + k / 8 * 2];
      const int row = now->thread / 32 % 4 * 16 + lane() / 4 + 8 * r;
      a[r][k] = p.registers ? to_float(word >> 16 * (k % 2) & 0xffff) : p.a.at(row, k);
    }
  for (int i = 0; i < p.n / 2; i++) {
    const int column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    if (!p.keep) p.d[i] = 0;
    for (int k = 0; k < 16; k++) p.d[i] += a[i / 2 % 2][k] * p.b.at(column, k);
  }
}
static void add(const Terms& p) {
  if (late) terms[now].back().push_back(p);
  else add_now(p);
}
template <int N, int A_TRANS = 0, int B_TRANS = 0> struct WarpgroupProduct {
  static void multiply(float* d, const u32* a, u64 b, bool keep) {
    Terms p{d, N, keep, true, {}, {}, {b, B_TRANS}};
    std::memcpy(warp()[lane()], a, 16);
    warp_in_step();
    for (int t = 0; t < 4; t++) std::memcpy(p.words + 4 * t, warp()[lane() / 4 * 4 + t], 16);
    warp_in_step();
    add(p);
  }
  static void multiply(float* d, u64 a, u64 b, bool keep) {
    add(Terms{d, N, keep, false, {}, {a, A_TRANS}, {b, B_TRANS}});
  }
  static void multiply_sparse(float* d, u64 a, u64 b, u32 codes) {
    Terms p{d, N, true, false, {}, {a, false}, {b, false}, true};
    warp()[lane()][0] = codes;
    warp_in_step();
    for (int c = 0; c < 2; c++) p.words[c] = warp()[lane() / 4 * 4 + c][0];
    warp_in_step();
    add(p);
  }
};
#define Wgmma WarpgroupProduct

static void open_group() {
  if (terms[now].empty()) terms[now].emplace_back();
}
static void close_group() { terms[now].emplace_back(); }
template <int LEFT> void wait_for_groups() {  // the four warps' products end together
  static std::map<std::pair<int, int>, Meeting> meetings;
  auto& groups = terms[now];
  while (groups.size() > LEFT + 1) {
    for (const Terms& p : groups.front()) add_now(p);
    groups.erase(groups.begin());
  }
  meet(meetings[{now->cta, now->thread / 128}], 128);
}
#define wgmma_fence open_group
#define wgmma_commit close_group
#define wgmma_wait wait_for_groups
