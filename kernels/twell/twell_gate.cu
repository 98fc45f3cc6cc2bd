// The gate of a layer with few active units, written as TwELL words (formats/twell.py):
// G[m, n] = X[m, k] @ Wg[n, k].T is never stored as a matrix. One launch on Hopper's tensor cores.
//
//   A unit is active for a token unless its gate, once rounded, is <= 0: NaN is active.
//
//      words  [m, tiles, CAPACITY + 1]   for a token and TILE units: count  e0  e1  ...
//             an entry: unit in bits 15..0, bits of its gate in 31..16; any order inside a tile.
//             Words after the last entry are undefined. The count includes every active unit. If
//             it exceeds CAPACITY, `dense` holds the tile, and the tile's entries are undefined.
//      dense  [m, n]                     relu of the gates of those tiles; untouched elsewhere
//
//   A CTA tile is 128 tokens x 256 units, or half of that. X is operand A, so the four lanes of a
//   quad hold a token's sums, and the registers of one warp hold a tile of units:
//
//      a whole CTA tile     256 units           a half       128 units    128 units
//                       +---------------+                  +------------+------------+
//       warpgroup 0     | 64 tokens     |       64 tokens  | warpgroup  | warpgroup  |
//                       +---------------+                  |     0      |     1      |
//       warpgroup 1     | 64 tokens     |                  +------------+------------+
//                       +---------------+
//
//      a warp, one token:    lane 4 r + q has units 8 j + 2 q and 8 j + 2 q + 1, j = 0, 1, ...
//
//   The last round uses half tiles: 4096 tokens x 5632 units are 5.33 rounds of 132 CTA tiles, and
//   take 5.5 rounds instead of 6; 1024 tokens take 1.5 instead of 2.
//
//   Each lane keeps a bit for each of its sums. Counting these bits gives the count of the tile and
//   the place of a lane's first entry: two shuffles replace a scan over units. Entries go to shared
//   memory, and from there to global memory 32 bytes at a time, so that no sector is written in
//   part. In a half tile, both warpgroups share a tile of 256 units, and warpgroup 1 starts where
//   warpgroup 0 ended.
//
//   The pipeline: warp 8 copies boxes of X and W by TMA, each with 128 bytes of k, into STAGES
//   stages. Two warpgroups multiply; each keeps the wgmma of one stage in flight. With CLUSTER = 2,
//   two CTAs take neighbouring tokens and the same units: each loads half of W's boxes and
//   multicasts it. Each SM runs one CTA for the whole launch. CTA tiles are ordered in bands of
//   BAND clusters of tokens, so that the X and W that are multiplied at a time stay in L2.
//
//   The copies of one stage are 48 KiB for 1024 clocks of products. That needs 47 bytes per clock
//   and SM from L2, which delivers about 40. Multicast reduces it to 31.
//
// Compiled with -DCLUSTER=1|2, -DTILE=256|128|64, -DCAPACITY=3, 7, 15, ... (below TILE / 2),
// -DFP16=0|1, and SHARED_BYTES of _twell_gate.py. WATCHDOG=1 is explained in hopper.cuh.

#include "ring.cuh"
#include "wgmma.cuh"

constexpr int TOKENS = 128, UNITS = 256;  // of a CTA tile
constexpr int DEPTH = 64, ROW_BYTES = 128, CONSUMERS = 2, BAND = 8;
constexpr int WORDS = CAPACITY + 1, TILES = UNITS / TILE;

constexpr int BOX_BYTES = 64 * ROW_BYTES;  // 64 tokens of X
constexpr int X_BYTES = 2 * BOX_BYTES, W_BYTES = UNITS * ROW_BYTES;
constexpr int STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int PITCH = TILES * WORDS + 4;  // words of a token in shared memory; no bank conflicts
constexpr int WORDS_BYTES = 4 * PITCH * TOKENS;
constexpr int STAGES = (SHARED_BYTES - 3072 - WORDS_BYTES) / STAGE_BYTES;  // 1 KiB aligns

static_assert(STAGES >= 3, "fewer would not overlap copies and products");
static_assert(WORDS % 4 == 0 && WORDS <= TILE / 2, "pieces of 16 bytes; stages");

struct Maps { TensorMap x, w; };
struct Out { u32* words; unsigned short* dense; int m, n, k; };

