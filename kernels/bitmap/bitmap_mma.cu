// Y[m, n] = X[m, k] @ W[n, k].T, W with zeros anywhere (formats/bitmap.py), for few tokens.
// W is loaded as records and decoded into the registers of the tensor core (mma.sync).
//
//   A CTA has some rows of tiles of W, 16 features each: ROW_WARPS x GROUP of them at a time. It has
//   ROW_WARPS x PARTS warps and one that loads X. The PARTS divide k: part p has the tiles p,
//   p + PARTS, ... With GROUP = 1, ROW_WARPS = 3, PARTS = 2:
//
//        W                                                X.T
//        +--------+--------+--------+--------+- ...       +------+   a step of X: PARTS tiles,
//        | warp 0 | warp 3 | warp 0 | warp 3 |            | 256  |   in a ring of X_STAGES that
//        | 16x256 |        |        |        |            | rows |   all warps share
//        +--------+--------+--------+--------+- ...       +------+
//        | warp 1 | warp 4 | ...                     x    |      |  =  Y.T
//        +--------+--------+- ...                         +------+
//        | warp 2 | warp 5 | ...                          | ...  |
//        +--------+--------+- ...                         +------+
//
//   Each warp has a ring of STAGES x GROUP records, which its own lanes fill by bulk copies. At the
//   end parts 1 and on give their sums to part 0 through shared memory, always added in the same
//   order, so equal inputs give equal bits.
//
//   With SPLIT the CTAs of a cluster have the same rows and divide k first: CTA c has parts c PARTS
//   to c PARTS + PARTS - 1 of SPLIT x PARTS, so it reads 1 / SPLIT of X. At the end CTA 0 receives
//   the sums of the others by st_async and adds them in order. A CTA then has one block of rows.
//
// W is operand A: 16 features x 16 columns of k. Lane 4 g + q holds rows g and g + 8. Its columns
// are 8 q .. 8 q + 7 of each strip of 32, four of them per instruction, so it reads its part of X.T
// as 8 columns of token g. (The order of k within an instruction is free.)
//
// records.cuh draws the decode.
//
// Macros from bitmap_mma.py: TOKENS=8|16|32|64, GROUP, ROW_WARPS, PARTS, STAGES, X_STAGES, SPLIT,
// TABLE=0|1 (the decode without a table is described below), VALUE_BYTES=2|1, and FP16=0|1, the type
// that the tensor core multiplies (0 is bf16; 1 also for fp8, whose Y is bf16).

#include "records.cuh"

constexpr int NB = TOKENS / 8;
constexpr int THREADS = 32 * (WARPS + 1), BARRIERS = WARPS * STAGES + 2 * X_STAGES + 1;
constexpr int BARRIER_BYTES = (8 * BARRIERS + 15) / 16 * 16;
constexpr int OF_PART = ROW_WARPS * GROUP * NB * 32;  // sums of a part, of 16 bytes
constexpr int CLUSTER_BYTES = (SPLIT - 1) * OF_PART * 16;
// The pitch of rows of X is a multiple of 128 bytes plus a quarter or a half of that, so that lanes
// that read together hit all banks.
constexpr int X_ROW = COLUMNS * VALUE_BYTES, X_STEP = X_ROW + 32 * VALUE_BYTES;
#if VALUE_BYTES == 2
using Piece = uint4;  // 8 columns of X
#else
using Piece = uint2;
#endif

// ---- X ----

