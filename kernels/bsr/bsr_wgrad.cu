// dW = dY[m, n].T @ X[m, k] at W's stored blocks, by wgmma and TMA (Hopper).
//
//   work item: up to eight 64 x 64 tiles of W, all tokens      step: DEPTH tokens
//
//                dY.T                  X                              dW
//              tokens              x0   x1   x2   x3
//            +--------+          +----+----+----+----+         +----+----+----+----+
//   slice a  | dy0    |      x   | 64 columns each   |    =    | a0 | a1 | a2 | a3 |  half 0
//            +--------+          |    |    |    |    |         +----+----+----+----+
//   slice b  | dy1    |          +----+----+----+----+         | b0 | b1 | b2 | b3 |  half 1
//            +--------+                                        +----+----+----+----+
//
// Each of two warpgroups sums a half: a slice of 64 rows x four columns of 64, in 128 registers per
// thread. One m64n256k16 reads a tile of dY and four of X, which are neighbours in shared memory.
// With WIDE = 2 a half has two columns, and the instruction is m64n128k16. The halves may differ in
// slice and columns; they share the tiles that both read (items_of in bsr_wgrad.py).
//
//   stage: x0 x1 x2 x3 x4 x5 x6 dy0 dy1       half 0 reads four tiles of X from x0 on,
//          |--half 0-|          |   |         half 1 reads four from its own first tile on
//                |--half 1-|    0   1
//
// A half with fewer than four columns multiplies whatever is in their place and does not store it:
// a column of the product depends only on that column of X. Both operands are [DEPTH tokens x 64]
// and MN-major (imm-trans-a, imm-trans-b). The next 16 tokens are 16 rows, or 2048 bytes, further;
// SBO is 1024 bytes, and LBO is a tile. TMA reads zeros beyond m, n and k. They add nothing, and a
// block stores zeros outside W.
//
// If a block's sides are not multiples of 64, a tile of HEIGHT x WIDTH takes the place of one of
// 64 x 64, and the rest of the product is not stored. A box starts at a multiple of 16
// columns, so a tile of 40 or 56 may start eight columns later.
//
// The pipeline: 12 warps, and one CTA per SM for the whole launch.
//
//    warp 8     tiles 0, 4, 8 ---+    +---------+---------+-- --+     +--> warpgroup 0: half 0
//    warp 9     tiles 1, 5    ---+--> | stage 0 | stage 1 | ... | ----+
//    warp 10    tiles 2, 6    ---+    +---------+---------+-- --+     +--> warpgroup 1: half 1
//    warp 11    tiles 3, 7    ---+                                    |
//                 ^                 full: the bytes have landed ------+         |
//                 +---------------- empty: both warpgroups have released it <---+
//
// If there are few items, SMs would idle. So an item may be cut between workers (split-K): a piece
// is an item, or every second, third, ... of its steps. All workers then go through the tokens at
// the same pace and find in L2 what another loaded from memory. With ranges of tokens instead, dY
// and X were loaded from memory several times, and 90 % took 53 us (NOTES.md). A worker sums its
// pieces one after the other. A whole item goes from registers to the blocks: four lanes of a row
// transpose four 8 x 8 matrices, and each stores 16 bytes. split_k.cuh adds up pieces.
//
// Cost of a step of 64 tokens:
//    products  eight tiles of dW, 4.2 MFLOP: 700 ns of an SM at the 790 TFLOP/s that cuBLAS
//              reaches on an H200
//    loads     six tiles (two slices, four columns, as in blocks of 128), 48 KB: 735 ns at
//              8.8 TB/s, the rate of TMA from L2; nine tiles (nothing shared), 72 KB: 1100 ns
//
// Macros: HEIGHT, WIDTH=64|56|48|40 (of a tile) DEPTH=64|32 (tokens in a step) TILES=6|9 (in a
// stage) WIDE=4|2 (columns in a half), the other constants of bsr_wgrad.work_of and of _wgrad.py,
// and hopper.cuh's. Source: PTX ISA 9.0, wgmma (matrix descriptor, strides), mbarrier,
// cp.async.bulk.tensor, memory consistency model.

#include "tokens.cuh"

constexpr int ROW_BYTES = 128;
using Pipeline = Tokens<TILES, ROW_BYTES>;  // 4, 9 stages of six tiles; 3, 6 of nine
constexpr int SUMS = SIDE * SIDE * WIDE / GROUP;  // of a thread
constexpr int UNITS = SUMS / UNIT;

struct Tile {
  static __device__ __forceinline__ int column(int box) { return box & ~1; }
  static __device__ __forceinline__ int bytes(int box) {
    const int side = box & 1 ? HEIGHT : WIDTH;
    return DEPTH * 2 * (side + side % 16);
  }
};

// The host writes these (Work in _wgrad.py): for each piece one Loads and two Sums.
struct alignas(16) Loads {
  int boxes[BOXES];  // first column of each tile in a stage, + 1 if it is of dY; -1: not loaded
  int step, count;   // first step, number of steps
  int stride;        // between steps
};
struct alignas(16) Sums {
  int dy, x, count;      // the half's first tiles in a stage; number of steps
  int tiles;             // of dW: up to four; an empty half has none
  Part part;
  int out[4];            // position of each tile in the values and in its boxes (tiles_of)
};

