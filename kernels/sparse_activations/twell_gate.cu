// The gate of a layer with few active units, written as TwELL words (formats/twell.py):
// G[m, n] = X[m, k] @ Wg[n, k].T is never a matrix. One launch on Hopper's tensor cores.
//
//   A unit is active for a token unless its gate, once rounded, is <= 0: NaN is active.
//
//      words  [m, tiles, CAPACITY + 1]   of a token and TILE units: count  e0  e1  ...
//             an entry: unit in bits 15..0, bits of its gate in 31..16; any order inside a tile.
//             Words after the last entry are undefined. The count is of all that are active, so
//             it may be above CAPACITY. The tile is then in `dense`, and its entries are undefined.
//      dense  [m, n]                     relu of the gates of those tiles; elsewhere untouched
//
//   A CTA's tile is TOKENS x 256 units. X is operand A, so a token's sums are in the four lanes of
//   a quad, and a tile of units in the registers of one warp:
//
//      TOKENS = 128      256 units             TOKENS = 64    128 units    128 units
//                    +---------------+                      +------------+------------+
//       warpgroup 0  | 64 tokens     |           64 tokens  | warpgroup  | warpgroup  |
//                    +---------------+                      |     0      |     1      |
//       warpgroup 1  | 64 tokens     |                      +------------+------------+
//                    +---------------+
//
//      a warp, one token:    lane 4 r + q has units 8 j + 2 q and 8 j + 2 q + 1, j = 0, 1, ...
//
//   Each lane has a bit for each of its sums. Counts of bits give the count of the tile and the
//   place of a lane's first entry: two shuffles in place of a scan over units. Entries go to shared
//   memory, and from there 32 bytes at a time, so that no sector is written in part. With 64
//   tokens and tiles of 256, warpgroup 1 starts where warpgroup 0 ended.
//
//   The pipeline: warp 8 copies boxes of X and W by TMA, each with 128 bytes of k, into STAGES
//   stages. Two warpgroups multiply; each keeps the wgmma of one stage in flight. With CLUSTER = 2
//   two CTAs have neighbouring tokens and the same units: each loads half of W's boxes and
//   multicasts it. One CTA an SM for the whole launch; CTA tiles in bands of BAND clusters of
//   tokens, so that the X and W that are multiplied at a time stay in L2.
//
//   Bytes that a CTA's copies write for one stage, 128 tokens: 48 KiB, for 1024 clocks of products.
//   Without multicast that is 47 bytes a clock from L2, above the 40 that it gives.
//
// Compiled with -DTOKENS=128|64, -DCLUSTER=1|2, -DTILE=256|128|64, -DCAPACITY=3, 7, 15, ... (below
// TILE), -DFP16=0|1, and SHARED_BYTES, as _twell_gate.py has it. WATCHDOG=1 as in hopper.cuh.

#include "hopper.cuh"

constexpr int UNITS = 256, DEPTH = 64, ROW_BYTES = 128, CONSUMERS = 2, BAND = 8;
constexpr bool SPLIT_UNITS = TOKENS == 64;  // between the warpgroups; else tokens are
constexpr int OWN_UNITS = SPLIT_UNITS ? 128 : 256;  // of a warpgroup, which has 64 tokens
constexpr int WORDS = CAPACITY + 1, TILES = UNITS / TILE;
constexpr bool SHARED_TILE = TILE > OWN_UNITS;  // the warpgroups share each tile
constexpr int OWN_TILES = SHARED_TILE ? 1 : OWN_UNITS / TILE;
constexpr int PAIRS = OWN_UNITS / OWN_TILES / 8;  // of a lane, in its part of a tile, of one token
constexpr int BIT_WORDS = (PAIRS + 15) / 16;

constexpr int X_BYTES = TOKENS * ROW_BYTES, W_BYTES = UNITS * ROW_BYTES;
constexpr int STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int PITCH = TILES * WORDS + 4;  // words of a token in shared memory, off the same banks
constexpr int WORDS_BYTES = 4 * PITCH * TOKENS;
constexpr int STAGES = (SHARED_BYTES - 3072 - WORDS_BYTES) / STAGE_BYTES;  // 1 KiB is alignment

