// What kernels that use mma ask for beyond cuda_on_cpu.h, as the PTX ISA defines it. A copy lands
// at once or, when it is `late`, when its group is waited for, so that a wait too few and one too late are
// seen.

#include "cuda_on_cpu.h"

#include <map>
#include <utility>

#define __grid_constant__
struct Block { operator int() const { return cta_number(); } };
static struct { Block x; } blockIdx;
struct Blocks { operator int() const { return ctas_of_grid; } };
static struct { Blocks x; } gridDim;

static void __threadfence() {}
static float4 __ldcg(const float4* p) { return *p; }
static bool __syncthreads_or(bool own) {
  mine().words[now->thread][5] = own;
  __syncthreads();
  bool any = false;
  for (int i = 0; i < threads; i++) any |= mine().words[i][5];
  __syncthreads();
  return any;
}

// ---- copies: addresses in shared memory are places in it ----

// The same in all CTAs: what is not in dynamic shared memory comes after it.
static u32 smem_address(const void* p) {
  const auto at = (const char*)p - dynamic_shared(), size = (long)mine().dynamic.size();
  return at >= 0 && at < size ? at : size + ((const char*)p - fixed_shared());
}
void copy(u32 to, const char* from, int bytes, bool there);
static void copy_16(u32 to, const char* from, bool there) { copy(to, from, 16, there); }
static void copy_8(u32 to, const char* from) { copy(to, from, 8, true); }
static void copy_16_if(u32 to, const char* from, bool there) { if (there) copy_16(to, from, true); }
static void copy_8_if(u32 to, const char* from, bool there) { if (there) copy_8(to, from); }
template <class T> T opaque(T value) { return value; }
void cp_async_commit();
void wait_for_copies(int left);  // groups
template <int LEFT> void cp_async_wait() { wait_for_copies(LEFT); }
static u32 ld_shared_u32(u32 address) { return *(u32*)(dynamic_shared() + address); }

// ---- mbarriers: a phase is over when no arrival and no byte is missing ----

void mbarrier_init(u32 barrier, int arrivals);
void mbarrier_arrive_expect_tx(u32 barrier, int bytes);
void mbarrier_wait(u32 barrier, u32 parity, const char*);
void expect_tx(u32 barrier, int bytes);
void counted_copy(Cta& cta, u32 to, const void* from, int bytes, u32 barrier);
static void mbarrier_arrive(u32 barrier) { mbarrier_arrive_expect_tx(barrier, 0); }
static u32 map_shared_rank(u32 address, int cta) { return address | cta << 24; }
static void st_async(u32 to, float4 v, u32 barrier) {
  if (to >> 24 != barrier >> 24) std::abort();
  counted_copy(of_cluster(to >> 24), to & 0xffffff, &v, sizeof v, barrier & 0xffffff);
}
static void cluster_sync_relaxed() { cluster_sync(); }
static void wait_on_dependent_grids() {}
static void launch_dependent_grids() {}

// ---- matrices of 8 x 8: lane 4 g + q has elements 2 q and 2 q + 1 of row g ----

static void ldmatrix_x4(u32 (&v)[4], u32 address) {
  if (address % 16) std::abort();
  warp()[lane()][0] = address;
  warp_in_step();
  for (int i = 0; i < 4; i++) v[i] = ld_shared_u32(warp()[8 * i + lane() / 4][0] + lane() % 4 * 4);
  warp_in_step();
}
static u32 movmatrix_trans(u32 v) {
  warp()[lane()][0] = v;
  warp_in_step();
  u32 pair = 0;
  for (int i = 0; i < 2; i++) {
    const int row = lane() % 4 * 2 + i, column = lane() / 4;
    pair |= (warp()[row * 4 + column / 2][0] >> 16 * (column % 2) & 0xffff) << 16 * i;
  }
  warp_in_step();
  return pair;
}

static void ldmatrix_x4_trans(u32 (&v)[4], u32 address) {
  ldmatrix_x4(v, address);
  for (u32& word : v) word = movmatrix_trans(word);
}

// mma.sp, m16n8k32. A[row][8 c + 2 q, + 1] of the stored columns is in register row / 8 + 2 c of
// lane 4 (row % 8) + q; B[8 i + 2 q, + 1][token] in register i of lane 4 token + q. The code of row
// and group j, four bits, is in lane 4 (row % 8) + 2 SELECTOR + j / 4, at 16 (row / 8) + 4 (j % 4).
template <int SELECTOR>
void mma_sp(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], u32 word) {
  static u32 of_b[1024][4];
  std::memcpy(of_b[now->thread], b, sizeof b);
  std::memcpy(warp()[lane()], a, sizeof a);
  warp()[lane()][4] = word;
  warp_in_step();
  const int base = now->thread / 32 * 32;
  for (int e = 0; e < 4; e++) {
    const int row = lane() / 4 + e / 2 * 8, token = lane() % 4 * 2 + e % 2, from = row % 8 * 4;
    for (int j = 0; j < 8; j++) {
      const u32 code = warp()[from + 2 * SELECTOR + j / 4][4] >> (16 * (row / 8) + 4 * (j % 4));
      const int which[2] = {(int)(code & 3), (int)(code >> 2 & 3)};
      if (which[0] >= which[1]) std::fprintf(stderr, "codes are not in order\n"), std::abort();
      for (int i = 0; i < 2; i++) {
        const int k = 4 * j + which[i];
        const u32 pair = warp()[from + j % 4][row / 8 + j / 4 * 2];
        const u32 other = of_b[base + token * 4 + k % 8 / 2][k / 8];
        d[e] += to_float(pair >> 16 * i & 0xffff) * to_float(other >> 16 * (k % 2) & 0xffff);
      }
    }
  }
  warp_in_step();
}
