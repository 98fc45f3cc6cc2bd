// dK and dV of block-sparse attention over the transposed lists, by wgmma and TMA (Hopper):
//
//    S.T = K Q.T    P.T = 2^(scale S.T - LSE)    dP.T = V dO.T    dS.T = P.T (dP.T - delta)
//    dV += P.T dO         dK += dS.T Q
//
//   tile: 64 keys for each consumer warpgroup            step: 64 queries of one head
//
//                    dO, Q                       dO, Q: 64 queries
//                  +-------+                       +----------+
//      K, V        | 64    |         P.T, dS.T     |    64    |         dV, dK
//   +--------+     +-------+        +---------+    +----------+      +----------+
//   |   64   |  x                   | 64 x 64 |  x                =  |    64    |
//   |   64   |                      | 64 x 64 |                      |    64    |
//   +--------+                      +---------+                      +----------+
//
// The transposed scores leave P.T and dS.T in registers as wgmma takes them for A.
//
// Blocks of 16 or 32 queries are laid side by side in a step, each by a TMA box of its own. Blocks
// of 16 or 32 keys are joined in a tile of 64: its list has each block of queries that any of them
// has, and the mask zeroes what only the others have. So random blocks compute more than they need:
// at 10 %, 1.9 times as much in blocks of 32, and 3.4 times in blocks of 16.
//
// The pipeline: one CTA per SM for the whole launch. GROUPS tiles are in work at the same time,
// each with CONSUMERS warpgroups, a producer warp and a ring:
//
//    producer warp   K and V of a tile; Q 0, dO 0, Q 1, dO 1, ... of all heads of the KV head
//    consumer        dP | P | dV += | dS | dK += | S of the next step
//
//   The heads that share a KV head are walked one after the other, so dK and dV are sums in
//   registers. A tile without a block has one step of queries that do not exist: their LSE is
//   infinite, so P is zero, as it is for the queries behind the last one. LSE is in units of log2
//   (2^x). The scores of the step after a tile's last one are computed with the wrong K, and again.
//
// Cost of a step of 64 queries and 128 keys, D = 128: 8.4 MFLOP, 1.3 us of an SM at 850 TFLOP/s;
// loads of 32 KB, 0.4 us.
//
// STORES: dS.T goes to memory, too, from which attention_wgmma_stored.cu computes dQ.
//
// Macros: HEAD_DIM=64|128 BLOCK_Q BLOCK_K GROUPS CONSUMERS=1|2 SLOTS CAUSAL=0|1 BITS=0|1
// STORES=0|1, and hopper.cuh's.
// Source: PTX ISA 9.0; FlashAttention-3 (2407.08608) for the order of products.

#include "ring.cuh"
#include "warpgroup.cuh"

constexpr int ROW_BYTES = 128, HALVES = HEAD_DIM / 64;
constexpr int ROWS = 64, BOX_Q = BLOCK_Q < ROWS ? BLOCK_Q : ROWS;  // queries of a step, of an entry
constexpr int ENTRIES = ROWS / BOX_Q, PARTS = BLOCK_Q / BOX_Q;     // of a step; steps of a block
constexpr int KV_ROWS = 64 * CONSUMERS;                            // of a tile
constexpr bool JOINED = BLOCK_K < 64;  // a tile has several blocks of keys, and one list
static_assert(!JOINED || CONSUMERS == 1 && !BITS, "unwritten");
static_assert(!STORES || ENTRIES == 1 && !JOINED, "a step has one block");
constexpr int SLOT_BYTES = ROWS * HEAD_DIM * 2, KV_BYTES = KV_ROWS * HEAD_DIM * 2;
constexpr int GROUP_BYTES = 2 * KV_BYTES + SLOTS * SLOT_BYTES, STATS_BYTES = 8 * ROWS;
constexpr int WARPGROUPS = GROUPS * CONSUMERS, THREADS = 128 * (WARPGROUPS + 1);
// Flags, key, KV head; query, row and slot of an entry; where dS is stored, in 64 queries.
constexpr int NOTE_INTS = 3 + 3 * ENTRIES + STORES;
// Bits of a row of a list, beside the block of queries. JOINED: which of the blocks of keys the
// block of queries has (PRESENT), and which of these are partial (PARTLY).
constexpr int PARTIAL = 1 << 31, PRESENT = 24, PARTLY = 20;
constexpr int INDEX = JOINED ? (1 << PARTLY) - 1 : ~PARTIAL;
enum { FIRST = 1, MASKED = 2, EMPTY = 4, END = 8 };  // flags of a step; EMPTY: of no query
#define INF __int_as_float(0x7f800000)