static_assert(STAGES >= 3, "fewer would not overlap copies and products");
static_assert(WORDS % 4 == 0 && WORDS <= TILE, "pieces of 16 bytes");

struct Maps { TensorMap x, w; };
struct Out { u32* words; unsigned short* dense; int m, n, k; };

// ---- which CTA tile comes next ----

struct CtaTile { int token, unit; };

// The `index`-th of a grid of clusters: bands of BAND clusters of tokens, units one after the other.
__device__ __forceinline__ CtaTile tile_of(const Out& out, int index, int rank) {
  const int rows = (out.m + TOKENS * CLUSTER - 1) / (TOKENS * CLUSTER);
  const int columns = (out.n + UNITS - 1) / UNITS;
  const int band = index / (BAND * columns), inner = index - band * BAND * columns;
  const int height = min(BAND, rows - band * BAND);
  return {((band * BAND + inner % height) * CLUSTER + rank) * TOKENS, inner / height * UNITS};
}
__device__ __forceinline__ int tiles_of(const Out& out) {
  return (out.m + TOKENS * CLUSTER - 1) / (TOKENS * CLUSTER) * ((out.n + UNITS - 1) / UNITS);
}

// ---- the pipeline of stages ----

struct Pipeline {
  u32 base, phase;
  int stage;
  __device__ __forceinline__ u32 x() const { return base + stage * STAGE_BYTES; }
  __device__ __forceinline__ u32 w() const { return x() + X_BYTES; }
  __device__ __forceinline__ u32 full_barrier() const {
    return base + STAGES * STAGE_BYTES + 8 * stage;
  }
  __device__ __forceinline__ u32 empty_barrier(int of) const {
    return base + STAGES * STAGE_BYTES + 8 * (STAGES + of);
  }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

__device__ __forceinline__ void produce(const Maps& maps, const Out& out, Pipeline pipeline,
                                        int worker, int workers, int rank) {
  constexpr int LOADED = UNITS / CLUSTER;  // rows of W that this CTA loads
  constexpr unsigned short MULTICAST = (1 << CLUSTER) - 1;
  for (int index = worker; index < tiles_of(out); index += workers) {
    const CtaTile tile = tile_of(out, index, rank);
    for (int depth = 0; depth < out.k; depth += DEPTH) {
      mbarrier_wait(pipeline.empty_barrier(pipeline.stage), pipeline.phase, "an empty stage");
      mbarrier_arrive_expect_tx(pipeline.full_barrier(), STAGE_BYTES);
      tma_load(pipeline.x(), &maps.x, depth, tile.token, pipeline.full_barrier());
      const u32 to = pipeline.w() + rank * LOADED * ROW_BYTES;
      const int unit = tile.unit + rank * LOADED;
      if (CLUSTER == 1) tma_load(to, &maps.w, depth, unit, pipeline.full_barrier());
      else tma_load_multicast(MULTICAST, to, &maps.w, depth, unit, pipeline.full_barrier());
      pipeline.advance();
    }
  }
}

// ---- products of a warpgroup ----

using Sums = float[OWN_UNITS / 2];  // 4 j + 2 r + b: token lane / 4 + 8 r, unit 8 j + 2 (lane % 4) + b

__device__ __forceinline__ void release(const Pipeline& pipeline, int stage) {
  const int thread = threadIdx.x % 128;
  if (stage < 0) return;
  if (CLUSTER == 1 && thread == 0) mbarrier_arrive(pipeline.empty_barrier(stage));
  if (CLUSTER > 1 && thread < CLUSTER)
    mbarrier_arrive_cluster(pipeline.empty_barrier(stage), thread);
}
__device__ __forceinline__ void mainloop(Sums& d, Pipeline& pipeline, int k, int warpgroup) {
  #pragma unroll
  for (int i = 0; i < OWN_UNITS / 2; i++) d[i] = 0.f;
  int in_flight = -1;  // the stage that the last wgmma read
  for (int depth = 0; depth < k; depth += DEPTH) {
    mbarrier_wait(pipeline.full_barrier(), pipeline.phase, "a full stage");
    const int rows = warpgroup * (SPLIT_UNITS ? OWN_UNITS : 64);  // before its own, of W or X
    const u64 x = smem_descriptor(pipeline.x() + (SPLIT_UNITS ? 0 : rows * ROW_BYTES));
    const u64 w = smem_descriptor(pipeline.w() + (SPLIT_UNITS ? rows * ROW_BYTES : 0));
    wgmma_fence();
    #pragma unroll
    for (int i = 0; i < 4; i++) {
#if TOKENS == 128
      WGMMA(256, x + 2 * i, w + 2 * i, 0, 0);
#else
      WGMMA(128, x + 2 * i, w + 2 * i, 0, 0);
#endif
    }
    wgmma_commit();
    wgmma_wait<1>();
    release(pipeline, in_flight);
    in_flight = pipeline.stage;
    pipeline.advance();
  }
  wgmma_wait<0>();
  release(pipeline, in_flight);
}

// ---- epilogue ----

__device__ __forceinline__ void st_shared_u32(u32 at, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" :: "r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u32 ld_shared_u32(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint4 ld_shared_v4(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
// Of both warpgroups.
__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

// Which of a lane's sums are active, of one token and its part of one tile: bits i % 16 and
// 16 + i % 16 of word i / 16 are those of pair i.
struct Active {
  u32 bits[BIT_WORDS];
  int before, count;  // entries of the tile before this lane's, and of all lanes
};
__device__ __forceinline__ u32 pair_of(const Sums& d, int tile, int half, int i) {
  const float* two = d + 4 * (tile * PAIRS + i) + 2 * half;
  return pack_pair(two[0], two[1]);
}
__device__ __forceinline__ Active active_of(const Sums& d, int tile, int half) {
  Active a{};
  int own = 0;
  #pragma unroll
  for (int i = 0; i < PAIRS; i++)
    a.bits[i / 16] |= positive_mask(pair_of(d, tile, half, i)) & 0x10001u << i % 16;
  #pragma unroll
  for (int i = 0; i < BIT_WORDS; i++) own += __popc(a.bits[i]);
  const int other = __shfl_xor_sync(~0u, own, 1), two = own + other;
  const int others = __shfl_xor_sync(~0u, two, 2);
  a.before = (threadIdx.x & 1 ? other : 0) + (threadIdx.x & 2 ? others : 0);
  a.count = two + others;
  return a;
}

// Put a lane's entries into `place`, the words of its token and tile, in shared memory.
__device__ __forceinline__ void put_entries(const Sums& d, const Active& a, int tile, int half,
                                            int unit, u32 place) {
  int slot = 1 + a.before;
  #pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const u32 on = a.bits[i / 16] >> i % 16 & 0x10001u;
    if (!on) continue;
    const u32 pair = pair_of(d, tile, half, i);
    const u32 first = unit + 8 * i;
    if (on & 1) {
      if (slot < WORDS) st_shared_u32(place + 4 * slot, pair << 16 | first);
      slot++;
    }
    if (on >> 16) {
      if (slot < WORDS) st_shared_u32(place + 4 * slot, pair & 0xffff0000u | first + 1);
      slot++;
    }
  }
}
// Write relu of a lane's gates of a tile with too many entries.
__device__ __forceinline__ void put_dense(const Sums& d, int tile, int half, int unit,
                                          const Out& out, int token) {
  u32* to = (u32*)(out.dense + (u64)token * out.n + unit);
  #pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const u32 pair = pair_of(d, tile, half, i);
    if (unit + 8 * i < out.n) to[4 * i] = pair & positive_mask(pair);
  }
}
// Write the words of a warp's 16 tokens, from `token` on: a lane half of the first 32 bytes of a
// token's tile, then of the next, as long as a token has entries there.
__device__ __forceinline__ void copy_words(u32 from, const Out& out, int token, int unit) {
  const int row = threadIdx.x % 32 / 2, half = threadIdx.x % 2, tiles = (out.n + TILE - 1) / TILE;
  #pragma unroll 1
  for (int tile = 0; tile < (SPLIT_UNITS && !SHARED_TILE ? OWN_TILES : TILES); tile++) {
    if (unit + tile * TILE >= out.n) break;
    const u32 place = from + 4 * (row * PITCH + tile * WORDS);
    const int count = ld_shared_u32(place), listed = count > CAPACITY ? 0 : count;
    u32* to = out.words + ((u64)(token + row) * tiles + unit / TILE + tile) * WORDS;
    #pragma unroll 1
    for (int word = 0; __any_sync(~0u, word <= listed); word += 8) {
      const int at = word + 4 * half;
      if (word <= listed && at < WORDS && token + row < out.m)
        *(uint4*)(to + at) = ld_shared_v4(place + 4 * at);
    }
  }
}

// Write a warpgroup's sums. `words` is shared memory: PITCH words of each token; then `counts`.
__device__ __forceinline__ void epilogue(const Sums& d, u32 words, const Out& out, CtaTile tile,
                                         int warpgroup) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = (SPLIT_UNITS ? 0 : 64 * warpgroup) + 16 * warp;  // the warp's first token
  const int own = SPLIT_UNITS ? warpgroup * OWN_UNITS : 0;          // its first unit
  const u32 counts = words + WORDS_BYTES;
  Active active[2][OWN_TILES];
  #pragma unroll
  for (int i = 0; i < 2 * OWN_TILES; i++)
    active[i % 2][i / 2] = active_of(d, i / 2, i % 2);
  if (SHARED_TILE) {
    #pragma unroll
    for (int half = 0; half < 2; half++)
      if (lane % 4 == 0)
        st_shared_u32(counts + 4 * (64 * warpgroup + row + lane / 4 + 8 * half),
                      active[half][0].count);
    consumers_sync();
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const int other = ld_shared_u32(counts + 4 * (64 * (1 - warpgroup) + row + lane / 4 + 8 * half));
      active[half][0].count += other;
      if (warpgroup) active[half][0].before += other;
    }
  } else {
    __syncwarp();  // the words of the CTA tile before have been read
  }
  #pragma unroll
  for (int half = 0; half < 2; half++) {
    const int token = row + lane / 4 + 8 * half;
    #pragma unroll
    for (int i = 0; i < OWN_TILES; i++) {
      const Active& a = active[half][i];
      const int at = own + i * TILE, unit = tile.unit + at + 2 * (lane % 4);
      const u32 place = words + 4 * (token * PITCH + at / TILE * WORDS);
      if (lane % 4 == 0) st_shared_u32(place, a.count);
      put_entries(d, a, i, half, unit, place);
      if (a.count > CAPACITY && tile.token + token < out.m)
        put_dense(d, i, half, unit, out, tile.token + token);
    }
  }
  if (SHARED_TILE) consumers_sync();
  else __syncwarp();
  if (SHARED_TILE && warpgroup) return;
  copy_words(words + 4 * (row * PITCH + own / TILE * WORDS), out, tile.token + row,
             tile.unit + own);
}

