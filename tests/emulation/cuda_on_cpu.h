// Enough of CUDA to run kernels on a CPU, with threads_on_cpu.cpp. Every thread of a cluster, or of a
// grid that runs together, is a fiber; they take turns, in another order each round, and change at
// whatever threads of a GPU wait for each other. Contexts start fibers, jumps change between them: a
// context's change asks the kernel twice for a signal mask that nothing here has.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using u32 = unsigned int;
using u64 = unsigned long long;
using std::min;
#define __device__
#define __forceinline__ inline
#define __global__
#define __cluster_dims__(n)
#define __launch_bounds__(...)
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { int x; };
extern Index threadIdx;

template <class T> T __ldg(const T* p) { return *p; }
static u32 __byte_perm(u32 a, u32 b, u32 how) {
  const u64 both = a | (u64)b << 32;
  u32 out = 0;
  for (int i = 0; i < 4; i++) out |= (u32)(both >> 8 * (how >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
static float __uint_as_float(u32 bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
static u32 __float_as_uint(float f) {
  u32 bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}
static int atomicAdd(int* p, int v) { return (*p += v) - v; }
static void atomicOr(u32* p, u32 v) { *p |= v; }

// ---- threads ----

constexpr u64 BARRIER = 0x7ffff800001ffffe;  // as an H200 has one of one arrival: a NaN

struct Meeting { int arrived = 0, round = 0; };
struct Cta {
  std::vector<char> dynamic, fixed;
  Meeting all, warps[32], named[16];
  u32 words[1024][6];
  std::vector<u64*> barriers;  // nothing else may ever be there
};
struct Fiber {
  ucontext_t start;
  jmp_buf place;
  std::vector<char> stack;
  int cta, thread, round;
  const Meeting* at;  // it is there until the meeting's round is another
  bool started, done;

  bool waits() const { return done || (at && at->round == round); }
};
extern std::vector<Cta> ctas;
extern std::vector<Meeting> clusters;
extern Fiber* now;
extern int first, threads, cluster_size, ctas_of_grid;
extern "C" int late;  // 1: a copy lands, and a product reads, when it is waited for

void others_first();
void meet(Meeting& m, int count);
void launch(int grid, int threads_of_cta, int cluster, size_t bytes, void (*kernel)(),
            bool together = false);
static Cta& mine() { return ctas[now->cta]; }
static int lane() { return now->thread % 32; }
static u32 (*warp())[6] { return mine().words + now->thread / 32 * 32; }
static void warp_in_step() { meet(mine().warps[now->thread / 32], 32); }
static void __syncwarp() { warp_in_step(); }
static void __syncthreads() { meet(mine().all, threads); }
static void in_step(int barrier, int count) { meet(mine().named[barrier], count); }
static int cluster_number() { return now->cta / cluster_size; }
static Cta& of_cluster(int cta) { return ctas[cluster_number() * cluster_size + cta]; }
static void cluster_sync() { meet(clusters[cluster_number()], cluster_size * threads); }
static int cta_number() { return first + now->cta; }
static int thread_number() { return now->thread; }
static char* dynamic_shared() { return mine().dynamic.data(); }
static char* fixed_shared() { return mine().fixed.data(); }

// ---- instructions ----

static int __shfl_up_sync(u32, int value, int by) {
  warp()[lane()][0] = value;
  warp_in_step();
  const int got = warp()[lane() >= by ? lane() - by : lane()][0];
  warp_in_step();
  return got;
}
static u32 __shfl_xor_sync(u32, u32 value, int by) {
  warp()[lane()][0] = value;
  warp_in_step();
  const u32 got = warp()[lane() ^ by][0];
  warp_in_step();
  return got;
}
static int __reduce_add_sync(u32, int value) {
  warp()[lane()][0] = value;
  warp_in_step();
  int sum = 0;
  for (int i = 0; i < 32; i++) sum += (int)warp()[i][0];
  warp_in_step();
  return sum;
}
static float to_float(unsigned short bits) {
  float f;
#if FP16
  _Float16 h;
  std::memcpy(&h, &bits, 2), f = h;
#else
  const u32 word = (u32)bits << 16;
  std::memcpy(&f, &word, 4);
#endif
  return f;
}
static u32 narrow(float f) {
#if FP16
  const _Float16 h = f;
  unsigned short bits;
  std::memcpy(&bits, &h, 2);
  return bits;
#else
  u32 bits;
  std::memcpy(&bits, &f, 4);
  return f != f ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}
static u32 pack_pair(float low, float high) { return narrow(low) | narrow(high) << 16; }
static u32 positive_mask(u32 pair) {
  return (to_float(pair & 0xffff) <= 0 ? 0 : 0xffff) | (to_float(pair >> 16) <= 0 ? 0 : 0xffff0000);
}
// m16n8k16: lane 4 g + t has A[g, g + 8][2 t, 2 t + 1 and + 8], B[2 t, 2 t + 1 and + 8][g] and
// D[g, g + 8][2 t, 2 t + 1].
static void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(warp()[lane()], own, sizeof own);
  warp_in_step();
  for (int e = 0; e < 4; e++) {
    const int row = lane() / 4 + e / 2 * 8, column = lane() % 4 * 2 + e % 2;
    for (int k = 0; k < 16; k++) {
      const u32 left = warp()[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const u32 right = warp()[column * 4 + k % 8 / 2][4 + k / 8];
      d[e] += to_float(left >> 16 * (k % 2) & 0xffff) * to_float(right >> 16 * (k % 2) & 0xffff);
    }
  }
  warp_in_step();
}