// Writes zeros if not `there`.
__device__ __forceinline__ void copy_16(u32 to, const char* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Arrive on a barrier when all copies of this thread so far have landed.
__device__ __forceinline__ void cp_async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void fence_mbarrier_init() {  // for the other CTAs of the cluster
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// B of two instructions: a lane's 8 columns of X in a strip.
__device__ __forceinline__ uint4 load_b(u32 address) {
#if VALUE_BYTES == 2
  return load_128(address);
#else
  const uint2 x = load_64(address);
  uint4 b;
  widen(b.x, b.y, x.x), widen(b.z, b.w, x.y);
  return b;
#endif
}

// The warp that loads X: all steps of all blocks, into a ring that the other warps empty together.
// One instruction of the warp copies a row of a tile, 32 pieces of 16 bytes, or two rows in fp8.
// (Bulk copies of 512 bytes took 75 clocks each.) Past the end of X it writes zeros.
__device__ __forceinline__ void load_x(const Activations& x, int total, int first_part, int first,
                                       int tokens, int steps, u32 ring, u32 full) {
  constexpr int PIECES = X_ROW / 16, AT_ONCE = 32 / PIECES;
  const int lane = threadIdx.x % 32;
  const int piece = lane % PIECES, columns = 16 / VALUE_BYTES;
  const u32 empty = full + 8 * X_STAGES, stage_bytes = PARTS * tokens * X_STEP;
  int stage = 0, parity = 0;
  for (int i = 0, step = 0; i < steps; i++, step = step + 1 == total ? 0 : step + 1) {
    if (i >= X_STAGES) mbarrier_wait(empty + 8 * stage, parity ^ 1, "X is read");
    for (int part = 0; part < PARTS; part++) {
      const int column = (step * ALL_PARTS + first_part + part) * COLUMNS + piece * columns;
      const bool there = column < x.k;
      const char* from = x.x + (u64)first * x.stride + (there ? (u64)column * VALUE_BYTES : 0);
      const u32 to = ring + stage * stage_bytes + part * tokens * X_STEP + piece * 16;
      #pragma unroll 4
      for (int token = lane / PIECES; token < tokens; token += AT_ONCE)
        copy_16(to + token * X_STEP, from + token * x.stride, there);
    }
    cp_async_arrive(full + 8 * stage);
    if (++stage == X_STAGES) stage = 0, parity ^= 1;
  }
  cp_async_commit();  // no thread may end before its copies
  cp_async_wait<0>();
}

// ---- the kernel ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if SPLIT > 1
__cluster_dims__(SPLIT)
#endif
multiply_records(const __grid_constant__ Activations x, const __grid_constant__ Weights w, u16* y,
                 int n, int room) {
  extern __shared__ __align__(128) char shared[];
  const u32 table = smem_address(shared), records_full = table + TABLE_BYTES;
  const u32 x_full = records_full + 8 * WARPS * STAGES, x_empty = x_full + 8 * X_STAGES;
  const u32 received = x_empty + 8 * X_STAGES;
  float4* sums = (float4*)(shared + TABLE_BYTES + BARRIER_BYTES);
  float4* of_others = sums + (PARTS - 1) * OF_PART;
  const u32 x_ring = smem_address(of_others) + CLUSTER_BYTES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % SPLIT, cluster = blockIdx.x / SPLIT;
  const Range range = rows_of(cluster % w.workers, w);
  const int first = cluster / w.workers * TOKENS;
  const int tokens = x.m - first < TOKENS ? x.m - first : TOKENS;
  const int steps = (w.tiles + ALL_PARTS - 1) / ALL_PARTS;
  const int blocks = (range.last - range.first + BLOCK - 1) / BLOCK;
  const int part = warp / ROW_WARPS, of_all = rank * PARTS + part, own = warp % ROW_WARPS * GROUP;  // rows of tiles in a block
  const u32 x_bytes = PARTS * tokens * X_STEP, full = records_full + 8 * STAGES * warp;
  const u32 ring = x_ring + X_STAGES * x_bytes + warp * STAGES * GROUP * room;
  Loader loader(w, ring, full, of_all, range.first + own, range.last, blocks, room);
#if TABLE
  if (threadIdx.x < 16) ((Entry*)shared)[threadIdx.x] = entry_of(threadIdx.x);
#endif
  if (threadIdx.x == 0) {
    for (int i = 0; i < WARPS * STAGES; i++) mbarrier_init(records_full + 8 * i, GROUP);
    for (int i = 0; i < X_STAGES; i++) {
      mbarrier_init(x_full + 8 * i, 32);
      mbarrier_init(x_empty + 8 * i, WARPS);
    }
    if (SPLIT > 1) {
      mbarrier_init(received, 1);
      if (rank == 0) mbarrier_arrive_expect_tx(received, CLUSTER_BYTES);
      fence_mbarrier_init();
    }
  }
  fence_proxy_async();
  __syncthreads();

  if (warp == WARPS) {
    if (SPLIT > 1) cluster_sync_relaxed();
    return load_x(x, steps, rank * PARTS, first, tokens, blocks * steps, x_ring, x_full);
  }
  for (int i = 0; i < STAGES; i++) loader.load(w);
  if (SPLIT > 1) cluster_sync_relaxed();  // all mbarriers are initialised
  const u32 x_at = x_ring + (part * tokens + lane / 4) * X_STEP + lane % 4 * 8 * VALUE_BYTES;
  // A lane's part of X. Past the last token it reads another token, whose sums are not written. With
  // many sums two instructions are decoded ahead, and little of X is kept, to save registers.
  constexpr int AHEAD = NB * GROUP > 8 ? 2 : 1, B_KEPT = AHEAD == 2 ? 2 : NB;
  uint4 b[B_KEPT] = {};
  int stage = 0, parity = 0, x_stage = 0, x_parity = 0;
  for (int row = range.first; row < range.last; row += BLOCK) {
    float d[GROUP][NB][4] = {};
    for (int step = 0; step < steps; step++) {
      const int have = range.last - row - own;  // rows of tiles of this warp
      const bool busy = have > 0 && step * ALL_PARTS + of_all < w.tiles;
      Stream streams[GROUP];
      u32 bits_at[GROUP];
      if (busy) {
        mbarrier_wait(full + 8 * stage, parity, "records");
        #pragma unroll
        for (int r = 0; r < GROUP; r++) {
          const u32 record = ring + (stage * GROUP + r) * room;
          bits_at[r] = record + 4 * lane;
          streams[r] = stream_at(r < have ? join_tail(record) : record);
        }
      }
      mbarrier_wait(x_full + 8 * x_stage, x_parity, "X");
      if (busy) {
        #pragma unroll 1
        for (int pair = 0; pair < STRIPS / 2; pair++) {
          const u32 x_now = x_at + x_stage * x_bytes + pair * 64 * VALUE_BYTES;
          Word words[GROUP];
          #pragma unroll
          for (int r = 0; r < GROUP; r++)
            words[r] = word_of(r < have ? load_32(bits_at[r] + 128 * pair) : 0);
          #pragma unroll
          for (int at = 0; at < 4; at += AHEAD) {
            const u32 x_strip = x_now + at / 2 * 32 * VALUE_BYTES;
            auto load_x = [&](int j) {
              if (lane / 4 + 8 * j < tokens) b[j % B_KEPT] = load_b(x_strip + 8 * j * X_STEP);
            };
            if (AHEAD == 1 && at % 2 == 0)
              #pragma unroll
              for (int j = 0; j < NB; j++) load_x(j);
            u32 a[AHEAD][GROUP][4];
            #pragma unroll
            for (int i = 0; i < AHEAD * GROUP; i++)
              decode(a[i / GROUP][i % GROUP], streams[i % GROUP], words[i % GROUP], at + i / GROUP,
                     table);
            #pragma unroll
            for (int j = 0; j < NB; j++) {
              if (AHEAD == 2) load_x(j);
              const uint4& own = b[j % B_KEPT];
              #pragma unroll
              for (int i = 0; i < AHEAD * GROUP; i++) {
                const bool first = (at + i / GROUP) % 2 == 0;
                mma_m16n8k16(d[i % GROUP][j], a[i / GROUP][i % GROUP], first ? own.x : own.z,
                             first ? own.y : own.w);
              }
            }
          }
          #pragma unroll
          for (int r = 0; r < GROUP; r++) pass(streams[r], words[r]);
        }
        fence_proxy_async();
        __syncwarp();
        loader.load(w);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      if (lane == 0) mbarrier_arrive(x_empty + 8 * x_stage);
      if (++x_stage == X_STAGES) x_stage = 0, x_parity ^= 1;
    }

    // ---- the sums of the parts, and Y ----
    const int at = warp % ROW_WARPS * GROUP * NB * 32 + lane;
    float4* mine = sums + at;
    if (PARTS > 1) {
      if (part > 0)
        #pragma unroll
        for (int i = 0; i < GROUP * NB; i++) {
          const float* s = d[i / NB][i % NB];
          mine[(part - 1) * OF_PART + i * 32] = float4{s[0], s[1], s[2], s[3]};
        }
      multiplying_warps_sync();
    }
    if (SPLIT > 1 && part == 0 && rank == 0) mbarrier_wait(received, 0, "sums of the others");
    if (part == 0)
      #pragma unroll
      for (int i = 0; i < GROUP * NB; i++) {
        float* s = d[i / NB][i % NB];
        for (int p = 0; p < PARTS - 1; p++) add(s, mine[p * OF_PART + i * 32]);
        if (SPLIT > 1 && rank > 0) {
          const u32 to = smem_address(of_others + (rank - 1) * OF_PART + at + i * 32);
          st_async(map_shared_rank(to, 0), float4{s[0], s[1], s[2], s[3]},
                   map_shared_rank(received, 0));
          continue;
        }
        for (int c = 0; c < SPLIT - 1; c++) add(s, of_others[c * OF_PART + at + i * 32]);
        #pragma unroll
        for (int e = 0; e < 4; e++) {
          const int token = i % NB * 8 + lane % 4 * 2 + e % 2, tile = row + own + i / NB;
          const int feature = tile * ROWS + lane / 4 + e / 2 * 8;
          if (token < tokens && tile < range.last && feature < n)
            y[(u64)(first + token) * n + feature] = rounded(s[e]);
        }
      }
    if (PARTS > 1) multiplying_warps_sync();
  }
}
