// dW = dY[m, n].T @ X[m, k] at W's stored blocks of 16 x 16, by mma.sync and TMA (Hopper).
//
//   strip   32 columns of dY or of X: two block rows, or two block columns of W
//   item    the blocks of W in some strips of dY x some strips of X; all tokens, or every second,
//           third, ... step of them (split_k.cuh)
//   slot    a block of a warp: 8 sums per thread. A warp has SLOTS of them, by block rows
//
// bsr_wgrad_small.cu multiplies cells of 32 x 32 by wgmma, of which blocks of 16 fill a quarter to
// a third. Here a block costs what it has: per 16 tokens one ldmatrix of X (512 bytes) and two
// m16n8k16; dY's fragment stays in registers for a warp's next block of the same block row.
//
// Clocks of an SM for a block and 16 tokens: shared memory 4 + 4 / (blocks of a row of a warp), and
// half a clock for each strip that TMA writes; mma.sync 3.3 at 0.62 of the tensor cores' rate.
//
// A strip is [DEPTH tokens x 32], rows of 64 bytes, swizzled. ldmatrix.trans turns tokens x columns
// into the columns x tokens that mma wants of both operands. In X, it takes the two matrices of eight
// columns first: an mma wants them in a pair of registers, and another order costs four moves.
//
// Macros: DEPTH=16|32 SLOTS (even) STRIPS (room in a stage, a multiple of 4), THREADS,
// RING_BYTES, WORKERS, HELD=0|1 (1 where products take longer than loads), FP16=0|1.
// Source: PTX ISA 9.0, mma.m16n8k16, ldmatrix.

#include "tokens.cuh"
#include "mma.cuh"

constexpr int WIDTH = 32, ROW_BYTES = 2 * WIDTH, WARPS = 8;
using Pipeline = Tokens<STRIPS, ROW_BYTES>;
constexpr int SUMS = 8 * SLOTS;  // of a thread
constexpr int EACH = HELD ? DEPTH / 16 : 1;       // times 16 tokens that a slot multiplies at once
constexpr int ALWAYS = HELD ? SLOTS - 4 : SLOTS;  // slots that load X even if they have no block

struct Starts { int at[WORKERS]; };  // of each worker's pieces

// The host writes these: for each piece one Loads and one Sums, for each item WARPS x SLOTS Slots.
struct alignas(16) Loads {
  int boxes[STRIPS];  // first column of each strip in a stage, * 2, + 1 if of dY; -1: not loaded
  int step, count;    // first step, number of steps
  int stride;         // between steps
  int unused;
};
struct alignas(16) Sums { int item, count; Part part; int unused[2]; };
struct alignas(16) Slot {
  int dy, x;  // offset of the strip in a stage, + 32 for its second half
  int block;  // number of the block, or -1
  int fresh;  // whether dY's fragment differs from that of the slot before
};
static_assert(SLOTS % 2 == 0, "a unit of split_k.cuh is two slots");

// ---- consumers ----

// As ldmatrix_x4_trans; keeps v unless `load`, without a branch.
__device__ __forceinline__ void ldmatrix_x4_trans_if(u32 (&v)[4], u32 address, u32 load) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
               "@p ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3]) : "r"(address), "r"(load)
               : "memory");
}

// Multiply a step. d[SLOTS][2][4]: a block's two m16n8 tiles. With HELD, a slot multiplies all tokens
// of the step, so a warp waits for dY once per row, and slots from ALWAYS on load X if `there` has
// their bit.
__device__ __forceinline__ void multiply(float (&d)[SUMS], u32 base, const u32 (&dy)[SLOTS],
                                         const u32 (&x)[SLOTS], u32 fresh, u32 there) {
  u32 a[EACH][4] = {}, b[2][EACH][4];
  #pragma unroll
  for (int first = 0; first < DEPTH / 16; first += EACH) {
    #pragma unroll
    for (int k = 0; k < EACH; k++)
      ldmatrix_x4_trans(b[0][k], base + x[0] + (first + k) * 16 * ROW_BYTES);
    #pragma unroll
    for (int j = 0; j < SLOTS; j++) {
      const int next = j + 1;
      #pragma unroll
      for (int k = 0; k < EACH; k++)
        ldmatrix_x4_trans_if(a[k], base + dy[j] + (first + k) * 16 * ROW_BYTES, fresh & 1u << j);
      #pragma unroll
      for (int k = 0; k < EACH; k++) {
        const int row = (first + k) * 16 * ROW_BYTES;
        if (next < ALWAYS)
          ldmatrix_x4_trans(b[next % 2][k], base + x[next] + row);
        else if (next < SLOTS)
          ldmatrix_x4_trans_if(b[next % 2][k], base + x[next] + row, there & 1u << next);
      }
      // Otherwise ptxas moves the loads behind the products, to need one buffer less.
      if (HELD) __syncwarp();
      #pragma unroll
      for (int k = 0; k < EACH; k++) {
        const u32 (&now)[4] = b[j % 2][k];
        mma_m16n8k16(*(float(*)[4])(d + 8 * j), a[k], now[0], now[1]);
        mma_m16n8k16(*(float(*)[4])(d + 8 * j + 4), a[k], now[2], now[3]);
      }
    }
  }
}