struct Maps { TensorMap q, d_o, k, v; };  // [batch, tokens, heads * D]
// The host writes these (_wgmma_tiles.py). KV heads count through all sequences.
// present: JOINED: which blocks of keys have a block of queries of any head.
struct alignas(16) Tile { int key, kv_head, block, present; };
struct Lists {
  const Tile* tiles;
  const int *offsets, *rows, *slots;
  const unsigned char* bits;
  int* counters;  // tiles taken, workers done: zero between launches
  int tile_count, lists, blocks;
};
struct Sizes { int queries, keys, heads, kv_heads, padded; float scale, log_scale; };
struct Stats { const float *lse, *delta; };  // [batch * heads, padded]
// Where dS of each list's blocks is; a head's is `shifts` further (attention_wgmma_stored.cu).
// waits: for the predecessor, before any work (_stored.py).
struct Stored { char* scores; const int *places, *shifts; int waits; };

struct Places { u32 slots, notes, stats; };  // in shared memory
struct Slots : Places, Ring<SLOTS> {
  __device__ __forceinline__ u32 tile() const { return slots + stage * SLOT_BYTES; }
  __device__ __forceinline__ u32 note() const { return notes + stage * 4 * NOTE_INTS; }
  __device__ __forceinline__ u32 query(int entry) const { return note() + 4 * (3 + entry); }
  __device__ __forceinline__ u32 row(int entry) const { return query(entry + ENTRIES); }
  __device__ __forceinline__ u32 bits(int entry) const { return query(entry + 2 * ENTRIES); }
  __device__ __forceinline__ u32 place() const { return query(3 * ENTRIES); }
  __device__ __forceinline__ u32 lse() const { return stats + stage * STATS_BYTES; }
  __device__ __forceinline__ u32 delta() const { return lse() + 4 * ROWS; }
};
struct Resident { u32 k, v, full, empty, phase; };

// ---- producer: a warp ----

// Each lane loads one box, of an entry and half of the head.
__device__ __forceinline__ void load_slot(const TensorMap* map, const Slots& ring, int head,
                                          int query, int sequence) {
  const int lane = threadIdx.x % 32, entry = lane / HALVES, half = lane % HALVES;
  if (lane < ENTRIES * HALVES)
    tma_load(ring.tile() + (half * ROWS + entry * BOX_Q) * ROW_BYTES, map,
             head * HEAD_DIM + 64 * half, query, sequence, ring.full_barrier());
}

__device__ __forceinline__ void load_keys(const Maps& maps, const Resident& kv, int kv_head,
                                          int key, int sequence) {
  const int lane = threadIdx.x % 32, half = lane % HALVES;
  mbarrier_wait(kv.empty, kv.phase, "free K and V");
  if (lane == 0) mbarrier_arrive_expect_tx(kv.full, 2 * KV_BYTES);
  if (lane < 2 * HALVES)
    tma_load((lane < HALVES ? kv.k : kv.v) + half * KV_ROWS * ROW_BYTES,
             lane < HALVES ? &maps.k : &maps.v, kv_head * HEAD_DIM + 64 * half, key, sequence,
             kv.full);
  __syncwarp();
}

