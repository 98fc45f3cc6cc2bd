// Y[m, n] = X[m, k] @ W[n, k].T for W in blocks below 64, by wgmma with X in registers, and TMA
// (Hopper). dX = dY @ W is the same product over the transposed pattern.
//
//   work item: TOKENS tokens x 2 x ROWS rows of tiles    step: up to STRIPS strips, 32 of k each
//
//        X, strips                W, the tiles of these rows there      sums, in registers
//       0 | 1    2 | 3  (places)    0    1    2    3
//      +--------+--------+ ..     [ ]  [ ]                row 0            row 0    row 1  ...
//      | 64     |        |             [ ]       [ ]      row 1          +--------+--------+ ..
//      | tokens |        |   x     ...                           +=      | 64 x   |        |
//      +--------+--------+ ..     [ ]       [ ]           last row       | HEIGHT |        |
//      | 64     |        |                                               +--------+--------+ ..
//      +--------+--------+ ..     tile: HEIGHT features x 16 of k
//
// A product m64nHk16 takes HEIGHT / 2 clocks of the tensor cores. If both operands are in shared
// memory, its 2 KB of X take 16 clocks, so blocks of 16 run at a third of the rate. Here a warpgroup
// loads the X of a place once, by ldmatrix, and multiplies it by the tiles of all its rows there.
// Clocks of shared memory for a product and both warpgroups, d the stored part:
//
//    X 16 / (ROWS d)    W HEIGHT / 4    written by TMA: (X 16 + W 2 HEIGHT ROWS d) / (4 ROWS d)
//
//   W      tiles as the host packs them, without swizzle: 8 x 8 elements are 128 contiguous bytes
//   note   per warpgroup: a byte for each place, with a bit for each row that has a tile there
//
// With CLUSTER = 2, two CTAs multiply the same tiles by different tokens. Each loads half of the
// tiles of a step, for both.
//
// The pipeline is that of bsr_small.cu (strips.cuh): warps 0 and 1 of the producers load strips,
// warp 2 tiles, warp 3 writes the note.
//
// Macros: HEIGHT=16..96 (multiples of 8) TOKENS=64|128|256 ROWS=1..8 UNIT (rows that are stored
// together) CLUSTER=1|2 WARPGROUPS=2 STRIPS=2|4 ROOM (KB of tiles in a step), the rest of
// bsr_fragments.constants_of, and hopper.cuh's. Source: PTX ISA 9.0, wgmma, register fragments.

#include "strips.cuh"
#include "mma.cuh"

constexpr int TILES = TOKENS / 64, PIECES = HEIGHT / 8;  // of 64 tokens; of 8 features
constexpr int STRIP_BYTES = TOKENS * 64, TILE_BYTES = HEIGHT * 32;
constexpr int PLACES = 2 * STRIPS;            // of a step
constexpr unsigned short ALL = (1 << CLUSTER) - 1;  // mask of CTAs
using Pipeline = Strips<STRIP_BYTES, ROOM * 1024>;
// TMA takes longer for a row beyond X than for one that it reads. So the last tile of tokens has
// boxes of its own, `tail`, as high as it has tokens.
struct Maps { TensorMap x, tail; };

// ---- instructions ----

// d[64 x N] += x[64 x 16] w[16 x N]: WGMMA of hopper.cuh with x in registers, as ldmatrix loads it.
#define X_AND_W_16 "{%8, %9, %10, %11}, %12"
#define X_AND_W_24 "{%12, %13, %14, %15}, %16"
#define X_AND_W_32 "{%16, %17, %18, %19}, %20"
#define X_AND_W_40 "{%20, %21, %22, %23}, %24"
#define X_AND_W_48 "{%24, %25, %26, %27}, %28"
#define X_AND_W_56 "{%28, %29, %30, %31}, %32"
#define X_AND_W_64 "{%32, %33, %34, %35}, %36"
#define X_AND_W_72 "{%36, %37, %38, %39}, %40"
#define X_AND_W_80 "{%40, %41, %42, %43}, %44"
#define X_AND_W_88 "{%44, %45, %46, %47}, %48"
#define X_AND_W_96 "{%48, %49, %50, %51}, %52"
#define WGMMA_REGISTERS_(N, x, w)                                                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" SUM_##N "}, " \
               X_AND_W_##N ", 1, 1, 1, 0;"                                                      \
               : D_##N : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(w))
