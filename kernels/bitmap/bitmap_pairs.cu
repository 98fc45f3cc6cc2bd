// Y[m, n] = X[m, k] @ W[n, k].T, W with zeros anywhere, for 17 to 128 tokens.
// No weight is decoded: W is the sum of two 2:4 matrices, which the tensor cores multiply
// (wgmma.sp). The first holds two elements of each group of four, the second what exceeds two.
//
//     a group         first, with metadata      second, always of positions 0 and 1
//     a . c .         a c  (0, 2)               . .
//     . b c d         c d  (2, 3)               . b
//     a b c d         c d  (2, 3)               a b
//
//   At 50 % zeros 31 % of the groups have more than two elements, so 9 % of the places of the
//   second matrix are filled. It is stored as a list: value and place. Threads write the list
//   into zeros in shared memory.
//
//   A record is a tile of 64 x 128:  | values, 8 KiB | metadata, 1 KiB | list, 4 bytes each |
//   Rows of values have 128 bytes and are swizzled, metadata is in the order of registers
//   (formats/spense.py). A place is a byte of the swizzled second tile.
//
//   A CTA has 64 WARPGROUPS features and one of SPLIT parts of k. A ring of DEPTH holds the two
//   boxes of X of a tile (64 columns each) and a record for each warpgroup.
//
//        producer    X by TMA, records by bulk copies ----> stage
//        warpgroup   first . X ------------------------> sums, while it
//                    clears one second tile, and fills the other from the list
//                    second . X -----------------------> sums
//
//   The CTAs of a cluster share the k of the same features. At the end each leaves its sums in
//   shared memory, and adds up a part of the tokens, always in the same order.
//
// Macros from bitmap_pairs.py: TOKENS (of X, padded to the width of wgmma), WARPGROUPS, SPLIT,
// DEPTH, FP16=0|1 (0 is bf16).

#include "ring.cuh"
#include "wgmma.cuh"

using u16 = unsigned short;

constexpr int ROWS = 64, COLUMNS = 128, ROW_BYTES = 128;
constexpr int TILE_BYTES = ROWS * ROW_BYTES, HEAD_BYTES = TILE_BYTES + 1024;
constexpr int X_BOX = TOKENS * ROW_BYTES, X_BYTES = 2 * X_BOX;
constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 32;
constexpr int FEATURES = ROWS * WARPGROUPS, PITCH = FEATURES + 4;  // of sums, in floats
constexpr u32 POSITIONS_0_AND_1 = 0x44444444;

struct Weights { const char* records; const int* offsets; int row_tiles, tiles; };

__device__ __forceinline__ uint4 load_128(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_32(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_32(u32 address, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" :: "r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_16(u32 address, u32 v) {
  asm volatile("st.shared.u16 [%0], %1;" :: "r"(address), "h"((u16)v) : "memory");
}
__device__ __forceinline__ void clear_128(u32 address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" :: "r"(address), "r"(0) : "memory");
}
__device__ __forceinline__ float load_float_of(u32 address, int cta) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];"
               : "=f"(v) : "r"(SPLIT > 1 ? map_shared_rank(address, cta) : address) : "memory");
  return v;
}
__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 15, %0;" :: "n"(CONSUMERS) : "memory");
}