// The part of a CTA tile that a warpgroup computes.
template <bool HALF> struct Part {
  static constexpr int UNITS = HALF ? 128 : 256;
  static constexpr bool SHARED_TILE = TILE > UNITS;  // shared with the other warpgroup
  static constexpr int TILES = SHARED_TILE ? 1 : UNITS / TILE;
  static constexpr int PAIRS = UNITS / TILES / 8;  // of a lane, for one tile and token
};

// ---- which CTA tile comes next ----

struct CtaTile { int token, unit; bool half; };

// Order the CTA tiles of a grid of workers (CTAs or clusters): whole tiles, then halves.
struct Schedule {
  int rows, columns, whole, end;  // of clusters' tiles; number of whole tiles, and of all
  __device__ __forceinline__ Schedule(const Out& out, int workers) {
    rows = (out.m + TOKENS * CLUSTER - 1) / (TOKENS * CLUSTER), columns = (out.n + UNITS - 1) / UNITS;
    const int all = rows * columns, rest = all % workers;
    whole = 2 * rest <= workers ? all - rest : all;
    end = 2 * all - whole;
  }
  // Return the CTA tile of an index: in bands of BAND clusters of tokens, unit by unit.
  __device__ __forceinline__ CtaTile operator()(int index, int rank) const {
    const bool half = index >= whole;
    const int tile = half ? whole + (index - whole) / 2 : index;
    const int band = tile / (BAND * columns), inner = tile - band * BAND * columns;
    const int height = min(BAND, rows - band * BAND);
    const int row = band * BAND + inner % height, unit = inner / height * UNITS;
    if (!half) return {(row * CLUSTER + rank) * TOKENS, unit, false};
    return {((2 * row + (index - whole) % 2) * CLUSTER + rank) * (TOKENS / 2), unit, true};
  }
};

// ---- the pipeline: stages, then the ring's barriers ----

struct Pipeline : Ring<STAGES, BehindStages<STAGES, STAGES * STAGE_BYTES>> {
  __device__ __forceinline__ u32 x() const { return base + stage * STAGE_BYTES; }
  __device__ __forceinline__ u32 w() const { return x() + X_BYTES; }
};

__device__ __forceinline__ void produce(const Maps& maps, int k, const Schedule& schedule,
                                        Pipeline pipeline, int worker, int workers, int rank) {
  constexpr int LOADED = UNITS / CLUSTER;  // rows of W that this CTA loads
  constexpr unsigned short MULTICAST = (1 << CLUSTER) - 1;
  for (int index = worker; index < schedule.end; index += workers) {
    const CtaTile tile = schedule(index, rank);
    for (int depth = 0; depth < k; depth += DEPTH) {
      const u32 full = pipeline.full_barrier();
      pipeline.producer_acquire();
      mbarrier_arrive_expect_tx(full, STAGE_BYTES - (tile.half ? BOX_BYTES : 0));
      tma_load(pipeline.x(), &maps.x, depth, tile.token, full);
      if (!tile.half) tma_load(pipeline.x() + BOX_BYTES, &maps.x, depth, tile.token + 64, full);
      const u32 to = pipeline.w() + rank * LOADED * ROW_BYTES;
      const int unit = tile.unit + rank * LOADED;
      if (CLUSTER == 1) tma_load(to, &maps.w, depth, unit, full);
      else tma_load_multicast(MULTICAST, to, &maps.w, depth, unit, full);
      pipeline.advance();
    }
  }
}

// ---- products of a warpgroup ----

// Sum 4 j + 2 r + b: token lane / 4 + 8 r, unit 8 j + 2 (lane % 4) + b. A half uses the first 64.
using Sums = float[UNITS / 2];