// Store a block. Lane 4 g + q has columns 2 q and 2 q + 1 of rows g and g + 8 of both halves.
__device__ __forceinline__ void store_block(const float* s, char* values, int block) {
  const int lane = threadIdx.x % 32, q = lane % 4;
  u32 words[4] = {pack_pair(s[0], s[1]), pack_pair(s[4], s[5]), pack_pair(s[2], s[3]),
                  pack_pair(s[6], s[7])};
  quad_transpose(words);
  char* to = values + 512LL * block + (q / 2 * 8 + lane / 4) * 32 + q % 2 * 16;
  if (block >= 0)
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// Return the offset in a strip of the first or second half of a token's first 16 columns.
__device__ __forceinline__ u32 place_of(int token, int half) {
  return token * ROW_BYTES + ((half ^ token / 2 % 4) << 4);
}

__device__ __forceinline__ void consumer(const Sums* list, const Slot* slots, int begin, int end,
                                         Pipeline pipe, char* values, float* partials,
                                         u32* counters) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const u32 place_dy = place_of(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const u32 place_x = place_of(lane % 16, lane / 16);
  float d[SUMS];
  u32 before = 0;
  for (int at = begin; at < end; at++) {
    const Slot* mine = slots + (list[at].item * WARPS + warp) * SLOTS;
    u32 dy[SLOTS], x[SLOTS], fresh = 0, there = 0;
    #pragma unroll
    for (int j = 0; j < SLOTS; j++) {
      dy[j] = (mine[j].dy & ~63) + (place_dy ^ (mine[j].dy & 32));
      x[j] = (mine[j].x & ~63) + (place_x ^ (mine[j].x & 32));
      fresh |= mine[j].fresh << j;
      there |= (mine[j].block >= 0) << j;
      // Otherwise ptxas computes the addresses again in every step.
      if (HELD) asm volatile("" : "+r"(dy[j]), "+r"(x[j]));
    }
    #pragma unroll
    for (int i = 0; i < SUMS; i++) d[i] = 0.f;
    for (int left = __shfl_sync(~0u, list[at].count, 0); left > 0; left--) {
      pipe.consumer_wait();
      multiply(d, pipe.box(0), dy, x, fresh, there);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(pipe.empty_barrier());
      pipe.advance();
    }
    if (__shfl_sync(~0u, list[at].part.of, 0) > 1) {
      before = store_partial(d, SLOTS / 2, partials, counters, list[at].part, warp / 4);
    } else {
      #pragma unroll
      for (int j = 0; j < SLOTS; j++) store_block(d + 8 * j, values, mine[j].block);
    }
  }
  for (int at = begin; at < end; at++) {
    const Slot* mine = slots + (list[at].item * WARPS + warp) * SLOTS;
    const auto store = [&](const float* total, int unit) {
      store_block(total, values, mine[2 * unit].block);
      store_block(total + 8, values, mine[2 * unit + 1].block);
    };
    if (__shfl_sync(~0u, list[at].part.of, 0) > 1)
      reduce_partials<SUMS>(partials, counters, before, list[at].part, SLOTS / 2, warp / 4, store);
  }
}

// ---- the kernel: one worker per SM, each with a list of pieces ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sum_blocks(const __grid_constant__ Maps maps, const Loads* loads, const Sums* sums,
           const Slot* slots, const __grid_constant__ Starts starts, char* values, float* partials,
           u32* counters) {
  extern __shared__ char shared[];
  __shared__ u64 full[Pipeline::STAGES], empty[Pipeline::STAGES];
  const u32 strips = (smem_address(shared) + 1023) & ~1023u;  // alignment for the swizzle
  Pipeline pipe{{strips}, {smem_address(full), smem_address(empty)}};
  if (threadIdx.x == 0) {
    pipe.init_barriers(PRODUCERS, WARPS);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0), warp = threadIdx.x / 32 % 4;
  const int begin = starts.at[blockIdx.x], end = starts.at[blockIdx.x + 1];
  if (group == 2) {
    setmaxnreg_dec<72>();
    pipe.phase = 1;  // at first, all stages are free
    if (threadIdx.x % 32 == 0) producer<Strip<Pipeline>>(maps, loads, begin, end, pipe, warp);
  } else {
    setmaxnreg_inc<216>();
    consumer(sums, slots, begin, end, pipe, values, partials, counters);
  }
}