// ---- consumers ----

// Start the products of a step.
__device__ __forceinline__ void wgmma_step(float (&d)[SUMS], const Pipeline& pipe, int dy, int x) {
  constexpr int STEP = 16 * ROW_BYTES >> 4;
  const u64 a = smem_descriptor(pipe.box(dy));
  const u64 b = smem_descriptor(pipe.box(x), ROW_BYTES, Pipeline::BOX_BYTES);
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < DEPTH / 16; i++)
    Wgmma<64 * WIDE, 1, 1>::multiply(d, a + i * STEP, b + i * STEP);
  wgmma_commit();
}

// Release the stages of a piece in which this half has no tiles. One thread waits for each stage,
// and the others wait for that thread: a thread that is a round ahead would misread the phase.
__device__ __forceinline__ void skip_piece(Pipeline& pipe, int count, int half) {
  for (; count > 0; count--) {
    if (threadIdx.x % GROUP == 0) pipe.consumer_wait();
    pipe.warpgroup_release(pipe.stage);
    pipe.advance();
  }
  warpgroup_sync(half + 1);
}

// Store a unit: four times 64 x 8 sums. A thread holds columns 2 * (thread % 4) and the next one,
// in row thread / 4 of its warp's 16 and in the row eight below.
__device__ __forceinline__ void store_unit(const float* s, char* values, int out, int unit,
                                           int width) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 4 - (out >> 1 & 1) * 8;
  const int column = unit % 2 * 32 + lane % 4 * 8 - (out & 1) * 8;
  char* to = values + 2 * ((out >> 2) * 8LL + (long long)row * width + column);
  #pragma unroll
  for (int below = 0; below < 2; below++, to += 16LL * width) {
    u32 words[4];
    #pragma unroll
    for (int i = 0; i < 4; i++)
      words[i] = pack_pair(s[4 * i + 2 * below], s[4 * i + 2 * below + 1]);
    quad_transpose(words);
    if ((u32)(row + 8 * below) >= HEIGHT || (u32)column >= WIDTH) continue;  // outside the tile
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
}

// Multiply the pieces of a worker by one warpgroup. It reads the next piece's Sums meanwhile.
__device__ __forceinline__ void consumer(const Sums* list, int begin, int end, Pipeline pipe,
                                         int half, char* values, int width, float* partials,
                                         u32* counters) {
  float d[SUMS];
  u32 before = 0;
  Sums sums = list[2 * begin + half];
  for (int at = begin; at < end; at++) {
    const Sums next = list[2 * (at + 1) + half];
    const int count = __shfl_sync(~0u, sums.count, 0), tiles = __shfl_sync(~0u, sums.tiles, 0);
    if (tiles == 0) {
      skip_piece(pipe, count, half);
    } else {
      mainloop(d, pipe, count, [&] { wgmma_step(d, pipe, sums.dy, sums.x); });
      if (__shfl_sync(~0u, sums.part.of, 0) > 1) {
        const int units = UNITS / WIDE * sums.tiles;
        before = store_partial(d, units, partials, counters, sums.part, half);
      } else {
        #pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
          const int tile = unit / (UNITS / WIDE);
          if (tile < tiles) store_unit(d + unit * UNIT, values, sums.out[tile], unit, width);
        }
      }
    }
    sums = next;
  }
  for (int at = begin; at < end; at++) {
    const Sums& mine = list[2 * at + half];
    const auto store = [&](const float* total, int unit) {
      store_unit(total, values, mine.out[unit / (UNITS / WIDE)], unit, width);
    };
    const int units = UNITS / WIDE * __shfl_sync(~0u, mine.tiles, 0);
    if (units && __shfl_sync(~0u, mine.part.of, 0) > 1)
      reduce_partials<SUMS>(partials, counters, before, mine.part, units, half, store);
  }
}

// ---- the kernel: one worker per SM, each with a list of pieces ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sum_blocks(const __grid_constant__ Maps maps, const Loads* loads, const Sums* sums,
           const int* starts, char* values, int width, float* partials, u32* counters) {
  extern __shared__ char shared[];
  __shared__ u64 full[Pipeline::STAGES], empty[Pipeline::STAGES];
  const u32 tiles = (smem_address(shared) + 1023) & ~1023u;  // alignment for the swizzle
  Pipeline pipe{{tiles}, {smem_address(full), smem_address(empty)}};
  if (threadIdx.x == 0) {
    pipe.init_barriers(PRODUCERS, 2);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0), warp = threadIdx.x / 32 % 4;
  const int begin = __shfl_sync(~0u, starts[blockIdx.x], 0);
  const int end = __shfl_sync(~0u, starts[blockIdx.x + 1], 0);
  if (group == 2) {
    setmaxnreg_dec<56>();
    pipe.phase = 1;  // at first, all stages are free
    if (threadIdx.x % 32 == 0) producer<Tile>(maps, loads, begin, end, pipe, warp);
  } else {
    setmaxnreg_inc<224>();
    consumer(sums, begin, end, pipe, group, values, width, partials, counters);
  }
}