#define WGMMA_REGISTERS(N, x, w) WGMMA_REGISTERS_(N, x, w)

// Copy into every CTA of the mask `ctas`, at the same address, counted by each CTA's barrier.
__device__ __forceinline__ void bulk_load_multicast(unsigned short ctas, u32 to, const void* from,
                                                    int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1], %2, [%3], %4;"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(ctas) : "memory");
}

// ---- producers ----

__device__ __forceinline__ void load_w(const char* w, const Pipeline& pipe, const Step& step,
                                       int rank) {
  mbarrier_arrive_expect_tx(pipe.full_barrier(), step.blocks * TILE_BYTES);
  const int first = step.blocks * rank / CLUSTER, end = step.blocks * (rank + 1) / CLUSTER;
  const int bytes = (end - first) * TILE_BYTES;
  const char* from = w + (u64)(step.first + first) * TILE_BYTES;
  const u32 to = pipe.w() + first * TILE_BYTES;
  if (!bytes) return;
  if constexpr (CLUSTER > 1) bulk_load_multicast(ALL, to, from, bytes, pipe.full_barrier());
  else bulk_load(to, from, bytes, pipe.full_barrier());
}

// Load every second strip, starting with `first`.
__device__ __forceinline__ void load_x(const Maps& maps, const Pipeline& pipe, const Step& step,
                                       int first, int token, int m) {
  const int tokens = min(max(m - token, 0), TOKENS);
  const TensorMap& x = tokens == TOKENS ? maps.x : maps.tail;
  int strips[2], bytes = 0;
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const int at = first + 2 * i;
    strips[i] = at < STRIPS && tokens ? (int)(step.strips >> 16 * at & 0xffff) : NO_STRIP;
    bytes += strips[i] != NO_STRIP ? tokens * 64 : 0;
  }
  mbarrier_arrive_expect_tx(pipe.full_barrier(), bytes);
  #pragma unroll
  for (int i = 0; i < 2; i++)
    if (strips[i] != NO_STRIP)
      tma_load(pipe.x() + (first + 2 * i) * STRIP_BYTES, &x, strips[i] * 32, token,
               pipe.full_barrier());
}

// Lane j of each warp loads steps j, j + 32, ... It reads step j + 32 of the list meanwhile.
__device__ __forceinline__ void producer(const Maps& x, const char* w, const Step* steps,
                                         int at, int end, Pipeline pipe, int warp, int m) {
  const int lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
  Step mine = steps[at + lane];
  for (; at < end; at += 32) {
    const Step ahead = steps[at + 32 + lane];
    const int count = min(32, end - at);
    for (int i = 0; i < count; i++) {
      if (lane == i) {
        pipe.producer_acquire();
        if (warp < 2) load_x(x, pipe, mine, warp, mine.token + rank * TOKENS, m);
        else if (warp == 2) load_w(w, pipe, mine, rank);
        else write_note(pipe, mine);
      }
      __syncwarp();
      pipe.advance();
    }
    mine = ahead;
  }
}

// ---- consumers ----

using Sums = float[ROWS][TILES][HEIGHT / 2];
using Fragments = u32[TOGETHER][TILES][4];  // X at TOGETHER places, as wgmma's A

__device__ __forceinline__ void wgmma_k16(float (&d)[HEIGHT / 2], const u32 (&x)[4], u64 w) {
  WGMMA_REGISTERS(HEIGHT, x, w);
}