// ---- the kernel ----

extern "C" __global__ void __launch_bounds__(384, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
write_words(const __grid_constant__ Maps maps, const __grid_constant__ Out out) {
  extern __shared__ char shared[];
  const u32 stages = (smem_address(shared) + 1023) & ~1023u;  // the alignment of a swizzled tile
  if (threadIdx.x == 0) {
    Pipeline pipeline{stages, 0, 0};
    for (int i = 0; i < STAGES; i++, pipeline.advance()) {
      mbarrier_init(pipeline.full_barrier(), 1);  // the producer, which also expects bytes
      mbarrier_init(pipeline.empty_barrier(i), CONSUMERS * CLUSTER);
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  launch_dependent_grids();
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0), rank = blockIdx.x % CLUSTER;
  const int worker = blockIdx.x / CLUSTER, workers = gridDim.x / CLUSTER;
  Pipeline pipeline{stages, role == CONSUMERS, 0};  // in the first round all stages are empty
  if (role == CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % 128 == 0) produce(maps, out, pipeline, worker, workers, rank);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const u32 words = stages + STAGES * STAGE_BYTES + 1024;  // after the barriers
    Sums d;
    for (int index = worker; index < tiles_of(out); index += workers) {
      mainloop(d, pipeline, out.k, role);
      epilogue(d, words, out, tile_of(out, index, rank), role);
    }
  }
  if (CLUSTER > 1) cluster_sync();  // the other CTA may still send boxes and arrivals here
}
