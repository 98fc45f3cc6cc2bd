// Y[m, n] = X[m, k] @ W[n, k].T, W with zeros anywhere, for up to 128 tokens.
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
//   A tile of W is 64 x 128: a head of 9 KiB, the first matrix as in formats/spense.py (rows of 128
//   bytes, swizzled, and metadata in the order of registers), and a list of 4 bytes for each
//   element. A place is a byte of the swizzled second tile.
//
//   A CTA has HEIGHT rows of tiles and one of SPLIT parts of k. A stage of its ring has a tile of
//   each row and the two boxes of X for them, 64 columns each. HEIGHT warpgroups multiply it. With
//   TURNS = 2, as many others multiply the next stage.
//
//        warp 0 of the producers    X by TMA, heads by bulk copies --+--> stage
//        warp 1                     bounds of lists --> lists -------+
//        a warpgroup    first . X, second . X     in flight, while it
//                       fills the next second tile from its list. Then it clears this one.
//
//   With TURNS = 2 a warpgroup has one second tile, and fills it before the products. A warp of its
//   own copies the heads, which need no bounds, so the first copies start at once.
//
//   The CTAs of a cluster share the k of the same features. At the end each leaves its sums in
//   shared memory, and adds up a part of the tokens, always in the same order.
//
// Macros from bitmap_pairs.py: TOKENS (of X, padded to the width of wgmma), HEIGHT, TURNS=1|2,
// SPLIT, DEPTH (stages), FP16=0|1 (0 is bf16).

#include "ring.cuh"
#include "wgmma.cuh"

using u16 = unsigned short;

constexpr int ROWS = 64, COLUMNS = 128, ROW_BYTES = 128;
constexpr int TILE_BYTES = ROWS * ROW_BYTES, HEAD_BYTES = TILE_BYTES + 1024;
constexpr int X_BOX = TOKENS * ROW_BYTES, X_BYTES = 2 * X_BOX;
constexpr int WARPGROUPS = HEIGHT * TURNS, CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 64;
constexpr int FEATURES = ROWS * HEIGHT, PITCH = FEATURES + 4;  // of sums, in floats
constexpr int SUMS_BYTES = TOKENS * PITCH * 4;
constexpr int SECONDS = TURNS == 1 ? 2 : 1;  // tiles of a warpgroup
constexpr u32 POSITIONS_0_AND_1 = 0x44444444;

// A barrier tells two phases apart, so a warpgroup must use a stage every time it is full. It waits
// for its next stage before it releases one.
static_assert(DEPTH % TURNS == 0 && DEPTH > TURNS);