__device__ __forceinline__ void producer(const Maps& maps, const Lists& lists, const Sizes& sizes,
                                         const Stats& stats, const Stored& stored, Slots ring,
                                         Resident kv, int group) {
  const int lane = threadIdx.x % 32;
  const int e = lane / HALVES % ENTRIES;  // of the boxes that this lane loads
  const bool writes = lane % HALVES == 0 && lane < ENTRIES * HALVES;
  const int heads = sizes.heads / sizes.kv_heads;  // of a KV head
  int ticket = blockIdx.x * GROUPS + group;
  while (ticket < lists.tile_count) {
    const Tile* const tile = lists.tiles + ticket;  // few registers: read again where it is needed
    if (lane == 0) ticket = gridDim.x * GROUPS + atomicAdd(lists.counters, 1);
    const int sequence = tile->kv_head / sizes.kv_heads, kv_head = tile->kv_head % sizes.kv_heads;
    const bool ragged = tile->key + KV_ROWS > sizes.keys;
    bool first = true;
    for (int h = 0; h <= heads; h++) {  // the last time only if there was no step
      const int head = kv_head * heads + min(h, heads - 1);
      const int list = sequence * lists.lists + head * lists.lists / sizes.heads;
      const int* offsets = lists.offsets + list * lists.blocks + tile->block;
      const int begin = offsets[0];
      const int count = h < heads ? (offsets[1] - begin) * PARTS : 0;  // entries of all steps
      const int steps = h < heads ? (count + ENTRIES - 1) / ENTRIES : first;
      int at = e, next = e < count ? lists.rows[begin + e / PARTS] : 0;
      int place = STORES && e < count ? stored.places[begin + e / PARTS] : 0;
      for (int step = 0; step < steps; step++) {
        const int row = next, after = at + ENTRIES;
        next = after < count ? lists.rows[begin + after / PARTS] : 0;
        const int query = at < count ? (row & INDEX) * BLOCK_Q + at % PARTS * ROWS
                                     : sizes.padded - ROWS;
        const int of_all = sequence * sizes.heads + head;
        const int to = (place + (STORES ? stored.shifts[of_all] : 0)) * PARTS + at % PARTS;
        if (STORES && after < count) place = stored.places[begin + after / PARTS];
        ring.producer_acquire();
        const bool masked = JOINED || ragged || __any_sync(~0u, row < 0);
        if (lane == 0) {
          st_shared(ring.note(), (first ? FIRST | tile->present << PRESENT : 0) |
                                     (masked ? MASKED : 0) | (h == heads ? EMPTY : 0));
          if (first) {
            st_shared(ring.note() + 4, tile->key);
            st_shared(ring.note() + 8, tile->kv_head);
          }
          if (STORES) st_shared(ring.place(), to);
          mbarrier_arrive_expect_tx(ring.full_barrier(), SLOT_BYTES + STATS_BYTES);
        }
        if (writes) {
          st_shared(ring.query(e), query);
          st_shared(ring.row(e), row);
          if (BITS && row < 0) st_shared(ring.bits(e), lists.slots[begin + at / PARTS]);
        }
        __syncwarp();
        load_slot(&maps.q, ring, head, query, sequence);
        if (writes) {
          const u32 place = (u32)of_all * sizes.padded + query, to = 4 * BOX_Q * e;
          bulk_load(ring.lse() + to, stats.lse + place, 4 * BOX_Q, ring.full_barrier());
          bulk_load(ring.delta() + to, stats.delta + place, 4 * BOX_Q, ring.full_barrier());
        }
        __syncwarp();
        ring.advance();
        if (first) {
          load_keys(maps, kv, kv_head, tile->key, sequence);
          kv.phase ^= 1;
        }
        ring.producer_acquire();
        if (lane == 0) mbarrier_arrive_expect_tx(ring.full_barrier(), SLOT_BYTES);
        load_slot(&maps.d_o, ring, head, query, sequence);
        __syncwarp();
        ring.advance();
        first = false;
        at = after;
      }
    }
    ticket = __shfl_sync(~0u, ticket, 0);
  }
  ring.producer_acquire();
  if (lane == 0) {
    st_shared(ring.note(), END | FIRST);
    mbarrier_arrive(ring.full_barrier());
    if (atomicAdd(lists.counters + 1, 1) == gridDim.x * GROUPS - 1)
      lists.counters[0] = lists.counters[1] = 0;
  }
}

// ---- consumers: a warpgroup each, of 64 keys ----
// Lane 4 g + t of warp w has keys 16 w + g and 8 more. Its score d[4 i + 2 r + j] is that of key r
// of the two and of query 8 i + 2 t + j of the step.

// d[64 keys x 64 queries] = A[64 x D] B[64 x D].T
__device__ __forceinline__ void scores(float (&d)[ROWS / 2], u32 keys, u32 queries) {
  const u64 a = smem_descriptor(keys), b = smem_descriptor(queries);
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++)
    Wgmma<64>::multiply(d, a + ((i / 4 * KV_ROWS * ROW_BYTES + i % 4 * 32) >> 4),
                        b + ((i / 4 * ROWS * ROW_BYTES + i % 4 * 32) >> 4), i > 0);
  wgmma_commit();
}

