// dW = dY[m, n].T @ X[m, k] at W's stored blocks of any multiple of 8, by wgmma and TMA (Hopper).
//
//   strip   32 columns of dY or of X             cell   strip of dY x strip of X, 32 x 32 of dW
//   unit    two strips of dY x two of X: one m64n64k16 for 16 tokens, 32 sums per thread
//   item    up to 2 * UNITS units, and the strips that they read; all tokens
//
//                          x0   x1   x2   x3              units, as dY strips x X strips
//                   dy0 |  ##   ##
//                   dy1 |       ##   ##   ##    (0,1)x(0,1)   (1,3)x(2,3)     warpgroup 0
//                   dy2 |  ##                   (2,3)x(0,1)                   warpgroup 1
//                   dy3 |  ##   ##   ##
//
// Any two strips form an operand: LBO is the distance from one to the other. So an item is gathered
// from places where cells of W are dense, and few empty cells are multiplied
// (bsr_wgrad_small.py). A unit with one strip reads it twice, and a missing unit reads the
// first strips; the kernel does not store these sums.
//
// A step loads DEPTH tokens of all strips of an item, and both warpgroups read any of them:
//
//    warps 8 to 11   strips 0, 4, 8 ...  --+    +---------+---------+-- --+    +--> warpgroup 0
//                    strips 1, 5, 9 ...  --+--> | stage 0 | stage 1 | ... | ---+
//                    ...                   |    +---------+---------+-- --+    +--> warpgroup 1
//
// A strip is [DEPTH tokens x 32], rows of 64 bytes, MN-major for both operands. The next 16 tokens
// are 16 rows, or 1024 bytes, further; SBO is 512. TMA reads zeros beyond m, n and k. They add
// nothing, and a block stores zeros outside W.
//
// A cell need not be a block. Blocks of 16 lie in cells of 32 with their neighbours, and blocks of
// 48 in four cells. For each 8 x 8 of a unit, a table has its position in the values, or -1. Four
// lanes of a row transpose four 8 x 8 matrices, and each stores 16 bytes.
//
// If there are few items, SMs would idle. So an item may be cut between workers, each of which
// takes every second, third, ... step; split_k.cuh adds up their sums in a fixed order.
//
// Cost of a step of 64 tokens, UNITS = 6:
//    products  48 cells, 6.3 MFLOP: 1050 ns of an SM at the 790 TFLOP/s of cuBLAS on an H200. A
//              product reads 4 KB of shared memory in the 32 clocks that it takes at best
//    loads     a strip is 4 KB, 61 ns at 8.8 TB/s. A full item of uniform random cells reads 16
//              strips at 50 % sparsity, 19 at 80 %, 20 at 90 %: 1.0 to 1.2 us
//
// Macros: DEPTH=64|32 UNITS=6|4|2 (of a warpgroup) STRIPS (room in a stage), the other constants
// of bsr_wgrad_small.work_of and of _wgrad.py, and hopper.cuh's. Source: PTX ISA 9.0, wgmma (matrix descriptor,
// strides), mbarrier, cp.async.bulk.tensor, memory consistency model.

#include "tokens.cuh"

constexpr int WIDTH = 32, ROW_BYTES = 2 * WIDTH;
using Pipeline = Tokens<STRIPS, ROW_BYTES>;
constexpr int QUADS = 2 * UNITS;     // units of split_k.cuh: two strips of dY x one of X
constexpr int SUMS = QUADS * UNIT;   // of a thread

struct Starts { int at[WORKERS]; };  // of each worker's pieces

// The host writes these (Work in _wgrad.py): for each piece one Loads and two Sums.
struct alignas(16) Loads {
  int boxes[STRIPS];  // first column of each strip in a stage, * 2, + 1 if of dY; -1: not loaded
  int step, count;    // first step, number of steps
  int stride;         // between steps
  int unused;
};
struct alignas(16) Sums {
  int units, count;       // number of units of this half; number of steps
  Part part;
  int places, unused;     // the half's first Places; a unit has two
  uint2 operands[UNITS];  // low words of the descriptors of A and B in a stage at address 0
};
static_assert(UNITS % 2 == 0, "the host's rows of Sums have no padding");
struct alignas(16) Places { int at[8][4]; };  // position of each 8 x 8 in the values, / 8, or -1

// ---- consumers ----