// A warp clears the 16 rows that it multiplies.
__device__ __forceinline__ void clear(u32 tile) {
  #pragma unroll
  for (int i = 0; i < 4; i++)
    clear_128(tile + threadIdx.x % 128 / 32 * 2048 + i * 512 + threadIdx.x % 32 * 16);
}
// Write the list into a tile of zeros: place << 16 | value. Lists have a multiple of four elements.
__device__ __forceinline__ void fill(u32 tile, u32 list, u32 end) {
  for (u32 at = list + threadIdx.x % 128 * 16; at < end; at += 128 * 16) {
    const uint4 four = load_128(at);
    store_16(tile + (four.x >> 16), four.x), store_16(tile + (four.y >> 16), four.y);
    store_16(tile + (four.z >> 16), four.z), store_16(tile + (four.w >> 16), four.w);
  }
}
__device__ __forceinline__ void multiply(float* d, u32 tile, u32 x, const uint4& words) {
  const u64 a = smem_descriptor(tile), b0 = smem_descriptor(x), b1 = smem_descriptor(x + X_BOX);
  wgmma_fence();
  Wgmma<TOKENS>::multiply_sparse(d, a, b0, words.x);
  Wgmma<TOKENS>::multiply_sparse(d, a + 2, b0 + 4, words.y);
  Wgmma<TOKENS>::multiply_sparse(d, a + 4, b1, words.z);
  Wgmma<TOKENS>::multiply_sparse(d, a + 6, b1 + 4, words.w);
  wgmma_commit();
}
__device__ __forceinline__ u32 opaque(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}
// Keep metadata in its registers up to here: wgmma reads them while it runs, and ptxas would give
// them to other values as soon as the instruction is issued.
__device__ __forceinline__ void hold(const uint4& v) {
  asm volatile("" :: "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if SPLIT > 1
__cluster_dims__(SPLIT)
#endif
multiply_pairs(const __grid_constant__ TensorMap x, const __grid_constant__ Weights w, u16* y, int m,
               int n, int room) {
  extern __shared__ char shared[];
  const u32 stages = (smem_address(shared) + 1023) & ~1023u;
  const int stage_bytes = X_BYTES + WARPGROUPS * room;
  const u32 seconds = stages + DEPTH * stage_bytes;  // two tiles for each warpgroup
  const u32 barriers = seconds + WARPGROUPS * 2 * TILE_BYTES, ends = barriers + 16 * DEPTH;
  const int group = blockIdx.x / SPLIT, part = blockIdx.x % SPLIT;
  const int begin = w.tiles * part / SPLIT, end = w.tiles * (part + 1) / SPLIT;
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  const bool producer = role == WARPGROUPS;
  Ring<DEPTH> ring{barriers, barriers + 8 * DEPTH, 0, producer};
  if (threadIdx.x == 0) {
    ring.init_barriers(1, 4 * WARPGROUPS);
    fence_mbarrier_init();
  }
  if (!producer)
    for (int i = 0; i < 2; i++) clear(seconds + (2 * role + i) * TILE_BYTES);
  __syncthreads();

  if (producer) {
    int from[WARPGROUPS], to[WARPGROUPS];  // of the step of this lane
    for (int step = begin; step < end; step++) {
      const int turn = (step - begin) % 32;
      if (turn == 0)
        #pragma unroll
        for (int g = 0; g < WARPGROUPS; g++) {
          const int row = min(group * WARPGROUPS + g, w.row_tiles - 1);
          const int* at = w.offsets + (u64)row * w.tiles + min(step + lane, end - 1);
          from[g] = at[0], to[g] = at[1];
        }
      ring.producer_acquire();
      const u32 stage = stages + ring.stage * stage_bytes;
      int total = 2 * m * ROW_BYTES, first[WARPGROUPS], bytes[WARPGROUPS];
      #pragma unroll
      for (int g = 0; g < WARPGROUPS; g++) {
        first[g] = __shfl_sync(~0u, from[g], turn);
        bytes[g] = (__shfl_sync(~0u, to[g], turn) - first[g]) * 16;
        total += bytes[g];
      }
      if (lane == 0) {
        #pragma unroll
        for (int g = 0; g < WARPGROUPS; g++)
          store_32(ends + (ring.stage * WARPGROUPS + g) * 4, bytes[g]);
        mbarrier_arrive_expect_tx(ring.full_barrier(), total);
        #pragma unroll
        for (int g = 0; g < WARPGROUPS; g++)
          bulk_load(stage + X_BYTES + g * room, w.records + (u64)first[g] * 16, bytes[g],
                    ring.full_barrier());
        tma_load(stage, &x, step * COLUMNS, 0, ring.full_barrier());
        tma_load(stage + X_BOX, &x, step * COLUMNS + COLUMNS / 2, 0, ring.full_barrier());
      }
      __syncwarp();
      ring.advance();
    }
    if (SPLIT > 1) cluster_sync(), cluster_sync();
    return;
  }

  float d[TOKENS / 2];
  #pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) d[i] = 0.f;
  const int thread = threadIdx.x % 128;
  const u32 own = seconds + 2 * role * TILE_BYTES;
  const u32 positions = opaque(POSITIONS_0_AND_1);  // one register up to the last wait
  const uint4 constant{positions, positions, positions, positions};
  int before = -1;
  for (int step = begin; step < end; step++) {
    const u32 second = own + (step - begin) % 2 * TILE_BYTES;
    ring.consumer_wait();
    const u32 x_at = stages + ring.stage * stage_bytes, record = x_at + X_BYTES + role * room;
    const uint4 words = load_128(record + TILE_BYTES + 16 * (thread / 4 * 2 + thread % 2));
    multiply(d, record, x_at, words);
    wgmma_wait<1>();  // the second product of the step before is done
    if (before >= 0) {
      if (lane == 0) mbarrier_arrive(ring.empty_barrier(before));
      clear(own + (step - begin + 1) % 2 * TILE_BYTES);
    }
    const u32 bytes = load_32(ends + (ring.stage * WARPGROUPS + role) * 4);
    fill(second, record + HEAD_BYTES, record + bytes);
    fence_proxy_async();
    warpgroup_sync(role + 1);
    multiply(d, second, x_at, constant);
    wgmma_wait<1>();
    hold(words);
    before = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  hold(constant);

  // ---- sums [tokens, features], in place of the stages, and Y ----
  consumers_sync();
  #pragma unroll
  for (int j = 0; j < TOKENS / 8; j++)
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      const int token = 8 * j + lane % 4 * 2 + e % 2;
      const int feature = threadIdx.x / 32 * 16 + lane / 4 + e / 2 * 8;
      store_32(stages + (token * PITCH + feature) * 4, __float_as_uint(d[4 * j + e]));
    }
  consumers_sync();
  if (SPLIT > 1) cluster_sync();
  const int feature = threadIdx.x % FEATURES, column = group * FEATURES + feature;
  for (int token = threadIdx.x / FEATURES * SPLIT + part; token < m; token += 2 * SPLIT) {
    float sum = 0;
    #pragma unroll
    for (int cta = 0; cta < SPLIT; cta++)
      sum += load_float_of(stages + (token * PITCH + feature) * 4, cta);
    if (column < n) y[(u64)token * n + column] = (u16)pack_pair(sum, 0.f);
  }
  if (SPLIT > 1) cluster_sync();
}
