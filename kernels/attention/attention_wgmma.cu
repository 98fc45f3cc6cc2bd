// O = softmax(scale Q K.T) V over the blocks of a mask, by wgmma and TMA (Hopper).
//
//   tile: 64 queries for each consumer warpgroup           step: KEYS keys, of one or more blocks
//
//                 K.T: KEYS of the list                    V
//               +----+----+----+----+                 +---------+
//               | 3  | 7  | 8  | 20 |                 |    3    |
//     Q         +----+----+----+----+         P       |    7    |            O
//   +-----+     +----+----+----+----+    +---------+  |    8    |         +-----+
//   | 64  |  x  |     scores S      | -> |   e^S   |x |   20    |    =    | 64  |
//   | 64  |     |                   |    |         |  +---------+         | 64  |
//   +-----+     +-------------------+    +---------+                      +-----+
//   rows are SPAN queries of each of several heads       P stays in registers
//
// Blocks smaller than a step are laid side by side, each by a TMA box of its own. What is missing
// in the last step of a tile is read behind the last key, where TMA writes zeros, and masked. If
// the second of two blocks of 64 is missing, SHORTENS makes the step short instead: it loads and
// multiplies 64 keys.
//
// The pipeline: one CTA per SM for the whole launch. GROUPS tiles are in work at the same time,
// each with CONSUMERS warpgroups, a producer warp and a ring.
//
//    producer warp   tile from the counter -> Q, and K 0, K 1, V 0, K 2, V 1, ... into the ring
//    consumer        S 0 | S 1, O += P 0 V 0 | S 2, O += P 1 V 1 | ... across the ends of tiles
//
//   The products of a step are issued together: the scores of the next step, then P V of this one.
//   While P V runs, the consumer computes the exponentials of the next step. The first step of the
//   next tile takes part, and a tile's output is stored meanwhile. If two warpgroups share K and V,
//   they issue products in turn (named barriers), so one computes exponentials while the other's
//   products run.
//
//   A slot has a note: where the tile is, and for K also whether its step is the first or the last
//   of a tile, whether it needs a mask, and the first key of each block. The last note ends the
//   kernel. Q has buffers of its own. With two of them, the next tile's Q is loaded early.
//
// Softmax of a step, for rows r: P = 2^(scale S - base), sum += P. The base is scale times the
// largest score of the tile's first step. It moves if the P of a thread add up to more than 1024:
// base' = scale max(S), and sum and O are multiplied by 2^(base - base'). So most steps need no
// maximum and no shuffle. A row without an allowed element has sum 0, O 0 and LSE -inf. `scale`
// includes log2 e.
//
// If the tiles of the last round are few, each is split into parts of its list (Parts in walk.cuh).
// The sums of the parts are added up by the warp that is done last, in the order of the list.
//
// Tiles have rows of 128 bytes and the 128-byte swizzle (hopper.cuh): 64 columns of the head, and
// HEAD_DIM / 64 of these side by side. K is K-major. V is MN-major: the next 16 keys are 16 rows
// further (2048 bytes), the next 64 columns KEYS rows.
//
// Cost of a step, 128 queries and keys, D = 128:
//    products      8.4 MFLOP: 1.3 us of an SM at the 850 TFLOP/s of the H200's clocks
//    exponentials  16 a clock: 1024 of 2048 clocks; hidden
//    loads         64 KB: 0.85 us of an SM at the 10 TB/s of TMA from L2 to all SMs
// Tiles of 64 queries read 64 KB for half the products: 1.7 us, so loads are their bottleneck.
//
// Macros: HEAD_DIM=64|128 BLOCK_Q BLOCK_K KEYS=64|128 GROUPS CONSUMERS=1|2 SLOTS Q_BUFFERS=1|2
// SPAN=16|32|64|128 SHORTENS=0|1 SPLITS=0|1 CAUSAL=0|1 BITS=0|1 GATHERED, and hopper.cuh's.
// GATHERED is 0, or the places of a list: rows are then any queries that selected a block (walk.cuh),
// and the output is a part of each, which attention_gathered.py merges, or O if it is complete.
// Source: PTX ISA 9.0; FlashAttention-3 (2407.08608) for the order of products.

#include "ring.cuh"
#include "mma.cuh"
#include "warpgroup.cuh"

constexpr int QUERY_MAPS = 1, SHARED_Q = 1, LAGGING = 1;
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
#include "walk.cuh"