// Zero where the mask allows no element; key: this lane's first.
__device__ __forceinline__ void mask(float (&p)[ROWS / 2], const Slots& ring, int key,
                                     const Lists& lists, const Sizes& sizes) {
  const int t = threadIdx.x % 4, block = JOINED ? key % 64 / BLOCK_K : 0;  // of keys, in the tile
  #pragma unroll
  for (int e = 0; e < ENTRIES; e++) {
    const int query = ld_shared(ring.query(e)), row = ld_shared(ring.row(e));
    const bool partial = JOINED ? row >> (PARTLY + block) & 1 : row < 0;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const int k = key + 8 * r;
      int begin = k < sizes.keys ? 0 : BOX_Q;  // of the allowed queries of the entry
      if (JOINED && !(row >> (PRESENT + block) & 1)) begin = BOX_Q;
      if (CAUSAL && partial) begin = max(begin, k - sizes.keys + sizes.queries - query);
      float* const of_entry = p + e * BOX_Q / 2 + 2 * r;
      #pragma unroll
      for (int i = 0; i < BOX_Q / 8; i++)
        #pragma unroll
        for (int j = 0; j < 2; j++)
          if (8 * i + 2 * t + j < begin) of_entry[4 * i + j] = 0.f;
      if (BITS && partial && k < sizes.keys) {
        constexpr int LINE = (BLOCK_K + 7) / 8;  // bytes of a query
        const long long line =
            (long long)ld_shared(ring.bits(e)) * BLOCK_Q + query % BLOCK_Q + 2 * t;
        const unsigned char* bytes = lists.bits + line * LINE + k % BLOCK_K / 8;
        #pragma unroll
        for (int i = 0; i < BOX_Q / 8; i++)
          #pragma unroll
          for (int j = 0; j < 2; j++)
            if (!(bytes[(8 * i + j) * LINE] >> k % 8 & 1)) of_entry[4 * i + j] = 0.f;
      }
    }
  }
}

__device__ __forceinline__ void consume(Slots ring, Resident kv, int consumer, const Lists& lists,
                                        const Sizes& sizes, char* memory, char* dk, char* dv) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int row = 64 * consumer + 16 * warp + lane / 4, t = lane % 4;  // key in the tile
  const u32 rows_at = consumer * 64 * ROW_BYTES;                       // in a tile of keys
  float k_sum[HEAD_DIM / 2], v_sum[HEAD_DIM / 2], s[ROWS / 2], dp[ROWS / 2];
  u32 p[ROWS / 4], ds[ROWS / 4];

  ring.consumer_wait();
  int flags = __shfl_sync(~0u, ld_shared(ring.note()), 0);
  while (!(flags & END)) {
    const int key = ld_shared(ring.note() + 4) + row, kv_head = ld_shared(ring.note() + 8);
    char* const to_memory = memory + (key % BLOCK_K / 64 * 4 + warp) * 2048 + lane * 16;
    const bool empty = JOINED ? !(flags >> (PRESENT + key % 64 / BLOCK_K) & 1) : flags & EMPTY;
    mbarrier_wait(kv.full, kv.phase, "K and V");
    kv.phase ^= 1;
    scores(s, kv.k + rows_at, ring.tile());
    wgmma_wait<0>();
    hold(s);
    int keep = 0;
    do {
      const Slots q = ring;
      ring.advance();
      const Slots d_o = ring;
      ring.advance();
      d_o.consumer_wait();
      scores(dp, kv.v + rows_at, d_o.tile());
      #pragma unroll
      for (int i = 0; i < ROWS / 8; i++) {
        const float2 lse = ld_shared_pair(q.lse() + (8 * i + 2 * t) * 4);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
          float* pair = s + 4 * i + 2 * r;
          pair[0] = exp2_approx(fmaf(pair[0], sizes.log_scale, -lse.x));
          pair[1] = exp2_approx(fmaf(pair[1], sizes.log_scale, -lse.y));
        }
      }
      if (flags & MASKED) mask(s, q, key, lists, sizes);
      #pragma unroll
      for (int i = 0; i < ROWS / 4; i++) p[i] = pack_pair(s[2 * i], s[2 * i + 1]);
      add_rows<ROWS>(v_sum, p, d_o.tile(), keep);
      const int place = STORES ? ld_shared(q.place()) : 0;
      wgmma_wait<1>();  // for dP
      hold(dp);
      #pragma unroll
      for (int i = 0; i < ROWS / 8; i++) {
        const float2 delta = ld_shared_pair(q.delta() + (8 * i + 2 * t) * 4);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
          const int at = 4 * i + 2 * r;
          ds[2 * i + r] = pack_pair(s[at] * (dp[at] - delta.x), s[at + 1] * (dp[at + 1] - delta.y));
        }
      }
      if (STORES && !(flags & EMPTY)) {
        char* const to = to_memory + (long long)place * (BLOCK_K / 64 * 8192);
        #pragma unroll
        for (int i = 0; i < ROWS / 16; i++) st_streaming(to + i * 512, ds + 4 * i);
      }
      add_rows<ROWS>(k_sum, ds, q.tile(), keep);
      keep = 1;
      ring.consumer_wait();
      flags = __shfl_sync(~0u, ld_shared(ring.note()), 0);
      scores(s, kv.k + rows_at, ring.tile());
      wgmma_wait<1>();  // for dV and dK
      release(q.empty_barrier());
      release(d_o.empty_barrier());
      wgmma_wait<0>();
      hold(s);
    } while (!(flags & FIRST));
    hold(k_sum);
    hold(v_sum);
    release(kv.empty);
    if (empty) {  // a NaN in K or V has reached the sums
      #pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; i++) k_sum[i] = v_sum[i] = 0.f;
    }
    const long long row_bytes = (long long)sizes.kv_heads * HEAD_DIM * 2;
    const long long to = kv_head / sizes.kv_heads * sizes.keys * row_bytes +
                         kv_head % sizes.kv_heads * HEAD_DIM * 2;
    const float scales[2] = {sizes.scale, sizes.scale}, ones[2] = {1.f, 1.f};
    store_rows<HEAD_DIM>(k_sum, scales, dk + to, key, sizes.keys, row_bytes);
    store_rows<HEAD_DIM>(v_sum, ones, dv + to, key, sizes.keys, row_bytes);
  }
}