// Load X at places `place`, `place` + 1, ... A lane's address in a strip is `strips`.
__device__ __forceinline__ void load_fragments(Fragments& x, u32 strips, int place) {
  #pragma unroll
  for (int i = 0; i < TOGETHER; i++)
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      ldmatrix_x4(x[i][t], (strips + (place + i) / 2 * STRIP_BYTES + t * 64 * 64) ^
                               (place + i) % 2 * 32);
}

// Start the products of rows FIRST, FIRST + 1, ... that are in the mask MINE. The tiles begin at `w`.
template <int FIRST, u32 MINE>
__device__ __forceinline__ void wgmma_rows(Sums& sums, const u32 (&x)[TILES][4], u32& w) {
  constexpr u64 STRIDES = (u64)(HEIGHT * 16 >> 4) << 16 | (u64)(128 >> 4) << 32;
  wgmma_fence();
  #pragma unroll
  for (int j = 0; j < 4 && FIRST + j < ROWS; j++)
    if (MINE >> j & 1) {
      #pragma unroll
      for (int t = 0; t < TILES; t++) wgmma_k16(sums[FIRST + j][t], x[t], STRIDES | w);
      w += TILE_BYTES >> 4;
    }
}

// The same for a mask from memory: one jump for four rows, where a branch for each takes longer than
// its products.
template <int FIRST>
__device__ __forceinline__ void wgmma_four(Sums& sums, const u32 (&x)[TILES][4], u32 rows, u32& w) {
#define ROWS_(mask) case mask: wgmma_rows<FIRST, mask>(sums, x, w); break;
#if !SWITCH
  #pragma unroll
  for (int j = 0; j < 4 && FIRST + j < ROWS; j++)
    if (rows >> j & 1) {
      constexpr u64 STRIDES = (u64)(HEIGHT * 16 >> 4) << 16 | (u64)(128 >> 4) << 32;
      wgmma_fence();
      #pragma unroll
      for (int t = 0; t < TILES; t++) wgmma_k16(sums[FIRST + j][t], x[t], STRIDES | w);
      w += TILE_BYTES >> 4;
    }
  return;
#endif
  switch (rows & 15) {
    ROWS_(1) ROWS_(2) ROWS_(3) ROWS_(4) ROWS_(5) ROWS_(6) ROWS_(7) ROWS_(8)
    ROWS_(9) ROWS_(10) ROWS_(11) ROWS_(12) ROWS_(13) ROWS_(14) ROWS_(15)
    default: break;
  }
#undef ROWS_
}

// Start the products at TOGETHER places. The next tile of W is at `w`.
__device__ __forceinline__ void wgmma_places(Sums& sums, const Fragments& x, u32 rows, u32& w) {
  #pragma unroll
  for (int i = 0; i < TOGETHER; i++) {
    wgmma_four<0>(sums, x[i], rows >> 8 * i, w);
    if constexpr (ROWS > 4) wgmma_four<4>(sums, x[i], rows >> 8 * i + 4, w);
  }
  wgmma_fence();
  wgmma_commit();
}

__device__ __forceinline__ void release(const Pipeline& pipe, int stage) {  // by each warp
  if (CLUSTER == 1) consumer_release(pipe, stage);
  else if (threadIdx.x % 32 < CLUSTER)
    mbarrier_arrive_cluster(pipe.empty + 8 * stage, threadIdx.x % 32);
}