// d = Q K.T of N keys, Q in shared memory: the caller ends the group.
template <int N = KEYS>
__device__ __forceinline__ void multiply_keys(float (&d)[KEYS / 2], u32 q_tile, u32 tile) {
  const u64 q = smem_descriptor(q_tile), k = smem_descriptor(tile);
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++) {
    const u64 q_at = q + ((i / 4 * 64 * ROW_BYTES + i % 4 * 32) >> 4);
    const u64 k_at = k + ((i / 4 * KEYS * ROW_BYTES + i % 4 * 32) >> 4);
    Wgmma<N>::multiply(d, q_at, k_at, i > 0);
  }
}

constexpr float HIGHEST = 1024.f;         // of the sum of a thread's P of a row in a step
struct State { float base[2], sum[2]; };  // of a row; the sum is this lane's
#define EMPTY State{{-INF, -INF}, {0.f, 0.f}}

// P of N keys. Return whether a base of the warp moved: then `rescale` is the factor of the sums
// so far. The exponentials are computed with the old base, and again if a sum is too large;
// without a base it is infinite or NaN.
template <int N = KEYS>
__device__ __forceinline__ bool softmax(const float (&s)[KEYS / 2], u32 (&p)[KEYS / 4],
                                        State& state, float (&rescale)[2], float scale,
                                        bool first) {
  float base[2] = {state.base[0], state.base[1]}, sums[2];
  for (bool moved = first && !SHORTENS;; moved = true) {  // with both, ptxas spills
    if (moved)
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        float most = -INF;
        #pragma unroll
        for (int i = r; i < N / 4; i += 2) most = fmaxf(most, fmaxf(s[2 * i], s[2 * i + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        most = fmaxf(most * scale, state.base[r]);
        base[r] = most == -INF ? 0.f : most;  // no element is allowed yet
        rescale[r] = exp2_approx(state.base[r] - base[r]);
        state.base[r] = most;
        state.sum[r] *= rescale[r];
      }
    sums[0] = sums[1] = 0.f;
    #pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const float x = exp2_approx(fmaf(s[2 * i], scale, -base[i % 2]));
      const float y = exp2_approx(fmaf(s[2 * i + 1], scale, -base[i % 2]));
      sums[i % 2] += x;
      sums[i % 2] += y;
      p[i] = pack_pair(x, y);
    }
    const bool fits = sums[0] <= HIGHEST && sums[1] <= HIGHEST;
    if (moved || !__any_sync(~0u, !fits)) {
      state.sum[0] += sums[0];
      state.sum[1] += sums[1];
      return moved;
    }
  }
}

#if GATHERED
// Store the parts of a tile's rows, and the logarithms of their sums, to the base 2; of complete
// rows O and the LSE.
__device__ __forceinline__ void store(const float (&o)[HEAD_DIM / 2], const State& state, u32 note,
                                      int row, const Lists& lists, const Sizes& sizes,
                                      char* parts, float* logs) {
  const u32 entries = ld_shared(note + 4) + 4 * row;
  const bool complete = ld_shared(note + 12);
  char* to[2];
  float sums[2];
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int entry = ld_shared(entries + 32 * r), at = entry / GATHERED;  // head and query
    const int head = at / sizes.queries, sequence = head / sizes.heads;
    const long long line = (long long)(sequence * sizes.queries + at % sizes.queries) * sizes.heads;
    to[r] = complete ? lists.o + (line + head % sizes.heads) * (HEAD_DIM * 2)
                     : parts + (entry - sizes.first) * (HEAD_DIM * 2ll);
    if (entry < 0) to[r] = nullptr;
    float sum = state.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (threadIdx.x % 4 == 0 && entry >= 0) {
      const float log = sum == 0.f ? -INF : state.base[r] + log2f(sum);
      if (complete) lists.lse[at] = log * 0.69314718f;
      else logs[entry - sizes.first] = log;
    }
    sums[r] = sum == 0.f ? 0.f : 1.f / sum;
  }
  store_rows<HEAD_DIM>(o, sums, [&](int r) { return to[r]; });
}
#else
// note: of a slot with V of the tile
__device__ __forceinline__ void store(const float (&o)[HEAD_DIM / 2], const State& state, u32 note,
                                      int row, const Lists&, const Sizes& sizes, char* out,
                                      float* lse) {
  const int query = ld_shared(note + 4) + row % SPAN, head = ld_shared(note + 8) + row / SPAN;
  float sums[2];
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = state.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (threadIdx.x % 4 == 0 && query + 8 * r < sizes.queries)
      lse[(long long)head * sizes.queries + query + 8 * r] =
          sum == 0.f ? -INF : state.base[r] * 0.69314718f + logf(sum);
    sums[r] = sum == 0.f ? 0.f : 1.f / sum;
  }
  const long long row_bytes = (long long)sizes.heads * HEAD_DIM * 2;
  char* to = out + head / sizes.heads * sizes.queries * row_bytes +
             head % sizes.heads * HEAD_DIM * 2;
  store_rows<HEAD_DIM>(o, sums, to, query, sizes.queries, row_bytes);
}
#endif