// Start the products of a step.
__device__ __forceinline__ void wgmma_step(float (&d)[SUMS], const Pipeline& pipe,
                                           const uint2 (&operands)[UNITS]) {
  constexpr u32 STEP = 16 * ROW_BYTES >> 4;
  const u64 base = smem_descriptor(pipe.box(0), ROW_BYTES, 0);
  wgmma_fence();
  #pragma unroll
  for (u32 step = 0; step < DEPTH / 16; step++)
    #pragma unroll
    for (int u = 0; u < UNITS; u++)
      Wgmma<64, 1, 1>::multiply(d + 2 * u * UNIT, base + (operands[u].x + step * STEP),
                                base + (operands[u].y + step * STEP));
  wgmma_commit();
}

__device__ __forceinline__ void prefetch_l2(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(line));
}

// Return the places of a thread's two rows in 64 x 32 sums, each eight values of one 8 x 8.
__device__ __forceinline__ int2 places_of(const Places* places) {
  const int row = threadIdx.x / 32 % 4 * 2, column = threadIdx.x % 4;
  return {places->at[row][column], places->at[row + 1][column]};
}

// Store 64 x 32 sums, four times 64 x 8. A thread holds columns 2 * (thread % 4) and the next one,
// in row thread / 4 of its warp's 16 and in the row eight below.
__device__ __forceinline__ void store_sums(const float* s, char* values, int2 places, int width) {
  #pragma unroll
  for (int below = 0; below < 2; below++) {
    const int place = below ? places.y : places.x;
    u32 words[4];
    #pragma unroll
    for (int i = 0; i < 4; i++)
      words[i] = pack_pair(s[4 * i + 2 * below], s[4 * i + 2 * below + 1]);
    quad_transpose(words);
    char* to = values + 16LL * place + 2LL * (threadIdx.x % 32 / 4) * width;
    if (place >= 0)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                   :: "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
  }
}

// Multiply the pieces of a worker by one warpgroup.
__device__ __forceinline__ void consumer(const Sums* list, const Places* places, int begin, int end,
                                         Pipeline pipe, int half, char* values, int width,
                                         float* partials, u32* counters) {
  float d[SUMS];
  u32 before = 0;
  for (int at = begin; at < end; at++) {
    const Sums& mine = list[2 * at + half];
    const int quads = 2 * mine.units, thread = threadIdx.x % GROUP;
    if (thread < quads) prefetch_l2(places + mine.places + thread);
    uint2 operands[UNITS];
    #pragma unroll
    for (int u = 0; u < UNITS; u++) operands[u] = mine.operands[u];
    mainloop(d, pipe, __shfl_sync(~0u, mine.count, 0),
             [&] { wgmma_step(d, pipe, operands); });
    if (__shfl_sync(~0u, mine.part.of, 0) > 1) {
      before = store_partial(d, quads, partials, counters, mine.part, half);
    } else {
      int2 to[QUADS];
      #pragma unroll
      for (int q = 0; q < QUADS; q++)
        to[q] = q < quads ? places_of(places + mine.places + q) : int2{-1, -1};
      #pragma unroll
      for (int q = 0; q < QUADS; q++) store_sums(d + q * UNIT, values, to[q], width);
    }
  }
  for (int at = begin; at < end; at++) {
    const Sums& mine = list[2 * at + half];
    const auto store = [&](const float* total, int quad) {
      store_sums(total, values, places_of(places + mine.places + quad), width);
    };
    if (__shfl_sync(~0u, mine.part.of, 0) > 1)
      reduce_partials<SUMS>(partials, counters, before, mine.part, 2 * mine.units, half, store);
  }
}

// ---- the kernel: one worker per SM, each with a list of pieces ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sum_blocks(const __grid_constant__ Maps maps, const Loads* loads, const Sums* sums,
           const Places* places, const __grid_constant__ Starts starts, char* values, int width,
           float* partials, u32* counters) {
  extern __shared__ char shared[];
  __shared__ u64 full[Pipeline::STAGES], empty[Pipeline::STAGES];
  const u32 strips = (smem_address(shared) + 1023) & ~1023u;  // alignment for the swizzle
  Pipeline pipe{{strips}, {smem_address(full), smem_address(empty)}};
  if (threadIdx.x == 0) {
    pipe.init_barriers(PRODUCERS, 2);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0), warp = threadIdx.x / 32 % 4;
  const int begin = starts.at[blockIdx.x], end = starts.at[blockIdx.x + 1];
  if (group == 2) {
    setmaxnreg_dec<40>();
    pipe.phase = 1;  // at first, all stages are free
    if (threadIdx.x % 32 == 0) producer<Strip<Pipeline>>(maps, loads, begin, end, pipe, warp);
  } else {
    setmaxnreg_inc<232>();
    consumer(sums, places, begin, end, pipe, group, values, width, partials, counters);
  }
}