// ---- the kernel ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
differentiate(const __grid_constant__ Maps maps, const __grid_constant__ Lists lists,
              const __grid_constant__ Stats stats, const __grid_constant__ Sizes sizes,
              const __grid_constant__ Stored stored, char* dk, char* dv) {
  extern __shared__ char shared[];
  __shared__ int notes[GROUPS][SLOTS][NOTE_INTS];
  __shared__ u64 full[GROUPS][SLOTS], empty[GROUPS][SLOTS], kv_full[GROUPS], kv_empty[GROUPS];
  const u32 base = (smem_address(shared) + 1023) & ~1023u;  // alignment for the swizzle
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  if (threadIdx.x == 0) {
    for (int g = 0; g < GROUPS; g++) {
      Slots{{}, {smem_address(full[g]), smem_address(empty[g])}}.init_barriers(1, CONSUMERS);
      mbarrier_init(smem_address(&kv_full[g]), 1);
      mbarrier_init(smem_address(&kv_empty[g]), CONSUMERS);
    }
    fence_mbarrier_init();
  }
  if (STORES && stored.waits) wait_on_dependent_grids();
  __syncthreads();
  const int group = warpgroup < WARPGROUPS ? warpgroup / CONSUMERS : min(warp, GROUPS - 1);
  const u32 group_at = base + group * GROUP_BYTES;
  Resident kv{group_at, group_at + KV_BYTES, smem_address(&kv_full[group]),
              smem_address(&kv_empty[group]), 0};
  Slots ring{{group_at + 2 * KV_BYTES, smem_address(notes[group]),
              base + GROUPS * GROUP_BYTES + group * SLOTS * STATS_BYTES},
             {smem_address(full[group]), smem_address(empty[group])}};
  if (warpgroup == WARPGROUPS) {
    setmaxnreg_dec<24>();
    ring.phase = kv.phase = 1;  // at first, everything is free
    if (warp < GROUPS) {
      producer(maps, lists, sizes, stats, stored, ring, kv, group);
    } else if (STORES && warp == GROUPS) {
      wait_on_dependent_grids();
      launch_dependent_grids();
    }
  } else {
    setmaxnreg_inc<240>();
    consume(ring, kv, warpgroup % CONSUMERS, lists, sizes, stored.scores, dk, dv);
  }
}