// Keep O and the state of a part of a tile. The warp that comes last adds up all parts, in order,
// and returns true.
__device__ __forceinline__ bool merge(float (&o)[HEAD_DIM / 2], State& state, int part, int number,
                                      const Parts& parts) {
  constexpr int LINES = HEAD_DIM / 8 + 1;
  const int tile = part / parts.count, warp = number * 4 + threadIdx.x / 32 % 4;
  float4* const sums = parts.sums + number * LINES * 128 + threadIdx.x % 128;
  constexpr int EVERY = CONSUMERS * LINES * 128;  // of a part
  #pragma unroll
  for (int i = 0; i < LINES - 1; i++)
    sums[part * EVERY + i * 128] =
        make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
  sums[part * EVERY + (LINES - 1) * 128] =
      make_float4(state.base[0], state.base[1], state.sum[0], state.sum[1]);
  __threadfence();
  __syncwarp();
  int* const done = parts.counters + tile * CONSUMERS * 4 + warp;
  int before = 0;
  if (threadIdx.x % 32 == 0) before = atomicAdd(done, 1);
  if (__shfl_sync(~0u, before, 0) < parts.count - 1) return false;
  if (threadIdx.x % 32 == 0) *done = 0;
  __threadfence();
  state = EMPTY;
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; i++) o[i] = 0.f;
  for (int i = 0; i < parts.count; i++) {
    const float4* const from = sums + (tile * parts.count + i) * EVERY;
    const float4 row = __ldcg(from + (LINES - 1) * 128);
    const float bases[2] = {row.x, row.y}, more[2] = {row.z, row.w};
    float old[2], other[2];
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const float most = fmaxf(state.base[r], bases[r]), base = most == -INF ? 0.f : most;
      old[r] = exp2_approx(state.base[r] - base);
      other[r] = exp2_approx(bases[r] - base);
      state.base[r] = most;
      state.sum[r] = state.sum[r] * old[r] + more[r] * other[r];
    }
    #pragma unroll
    for (int j = 0; j < LINES - 1; j++) {
      const float4 x = __ldcg(from + j * 128);
      o[4 * j] = o[4 * j] * old[0] + x.x * other[0];
      o[4 * j + 1] = o[4 * j + 1] * old[0] + x.y * other[0];
      o[4 * j + 2] = o[4 * j + 2] * old[1] + x.z * other[1];
      o[4 * j + 3] = o[4 * j + 3] * old[1] + x.w * other[1];
    }
  }
  return true;
}

// A warpgroup of consumers: registers, and where it is.
//   s, o   scores of the next step, and O
//   row    this lane's first row in the tile
struct Consumer {
  Slots ring;
  Buffer buffer;
  const int number, row, barrier;
  const Lists& lists;
  const Sizes& sizes;
  const Parts& parts;
  char* out;
  float* lse;
  float s[KEYS / 2], o[HEAD_DIM / 2], rescale[2];
  State state;
  int flags;       // of the next step
  bool was_short;  // whether this step is

  // Wait for K of the next step, and for Q if it is a tile's first one. Return false at the end.
  __device__ __forceinline__ bool wait_for(const Slots& k) {
    k.consumer_wait();
    flags = __shfl_sync(~0u, ld_shared(k.note()), 0);
    if (flags & END) return false;
    if (flags & FIRST) mbarrier_wait(buffer.full, buffer.phase, "Q");
    return true;
  }

  // The scores are in s: mask them, and free what they were made of.
  template <int N> __device__ __forceinline__ void take_scores(const Slots& k) {
    hold(s);
    if (flags & MASKED) {
      mask<N>(s, k.note(), row, lists, sizes);
      warpgroup_sync(barrier);  // all warps have read the note
    }
    release(k.empty_barrier());
    if (!GATHERED) free_queries();
  }