template <bool HALF>
__device__ __forceinline__ void mainloop(Sums& d, Pipeline& pipeline, int k, int warpgroup) {
  #pragma unroll
  for (int i = 0; i < Part<HALF>::UNITS / 2; i++) d[i] = 0.f;
  int in_flight = -1;  // the stage that the last wgmma read
  for (int depth = 0; depth < k; depth += DEPTH) {
    pipeline.consumer_wait();
    const u64 x = smem_descriptor(pipeline.x() + (HALF ? 0 : warpgroup * BOX_BYTES));
    const u64 w = smem_descriptor(pipeline.w() + (HALF ? warpgroup * 128 * ROW_BYTES : 0));
    wgmma_fence();
    #pragma unroll
    for (int i = 0; i < 4; i++) Wgmma<Part<HALF>::UNITS>::multiply(d, x + 2 * i, w + 2 * i);
    wgmma_commit();
    wgmma_wait<1>();
    pipeline.warpgroup_release<CLUSTER>(in_flight, in_flight >= 0);
    in_flight = pipeline.stage;
    pipeline.advance();
  }
  wgmma_wait<0>();
  pipeline.warpgroup_release<CLUSTER>(in_flight, in_flight >= 0);
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
// A barrier of both warpgroups.
__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

// A lane's rounded gates of one token in one tile: each word holds two neighbouring units.
template <int PAIRS> using Pairs = u32[PAIRS];

// A bit for each active gate: bits i % 16 and 16 + i % 16 of word i / 16 belong to pair i.
template <int PAIRS> struct Active {
  static constexpr int BIT_WORDS = (PAIRS + 15) / 16;
  u32 bits[BIT_WORDS];
  int before, count;  // entries of the tile before this lane's, and of all lanes
};
template <int PAIRS>
__device__ __forceinline__ Active<PAIRS> active_of(const Pairs<PAIRS>& pairs) {
  Active<PAIRS> a{};
  int own = 0;
  #pragma unroll
  for (int i = 0; i < PAIRS; i++) a.bits[i / 16] |= positive_mask(pairs[i]) & 0x10001u << i % 16;
  #pragma unroll
  for (int i = 0; i < a.BIT_WORDS; i++) own += __popc(a.bits[i]);
  const int other = __shfl_xor_sync(~0u, own, 1), two = own + other;
  const int others = __shfl_xor_sync(~0u, two, 2);
  a.before = (threadIdx.x & 1 ? other : 0) + (threadIdx.x & 2 ? others : 0);
  a.count = two + others;
  return a;
}

// Return pairs[i]: registers cannot be indexed, so each bit of i selects half of those left.
template <int PAIRS> __device__ __forceinline__ u32 select(const Pairs<PAIRS>& pairs, int i) {
  u32 left[PAIRS];
  #pragma unroll
  for (int j = 0; j < PAIRS; j++) left[j] = pairs[j];
  #pragma unroll
  for (int by = 1; by < PAIRS; by *= 2)
    #pragma unroll
    for (int j = 0; j < PAIRS; j += 2 * by) left[j] = i & by ? left[j + by] : left[j];
  return left[0];
}

// Store a lane's entries at `place`, the words of its token and tile in shared memory. `unit` is
// the first unit of the lane's first pair. With few active units, two rounds are enough for the
// warp. Testing each of 32 pairs, with the code of an entry after each test, took four times as
// many instructions.
template <int PAIRS>
__device__ __forceinline__ void put_entries(const Pairs<PAIRS>& pairs, Active<PAIRS> a, int unit,
                                            u32 place) {
  u32 to = place + 4 * (1 + a.before);
  const u32 end = place + 4 * WORDS;
  #pragma unroll
  for (int word = 0; word < a.BIT_WORDS; word++)
    while (__any_sync(~0u, a.bits[word])) {
      if (!a.bits[word]) continue;
      const int bit = __ffs(a.bits[word]) - 1, odd = bit >> 4, i = bit % 16 + 16 * word;
      a.bits[word] &= a.bits[word] - 1;
      const u32 gate = __byte_perm(select(pairs, i), unit + 8 * i + odd, odd ? 0x3254 : 0x1054);
      if (to < end) st_shared_u32(to, gate);
      to += 4;
    }
}
// Write relu of a lane's gates in a tile with too many entries.
template <int PAIRS>
__device__ __forceinline__ void put_dense(const Pairs<PAIRS>& pairs, int unit, const Out& out,
                                          int token) {
  u32* to = (u32*)(out.dense + (u64)token * out.n + unit);
  #pragma unroll
  for (int i = 0; i < PAIRS; i++)
    if (unit + 8 * i < out.n) to[4 * i] = pairs[i] & positive_mask(pairs[i]);
}
// Write the words of a warp's 16 tokens, starting at `token`. A lane writes half of the first 32
// bytes of a token's tile, then of the next 32, as long as any token has entries there.
__device__ __forceinline__ void copy_words(u32 from, const Out& out, int token, int unit,
                                           int count_of_tiles) {
  const int row = threadIdx.x % 32 / 2, half = threadIdx.x % 2, tiles = (out.n + TILE - 1) / TILE;
  #pragma unroll 1
  for (int tile = 0; tile < count_of_tiles; tile++) {
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

// Write a warpgroup's sums as words. Shared memory at `words`: PITCH words per token, then counts.
template <bool HALF>
__device__ __forceinline__ void epilogue(const Sums& d, u32 words, const Out& out, CtaTile tile,
                                         int warpgroup) {
  using Own = Part<HALF>;
  constexpr int PAIRS = Own::PAIRS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = (HALF ? 0 : 64 * warpgroup) + 16 * warp;  // the warp's first token
  const int own = HALF ? warpgroup * Own::UNITS : 0;        // its first unit
  Pairs<PAIRS> pairs[2][Own::TILES];
  Active<PAIRS> active[2][Own::TILES];
  #pragma unroll
  for (int i = 0; i < Own::UNITS / 4; i++)
    pairs[i % 2][i / 2 / PAIRS][i / 2 % PAIRS] = pack_pair(d[2 * i], d[2 * i + 1]);
  #pragma unroll
  for (int i = 0; i < 2 * Own::TILES; i++)
    active[i % 2][i / 2] = active_of<PAIRS>(pairs[i % 2][i / 2]);
  if (Own::SHARED_TILE) {
    const u32 counts = words + WORDS_BYTES + 4 * (row + lane / 4);  // 64 per warpgroup
    #pragma unroll
    for (int half = 0; half < 2; half++)
      if (lane % 4 == 0)
        st_shared_u32(counts + 4 * (64 * warpgroup + 8 * half), active[half][0].count);
    consumers_sync();
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const int other = ld_shared_u32(counts + 4 * (64 * (1 - warpgroup) + 8 * half));
      active[half][0].count += other;
      if (warpgroup) active[half][0].before += other;
    }
  } else {
    __syncwarp();  // the words of the previous CTA tile have been read
  }
  #pragma unroll
  for (int half = 0; half < 2; half++) {
    const int token = row + lane / 4 + 8 * half;
    #pragma unroll
    for (int i = 0; i < Own::TILES; i++) {
      const Active<PAIRS>& a = active[half][i];
      const int at = own + i * TILE, unit = tile.unit + at + 2 * (lane % 4);
      const u32 place = words + 4 * (token * PITCH + at / TILE * WORDS);
      if (lane % 4 == 0) st_shared_u32(place, a.count);
      put_entries<PAIRS>(pairs[half][i], a, unit, place);
      if (a.count > CAPACITY && tile.token + token < out.m)
        put_dense<PAIRS>(pairs[half][i], unit, out, tile.token + token);
    }
  }
  if (Own::SHARED_TILE) consumers_sync();
  else __syncwarp();
  // Warpgroup 0 copies a shared tile before it arrives at the barrier of the next tile.
  if (Own::SHARED_TILE && warpgroup) return;
  copy_words(words + 4 * (row * PITCH + own / TILE * WORDS), out, tile.token + row,
             tile.unit + own, Own::TILES);
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
    Pipeline{stages}.init_barriers(1, CONSUMERS * CLUSTER);
    fence_mbarrier_init();
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  launch_dependent_grids();
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0), rank = blockIdx.x % CLUSTER;
  const int worker = blockIdx.x / CLUSTER, workers = gridDim.x / CLUSTER;
  const Schedule schedule(out, workers);
  Pipeline pipeline{stages, role == CONSUMERS, 0};  // all stages start empty
  if (role == CONSUMERS) {
    setmaxnreg_dec<40>();
    if (threadIdx.x % 128 == 0) produce(maps, out.k, schedule, pipeline, worker, workers, rank);
    __syncwarp();
  } else {
    setmaxnreg_inc<232>();
    const u32 words = stages + STAGES * STAGE_BYTES + 1024;  // after the barriers
    Sums d;
    int index = worker;
    for (; index < schedule.whole; index += workers) {
      mainloop<false>(d, pipeline, out.k, role);
      epilogue<false>(d, words, out, schedule(index, rank), role);
    }
    consumers_sync();  // words of whole tiles have been read; from here on, warpgroups share them
    for (; index < schedule.end; index += workers) {
      mainloop<true>(d, pipeline, out.k, role);
      epilogue<true>(d, words, out, schedule(index, rank), role);
    }
  }
  if (CLUSTER > 1) cluster_sync();  // the other CTA may still send boxes and arrivals here
}