// Add up the products of the next work item in the list; return the destination of its sums. X is
// loaded while the products before are in flight.
__device__ __forceinline__ Item mainloop(Sums& sums, Pipeline& pipe, int warpgroup,
                                         const int* seats) {
  constexpr int SEATS = ROWS / UNIT;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  const u32 of_lane = row * 64 + ((lane / 16 ^ row / 2 % 4) << 4);
  #pragma unroll
  for (int i = 0; i < sizeof(Sums) / 4; i++) (&sums[0][0][0])[i] = 0.f;
  pipe.consumer_wait();
  const uint4 note = ld_shared(pipe.note());
  Item item{(int)note.y, 0, false};
  if (lane < SEATS) item.seat_of_lane = seats[(note.z * WARPGROUPS + warpgroup) * SEATS + lane];
  int in_use = -1;  // the stage that products in flight read
  for (;;) {
    pipe.consumer_wait();
    const uint4 share = ld_shared(pipe.share(warpgroup));
    const u32 strips = pipe.x() + of_lane;
    u32 w = pipe.w() + (share.y & 0xff) * TILE_BYTES >> 4;
    Fragments x[2];
    #pragma unroll
    for (int place = 0; place < PLACES; place += TOGETHER) {
      const u32 rows = (place < 4 ? share.z : share.w) >> place % 4 * 8;
      load_fragments(x[place / TOGETHER % 2], strips, place);
      wgmma_wait<0>();
      if (place == 0 && in_use >= 0) release(pipe, in_use);
      wgmma_places(sums, x[place / TOGETHER % 2], rows, w);
    }
    in_use = pipe.stage;
    pipe.advance();
    if (share.y & LAST) {
      wgmma_wait<0>();
      release(pipe, in_use);
      item.last = share.y & END;
      return item;
    }
  }
}

// Store the sums. A warp has 16 of each 64 tokens. A lane holds two neighbouring features of a
// token, and eight after the transpose of four pieces.
__device__ __forceinline__ void epilogue(const Sums& sums, char* y, int m, int width,
                                         const Item& item) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, rank = blockIdx.x % CLUSTER;
  #pragma unroll
  for (int first = 0; first < ROWS * PIECES; first += 4) {
    const int mine = first + lane % 4;
    const int seat = __shfl_sync(~0u, item.seat_of_lane, mine / (PIECES * UNIT));
    const int feature = seat * HEIGHT * UNIT + mine % (PIECES * UNIT) * 8;
    const bool there = mine < ROWS * PIECES && seat >= 0 && feature < width;
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      #pragma unroll
      for (int below = 0; below < 2; below++) {  // eight tokens below
        u32 words[4];
        #pragma unroll
        for (int p = 0; p < 4; p++) {
          const int piece = first + p < ROWS * PIECES ? first + p : first;
          const float* s = sums[piece / PIECES][t] + piece % PIECES * 4 + 2 * below;
          words[p] = pack_pair(s[0], s[1]);
        }
        quad_transpose(words);
        const int token = item.token + rank * TOKENS + 64 * t + 16 * warp + 8 * below + lane / 4;
        if (there && token < m)
          *(uint4*)(y + 2 * ((u64)token * width + feature)) =
              uint4{words[0], words[1], words[2], words[3]};
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER)
#endif
multiply_tiles(const __grid_constant__ Maps x, const __grid_constant__ Starts starts,
               const char* w, const Step* steps, const int* seats, char* y, int m, int width) {
  extern __shared__ char shared[];
  __shared__ uint4 notes[Pipeline::STAGES * (1 + WARPGROUPS)];
  __shared__ u64 full[Pipeline::STAGES], empty[Pipeline::STAGES];
  const u32 tiles = (smem_address(shared) + 1023) & ~1023u;  // alignment for the swizzle
  Pipeline pipe{{opaque(tiles), opaque(smem_address(notes))},
                {opaque(smem_address(full)), opaque(smem_address(empty)), 0, 0}};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Pipeline::STAGES; i++) {
      mbarrier_init(pipe.full + 8 * i, 4);                          // producer warps
      mbarrier_init(pipe.empty + 8 * i, 4 * WARPGROUPS * CLUSTER);  // consumer warps of all CTAs
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
  if (warpgroup == WARPGROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    pipe.phase = 1;  // at first, all stages are free
    const int worker = blockIdx.x / CLUSTER;
    producer(x, w, steps, starts.at[worker], starts.at[worker + 1], pipe, warp, m);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    Sums sums;
    for (;;) {
      const Item item = mainloop(sums, pipe, warpgroup, seats);
      epilogue(sums, y, m, width, item);
      if (item.last) break;
    }
  }
  if (CLUSTER > 1) cluster_sync();  // the other CTA may still arrive on this CTA's barriers
}