  // After the last scores of a tile. If GATHERED, the entries of the tile before are free as well.
  __device__ __forceinline__ void free_queries() {
    if (flags & LAST) {
      release(buffer.empty);
      buffer.advance();
    }
  }

  // Compute the scores and P of the next step, of NEXT keys, while O += P V of this step, of THIS
  // keys, runs. If the next step is the first of its tile, store O. A short step of 64 keys is the
  // last of its tile, but not the first.
  template <int THIS, int NEXT>
  __device__ __forceinline__ void step(const u32 (&p)[KEYS / 4], u32 (&next)[KEYS / 4],
                                       const Slots& k) {
    multiply_keys<NEXT>(s, buffer.tile + number * 64 * HEAD_DIM * 2, k.tile());
    wgmma_commit();
    give_turn(number);
    ring.consumer_wait();
    add_rows<KEYS, THIS>(o, p, ring.tile());
    wgmma_wait<1>();  // for the scores
    take_scores<NEXT>(k);
    const bool first = NEXT == KEYS && (THIS < KEYS || flags & FIRST);
    State done = state;
    if (first) state = EMPTY;
    const bool moved = softmax<NEXT>(s, next, state, rescale, sizes.scale, first);
    wgmma_wait<0>();
    hold(o);
    if (first) {
      put(done);
      warpgroup_sync(barrier);
      clear();
    }
    if (GATHERED) free_queries();
    release(ring.empty_barrier());
    if (moved)
      #pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; i++) o[i] *= rescale[i / 2 % 2];
  }

  // One step: P of this one is in p, that of the next one will be in `next`. False at the end.
  __device__ __forceinline__ bool advance(const u32 (&p)[KEYS / 4], u32 (&next)[KEYS / 4]) {
    const Slots k = ring;
    ring.advance();
    if (!wait_for(k)) return false;
    take_turn(number);
    if (SHORTENS && flags & SHORT) step<KEYS, 64>(p, next, k);
    else if (SHORTENS && was_short) step<64, KEYS>(p, next, k);
    else step<KEYS, KEYS>(p, next, k);
    was_short = flags & SHORT;
    ring.advance();
    return true;
  }

  template <int N> __device__ __forceinline__ void add_last(const u32 (&p)[KEYS / 4]) {
    add_rows<KEYS, N>(o, p, ring.tile());
    wgmma_wait<0>();
    hold(o);
  }
  __device__ __forceinline__ void finish(const u32 (&p)[KEYS / 4]) {
    ring.consumer_wait();
    if (SHORTENS && was_short) add_last<64>(p);
    else add_last<KEYS>(p);
    put(state);
  }

  // O of the tile of the last V is complete, or that of a part of it.
  __device__ __forceinline__ void put(State& done) {
    const int part = SPLITS ? ld_shared(ring.note() + 12) : -1;
    if (part < 0 || merge(o, done, part, number, parts))
      store(o, done, ring.note(), row, lists, sizes, out, lse);
  }

  __device__ __forceinline__ void clear() {
    #pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) o[i] = 0.f;
  }

  __device__ __forceinline__ void run() {
    if (!wait_for(ring)) return;
    if (number == 1) give_turn(1);
    take_turn(number);
    multiply_keys(s, buffer.tile + number * 64 * HEAD_DIM * 2, ring.tile());
    wgmma_commit();
    give_turn(number);
    wgmma_wait<0>();
    take_scores<KEYS>(ring);
    if (GATHERED) free_queries();
    ring.advance();
    u32 even[KEYS / 4], odd[KEYS / 4];  // P: a step reads one and writes the other
    state = EMPTY;
    softmax(s, even, state, rescale, sizes.scale, true);
    clear();
    was_short = false;
    for (;;) {
      if (!advance(even, odd)) return finish(even);
      if (!advance(odd, even)) return finish(odd);
    }
  }
};

// ---- the kernel ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend(const __grid_constant__ Maps maps, const __grid_constant__ Lists lists, char* out,
       float* lse, const __grid_constant__ Sizes sizes, const __grid_constant__ Parts parts) {
  walk(maps, lists, sizes, [&](Slots ring, Buffer q, int consumer) {
    const int row = 64 * consumer + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const int barrier = 3 + threadIdx.x / 128;  // of this warpgroup
    Consumer{ring, q, consumer, row, barrier, lists, sizes, parts, out, lse}.run();
  }, parts);
}