// `row_tiles` x `tiles` tiles; bounds of lists in units of 16 bytes.
struct Weights { const char *heads, *lists; const int* bounds; int row_tiles, tiles; };

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
  Wgmma<TOKENS>::multiply_sparse(d, a, b0, words.x);
  Wgmma<TOKENS>::multiply_sparse(d, a + 2, b0 + 4, words.y);
  Wgmma<TOKENS>::multiply_sparse(d, a + 4, b1, words.z);
  Wgmma<TOKENS>::multiply_sparse(d, a + 6, b1 + 4, words.w);
}
// Keep metadata in registers up to here, because wgmma reads them while it runs.
__device__ __forceinline__ void hold(const uint4& v) {
  asm volatile("" :: "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
// Hide a constant from the compiler. Otherwise its register gets another value while the last product
// still reads it, and Y is off by a quarter or more.
__device__ __forceinline__ u32 opaque(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}
// ---- the producers ----

struct Part { int group, begin, end; };  // rows of tiles of a CTA, and its steps along k

// A warpgroup past the last row of tiles multiplies that row again, and its sums are not stored.
__device__ __forceinline__ u64 tile_of(const Weights& w, const Part& part, int row, int step) {
  return (u64)min(part.group * HEIGHT + row, w.row_tiles - 1) * w.tiles + step;
}
// One thread calls this.
__device__ __forceinline__ void load_heads(const TensorMap& x, const Weights& w, const Part& part,
                                           Ring<DEPTH> ring, u32 stages, int stage_bytes, int m) {
  for (int step = part.begin; step < part.end; step++, ring.advance()) {
    const u32 stage = stages + ring.stage * stage_bytes, full = ring.full_barrier();
    ring.producer_acquire();
    mbarrier_arrive_expect_tx(full, 2 * m * ROW_BYTES + HEIGHT * HEAD_BYTES);
    for (int g = 0; g < HEIGHT; g++)
      bulk_load(stage + X_BYTES + g * HEAD_BYTES, w.heads + tile_of(w, part, g, step) * HEAD_BYTES,
                HEAD_BYTES, full);
    tma_load(stage, &x, step * COLUMNS, 0, full);
    tma_load(stage + X_BOX, &x, step * COLUMNS + COLUMNS / 2, 0, full);
  }
}
// A warp calls this. Its lanes read the bounds of 32 steps at a time, and its first lane writes the
// bytes of each list to `sizes`.
__device__ __forceinline__ void load_lists(const Weights& w, const Part& part, Ring<DEPTH> ring,
                                           u32 stages, int stage_bytes, int room, u32 sizes) {
  const int lane = threadIdx.x % 32;
  int from[HEIGHT], to[HEIGHT];  // of the step of this lane
  for (int step = part.begin; step < part.end; step++, ring.advance()) {
    const int turn = (step - part.begin) % 32;
    if (turn == 0)
      #pragma unroll
      for (int g = 0; g < HEIGHT; g++) {
        const int* at = w.bounds + tile_of(w, part, g, min(step + lane, part.end - 1));
        from[g] = at[0], to[g] = at[1];
      }
    int first[HEIGHT], bytes[HEIGHT], total = 0;
    #pragma unroll
    for (int g = 0; g < HEIGHT; g++) {
      first[g] = __shfl_sync(~0u, from[g], turn);
      bytes[g] = (__shfl_sync(~0u, to[g], turn) - first[g]) * 16;
      total += bytes[g];
    }
    ring.producer_acquire();
    if (lane == 0) {
      const u32 stage = stages + ring.stage * stage_bytes + X_BYTES + HEIGHT * HEAD_BYTES;
      #pragma unroll
      for (int g = 0; g < HEIGHT; g++)
        store_32(sizes + (ring.stage * HEIGHT + g) * 4, bytes[g]);
      mbarrier_arrive_expect_tx(ring.full_barrier(), total);
      #pragma unroll
      for (int g = 0; g < HEIGHT; g++)
        if (bytes[g])
          bulk_load(stage + g * room, w.lists + (u64)first[g] * 16, bytes[g], ring.full_barrier());
    }
    __syncwarp();
  }
}

// ---- the kernel ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if SPLIT > 1
__cluster_dims__(SPLIT)
#endif
multiply_pairs(const __grid_constant__ TensorMap x, const __grid_constant__ Weights w, u16* y,
               int m, int n, int room) {
  extern __shared__ char shared[];
  const u32 stages = (smem_address(shared) + 1023) & ~1023u;
  const int stage_bytes = (X_BYTES + HEIGHT * (HEAD_BYTES + room) + 1023) & ~1023;
  const u32 seconds = stages + DEPTH * stage_bytes;
  const u32 barriers = seconds + WARPGROUPS * SECONDS * TILE_BYTES, sizes = barriers + 16 * DEPTH;
  const int group = blockIdx.x / SPLIT, rank = blockIdx.x % SPLIT;
  const Part part{group, w.tiles * rank / SPLIT, w.tiles * (rank + 1) / SPLIT};
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  const bool producer = role == WARPGROUPS;
  Ring<DEPTH> ring{barriers, barriers + 8 * DEPTH, 0, producer};
  if (threadIdx.x == 0) {
    ring.init_barriers(2, 4 * HEIGHT);
    fence_mbarrier_init();
  }
  const u32 own = seconds + role * SECONDS * TILE_BYTES;
  if (!producer)
    for (int i = 0; i < SECONDS; i++) clear(own + i * TILE_BYTES);
  __syncthreads();

  if (producer) {
    if (threadIdx.x / 32 % 4 == 1) load_lists(w, part, ring, stages, stage_bytes, room, sizes);
    else if (lane == 0) load_heads(x, w, part, ring, stages, stage_bytes, m);
    __syncwarp();
    if (SPLIT > 1) cluster_sync(), cluster_sync();
    return;
  }

  float d[TOKENS / 2];
  #pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) d[i] = 0.f;
  const int thread = threadIdx.x % 128, row = role % HEIGHT, turn = role / HEIGHT;
  const u32 positions = opaque(POSITIONS_0_AND_1);
  const uint4 constant{positions, positions, positions, positions};
  // Wait for a stage, and fill a second tile from its list.
  const auto fill_from_stage = [&](u32 second) {
    ring.consumer_wait();
    const u32 lists = stages + ring.stage * stage_bytes + X_BYTES + HEIGHT * HEAD_BYTES;
    const u32 list = lists + row * room;
    fill(second, list, list + load_32(sizes + (ring.stage * HEIGHT + row) * 4));
  };
  const auto publish = [&] {  // to wgmma
    fence_proxy_async();
    warpgroup_sync(role + 1);
  };
  if (turn) ring.advance();
  for (int step = part.begin + turn, i = 0; step < part.end; step += TURNS, i++) {
    const u32 second = own + i % SECONDS * TILE_BYTES;
    if (TURNS > 1 || i == 0) {
      fill_from_stage(second);
      publish();
    }
    const u32 x_at = stages + ring.stage * stage_bytes, head = x_at + X_BYTES + row * HEAD_BYTES;
    const uint4 words = load_128(head + TILE_BYTES + 16 * (thread / 4 * 2 + thread % 2));
    wgmma_fence();
    multiply(d, head, x_at, words);
    multiply(d, second, x_at, constant);
    wgmma_commit();
    const u32 empty = ring.empty_barrier();
    for (int t = 0; t < TURNS; t++) ring.advance();
    if (TURNS == 1 && step + 1 < part.end) fill_from_stage(own + (i + 1) % SECONDS * TILE_BYTES);
    wgmma_wait<0>();  // in the loop: the compiler copied the sums before a wait behind it
    hold(words), hold(constant);
    if (lane == 0) mbarrier_arrive(empty);
    clear(second);
    if (TURNS == 1) publish();
    else warpgroup_sync(role + 1);  // published with what fills it next
  }

  // ---- sums [tokens, features], in place of the stages, and Y ----
  consumers_sync();
  #pragma unroll
  for (int j = 0; j < TOKENS / 8; j++)
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      const int token = 8 * j + lane % 4 * 2 + e % 2;
      const int feature = row * ROWS + thread / 32 * 16 + lane / 4 + e / 2 * 8;
      store_32(stages + turn * SUMS_BYTES + (token * PITCH + feature) * 4,
               __float_as_uint(d[4 * j + e]));
    }
  consumers_sync();
  if (SPLIT > 1) cluster_sync();
  const int feature = threadIdx.x % FEATURES, column = group * FEATURES + feature;
  const u32 sums = stages + feature * 4;
  for (int token = threadIdx.x / FEATURES * SPLIT + rank; token < m;
       token += CONSUMERS / FEATURES * SPLIT) {
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < SPLIT * TURNS; i++)
      sum += load_float_of(sums + i % TURNS * SUMS_BYTES + token * PITCH * 4, i / TURNS);
    if (column < n) y[(u64)token * n + column] = (u16)pack_pair(sum, 0.f);
  }
  if (SPLIT > 1) cluster_sync();
}
