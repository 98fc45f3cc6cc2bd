#include "hopper.cuh"
#include "mma.cuh"
#include "warpgroup.cuh"
#ifndef STAGED
#define STAGED 1
#endif

constexpr int ROW_BYTES = 128, HALVES = HEAD_DIM / 64, ROWS = 64;  // of queries in a step
constexpr int KV_ROWS = 64 * CONSUMERS, PARTS = BLOCK_Q / ROWS;
constexpr int SLOT_BYTES = ROWS * HEAD_DIM * 2, KV_BYTES = KV_ROWS * HEAD_DIM * 2;
constexpr bool SHARED = CONSUMERS == 2 && HALVES == 2;  // both warpgroups multiply all dS, each by half of K
constexpr int DQ_KEYS = SHARED ? 128 : 64, DQ_HALVES = SHARED ? 1 : HALVES;
constexpr int DS_BYTES = KV_ROWS * ROW_BYTES, DS_BUFFERS = SUMS ? SHARED ? 2 : 1 : 0;
constexpr int STAGE_BYTES = ROWS * 64 * 4;  // of dQ, for a warpgroup
constexpr int GROUP_BYTES = 2 * KV_BYTES + DS_BUFFERS * DS_BYTES + SUMS * STAGED * CONSUMERS * STAGE_BYTES + SLOTS * SLOT_BYTES;
constexpr int WARPGROUPS = GROUPS * CONSUMERS, THREADS = 128 * (WARPGROUPS + 1);
enum { FIRST = 1, MASKED = 2, PARTLY = 4, END = 8 };  // flags of a note
constexpr int PARTIAL = 1 << 31, NOTE_INTS = 6;  // flags, row of queries, head, row of keys, slot of bits
#define INF __int_as_float(0x7f800000)

struct Maps { TensorMap q, d_o, k, v; };
struct alignas(16) Tile { int row, head, block, unused; };  // keys, KV head of all sequences, list row
struct Lists { const Tile* tiles; const int *offsets, *rows, *slots; const unsigned char* bits; int* counters; int tile_count, lists, blocks; };
struct Sizes { int queries, keys, heads, kv_heads, padded; float scale, log_scale; };
struct Stats { const float *lse, *delta; };  // [batch * heads, padded]

struct Ring {
  u32 slots, notes, stats, full, empty;
  int slot;
  u32 phase;
  __device__ __forceinline__ u32 tile() const { return slots + slot * SLOT_BYTES; }
  __device__ __forceinline__ u32 note() const { return notes + slot * 4 * NOTE_INTS; }
  __device__ __forceinline__ u32 lse() const { return stats + slot * 8 * ROWS; }
  __device__ __forceinline__ u32 delta() const { return lse() + 4 * ROWS; }
  __device__ __forceinline__ u32 full_barrier() const { return full + 8 * slot; }
  __device__ __forceinline__ u32 empty_barrier() const { return empty + 8 * slot; }
  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) { slot = 0; phase ^= 1; }
  }
};
struct Resident { u32 k, v, ds, full, empty, phase; };

// ---- producer: a warp ----

__device__ __forceinline__ void producer(const Maps& maps, const Lists& lists, const Sizes& sizes,
                                         const Stats& stats, Ring ring, Resident kv, int group) {
  const int lane = threadIdx.x % 32, workers = gridDim.x * GROUPS;
  const int per_group = sizes.heads / sizes.kv_heads;
  int ticket = blockIdx.x * GROUPS + group;
  while (ticket < lists.tile_count) {
    const Tile tile = lists.tiles[ticket];
    if (lane == 0) ticket = workers + atomicAdd(lists.counters, 1);
    const int sequence = tile.head / sizes.kv_heads, kv_head = tile.head % sizes.kv_heads;
    const bool ragged = tile.row + KV_ROWS > sizes.keys;
    bool first = true;
    for (int h = 0; h <= per_group; h++) {
      const int head = kv_head * per_group + min(h, per_group - 1);
      const int list = sequence * lists.lists + head * lists.lists / sizes.heads;
      int at = lists.offsets[list * lists.blocks + tile.block];
      int count = (lists.offsets[list * lists.blocks + tile.block + 1] - at) * PARTS;
      if (h == per_group) count = first;  // a step without queries, if there is no other
      int entry = h < per_group && count ? lists.rows[at] : 0;
      for (int step = 0; step < count; step++) {
        const int next = h < per_group && step + 1 < count ? lists.rows[at + (step + 1) / PARTS] : 0;
        const int row = h == per_group ? sizes.padded - ROWS : (entry & ~PARTIAL) * BLOCK_Q + step % PARTS * ROWS;
        mbarrier_wait(ring.empty_barrier(), ring.phase, "a free slot for Q");
        if (lane == 0) {
          st_shared(ring.note(), (first ? FIRST : 0) | (ragged || entry < 0 ? MASKED : 0) | (entry < 0 ? PARTLY : 0));
          st_shared(ring.note() + 4, row);
          st_shared(ring.note() + 8, sequence * sizes.heads + head);
          st_shared(ring.note() + 12, tile.row);
          st_shared(ring.note() + 16, tile.head);
          if (BITS && entry < 0) st_shared(ring.note() + 20, lists.slots[at + step / PARTS]);
          mbarrier_arrive_expect_tx(ring.full_barrier(), SLOT_BYTES + 8 * ROWS);
        }
        __syncwarp();
        const long long place = (long long)(sequence * sizes.heads + head) * sizes.padded + row;
        if (lane < HALVES)
          tma_load(ring.tile() + lane * ROWS * ROW_BYTES, &maps.q, head * HEAD_DIM + 64 * lane, row, sequence,
                   ring.full_barrier());
        if (lane == HALVES) bulk_load(ring.lse(), stats.lse + place, 4 * ROWS, ring.full_barrier());
        if (lane == HALVES + 1) bulk_load(ring.delta(), stats.delta + place, 4 * ROWS, ring.full_barrier());
        __syncwarp();
        ring.advance();
        if (first) {
          mbarrier_wait(kv.empty, kv.phase, "free K and V");
          if (lane == 0) mbarrier_arrive_expect_tx(kv.full, 2 * KV_BYTES);
          if (lane < 2 * HALVES) {
            const int half = lane % HALVES;
            tma_load((lane < HALVES ? kv.k : kv.v) + half * KV_ROWS * ROW_BYTES, lane < HALVES ? &maps.k : &maps.v,
                     kv_head * HEAD_DIM + 64 * half, tile.row, sequence, kv.full);
          }
          __syncwarp();
          kv.phase ^= 1;
        }
        mbarrier_wait(ring.empty_barrier(), ring.phase, "a free slot for dO");
        if (lane == 0) mbarrier_arrive_expect_tx(ring.full_barrier(), SLOT_BYTES);
        if (lane < HALVES)
          tma_load(ring.tile() + lane * ROWS * ROW_BYTES, &maps.d_o, head * HEAD_DIM + 64 * lane, row, sequence,
                   ring.full_barrier());
        __syncwarp();
        ring.advance();
        first = false;
        entry = next;
      }
    }
    ticket = __shfl_sync(~0u, ticket, 0);
  }
  mbarrier_wait(ring.empty_barrier(), ring.phase, "a free slot for the end");
  if (lane == 0) {
    st_shared(ring.note(), END | FIRST);
    mbarrier_arrive(ring.full_barrier());
    if (atomicAdd(lists.counters + 1, 1) == workers - 1) lists.counters[0] = lists.counters[1] = 0;
  }
}

// ---- consumers: a warpgroup each, of 64 rows of keys ----

// d[64 keys x 64 queries] = keys' rows of `a` times the transpose of `b`.
__device__ __forceinline__ void scores(float (&d)[ROWS / 2], u32 a_tile, u32 b_tile) {
  wgmma_fence();
  const u64 a = smem_descriptor(a_tile), b = smem_descriptor(b_tile);
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++)
    WGMMA_SS(64, a + ((i / 4 * KV_ROWS * ROW_BYTES + i % 4 * 32) >> 4),
             b + ((i / 4 * ROWS * ROW_BYTES + i % 4 * 32) >> 4), i > 0, 0, 0);
  wgmma_commit();
}
// d[64 keys x D] += p[64 keys x 64 queries] times `b` [64 queries x D].
__device__ __forceinline__ void gradients(float (&d)[HEAD_DIM / 2], const u32 (&p)[ROWS / 4], u32 b_tile, int keep) {
  wgmma_fence();
  const u64 b = smem_descriptor(b_tile, ROW_BYTES, ROWS * ROW_BYTES);
  #pragma unroll
  for (int i = 0; i < ROWS / 16; i++)
    WGMMA_RS(HEAD_DIM, p + 4 * i, b + (i * 16 * ROW_BYTES >> 4), i > 0 || keep, 1);
  wgmma_commit();
}
// d[64 queries x 64 of D] = dS.T [64 queries x keys] times K [keys x 64 of D].
__device__ __forceinline__ void query_gradients(float (&d)[32], u32 ds_tile, u32 k_half) {
  wgmma_fence();
  const u64 a = smem_descriptor(ds_tile), b = smem_descriptor(k_half);
  #pragma unroll
  for (int i = 0; i < DQ_KEYS / 16; i++)
    WGMMA_SS(64, a + (i * 16 * ROW_BYTES >> 4), b + (i * 16 * ROW_BYTES >> 4), i > 0, 1, 1);
  wgmma_commit();
}

__device__ __forceinline__ void mask(float (&p)[ROWS / 2], u32 note, int key, const Lists& lists, const Sizes& sizes) {
  const int flags = ld_shared(note), row = ld_shared(note + 4), t = threadIdx.x % 4;
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int k = key + 8 * r;
    int least = k < sizes.keys ? 0 : ROWS;
    if (CAUSAL && flags & PARTLY) least = max(least, k - sizes.keys + sizes.queries - row);
    #pragma unroll
    for (int i = 0; i < ROWS / 8; i++)
      #pragma unroll
      for (int j = 0; j < 2; j++)
        if (8 * i + 2 * t + j < least) p[4 * i + 2 * r + j] = 0.f;
    if (BITS && flags & PARTLY && k < sizes.keys) {
      constexpr int LINE = (BLOCK_K + 7) / 8;
      const unsigned char* bytes = lists.bits + ((long long)ld_shared(note + 20) * BLOCK_Q + row % BLOCK_Q + 2 * t) * LINE + k % BLOCK_K / 8;
      #pragma unroll
      for (int i = 0; i < ROWS / 8; i++)
        #pragma unroll
        for (int j = 0; j < 2; j++)
          if (!(bytes[(8 * i + j) * LINE] >> k % 8 & 1)) p[4 * i + 2 * r + j] = 0.f;
    }
  }
}

__device__ __forceinline__ void release(u32 barrier) {
  if (threadIdx.x % 128 == 0) mbarrier_arrive(barrier);
}

__device__ __forceinline__ void consumer(Ring ring, Resident kv, int consumer, int group, const Lists& lists,
                                         const Sizes& sizes, float* dq, char* dk, char* dv) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, t = lane % 4;
  const int mine = 64 * consumer + 16 * warp + lane / 4;  // row in the tile
  const u32 rows_offset = consumer * 64 * ROW_BYTES;
  float k_sum[HEAD_DIM / 2], v_sum[HEAD_DIM / 2], s[ROWS / 2], dp[ROWS / 2];
  u32 p[ROWS / 4], ds[ROWS / 4];
  const int stored = mine % 64 / 16 * 16 + lane / 8 % 2 * 8 + lane % 8;  // row of stmatrix, of 64
  const u32 ds_row = rows_offset + stored * ROW_BYTES;
  const int barrier = 1 + (SHARED ? group : threadIdx.x / 128);
  const u32 stage = kv.ds + DS_BUFFERS * DS_BYTES + consumer * STAGE_BYTES;
  const int of_warpgroup = 4 + threadIdx.x / 128;  // its named barrier
  const bool leader = threadIdx.x % 128 == 0;
  int buffer = 0;

  mbarrier_wait(ring.full_barrier(), ring.phase, "the first Q");
  int flags = __shfl_sync(~0u, ld_shared(ring.note()), 0);
  while (!(flags & END)) {
    const int key = ld_shared(ring.note() + 12) + mine, kv_head = ld_shared(ring.note() + 16);
    mbarrier_wait(kv.full, kv.phase, "K and V");
    kv.phase ^= 1;
    scores(s, kv.k + rows_offset, ring.tile());
    wgmma_wait<0>();
    hold(s);
    int keep = 0, last;
    do {
      const Ring q = ring;
      ring.advance();
      const Ring d_o = ring;
      ring.advance();
      mbarrier_wait(d_o.full_barrier(), d_o.phase, "dO");
      scores(dp, kv.v + rows_offset, d_o.tile());
      #pragma unroll
      for (int i = 0; i < ROWS / 8; i++) {
        const float2 lse = ld_shared_pair(q.lse() + (8 * i + 2 * t) * 4);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
          s[4 * i + 2 * r] = exp2_approx(fmaf(s[4 * i + 2 * r], sizes.log_scale, -lse.x));
          s[4 * i + 2 * r + 1] = exp2_approx(fmaf(s[4 * i + 2 * r + 1], sizes.log_scale, -lse.y));
        }
      }
      if (flags & MASKED) mask(s, q.note(), key, lists, sizes);
      #pragma unroll
      for (int i = 0; i < ROWS / 4; i++) p[i] = pack_pair(s[2 * i], s[2 * i + 1]);
      gradients(v_sum, p, d_o.tile(), keep);
      wgmma_wait<1>();
      hold(dp);
      #pragma unroll
      for (int i = 0; i < ROWS / 8; i++) {
        const float2 delta = ld_shared_pair(q.delta() + (8 * i + 2 * t) * 4);
        #pragma unroll
        for (int r = 0; r < 2; r++)
          ds[2 * i + r] = pack_pair(s[4 * i + 2 * r] * (dp[4 * i + 2 * r] - delta.x),
                                    s[4 * i + 2 * r + 1] * (dp[4 * i + 2 * r + 1] - delta.y));
      }
      if (SUMS) {
        if (DS_BUFFERS == 2) buffer ^= 1;
        else barrier_sync(barrier, 128);  // the last products have read dS
        #pragma unroll
        for (int i = 0; i < ROWS / 16; i++)
          stmatrix_x4(kv.ds + buffer * DS_BYTES + ds_row + ((2 * i + lane / 16 ^ stored % 8) << 4), ds + 4 * i);
        fence_proxy_async();
      }
      gradients(k_sum, ds, q.tile(), keep);
      keep = 1;
      const long long place = ((long long)ld_shared(q.note() + 8) * (sizes.padded / ROWS) + ld_shared(q.note() + 4) / ROWS) * ROWS * HEAD_DIM;
      if (SUMS) barrier_sync(barrier, SHARED ? 256 : 128);
      mbarrier_wait(ring.full_barrier(), ring.phase, "the next Q");
      flags = __shfl_sync(~0u, ld_shared(ring.note()), 0);
      last = flags & FIRST;
      float sum[DQ_HALVES][32];
      const u32 k_part = kv.k + (SHARED ? consumer * KV_ROWS * ROW_BYTES : rows_offset);
      const u32 ds_part = kv.ds + buffer * DS_BYTES + (SHARED ? 0 : rows_offset);
      if (SUMS) query_gradients(sum[0], ds_part, k_part);
      else scores(s, kv.k + rows_offset, ring.tile());  // of the next step; nothing, if K changes
      wgmma_wait<1>();  // for dV and dK
      release(q.empty_barrier());
      release(d_o.empty_barrier());
      #pragma unroll
      for (int i = 0; i < SUMS * DQ_HALVES; i++) {
        const int half = SHARED ? consumer : i;
        if (i + 1 < DQ_HALVES) query_gradients(sum[i + 1], ds_part, k_part + (i + 1) * KV_ROWS * ROW_BYTES);
        else scores(s, kv.k + rows_offset, ring.tile());
        wgmma_wait<1>();
        hold(sum[i]);
        #pragma unroll
        for (int j = 0; j < 8 - 8 * STAGED; j++) red_add(dq + place + (half * 8 + j) * 512 + threadIdx.x % 128 * 4, sum[i] + 4 * j);
        if (STAGED) {
          if (leader) tma_store_wait_read<0>();
          warpgroup_sync(of_warpgroup);
          #pragma unroll
          for (int j = 0; j < 8; j++) st_shared(stage + (j * 128 + threadIdx.x % 128) * 16, sum[i] + 4 * j);
          fence_proxy_async();
          warpgroup_sync(of_warpgroup);
          if (leader) {
            bulk_reduce_add(dq + place + half * (STAGE_BYTES / 4), stage, STAGE_BYTES);
            tma_store_commit();
          }
        }
      }
      wgmma_wait<0>();
      hold(s);
    } while (!last);
    hold(k_sum);
    hold(v_sum);
    release(kv.empty);
    const long long row_bytes = (long long)sizes.kv_heads * HEAD_DIM * 2;
    const long long to = ((long long)(kv_head / sizes.kv_heads) * sizes.keys * sizes.kv_heads + kv_head % sizes.kv_heads) * HEAD_DIM * 2;
    const float scales[2] = {sizes.scale, sizes.scale}, ones[2] = {1.f, 1.f};
    store_rows<HEAD_DIM>(k_sum, scales, dk + to, key, sizes.keys, row_bytes);
    store_rows<HEAD_DIM>(v_sum, ones, dv + to, key, sizes.keys, row_bytes);
  }
  if (SUMS && STAGED && leader) tma_store_wait();
}

// ---- the kernels ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
differentiate(const __grid_constant__ Maps maps, const __grid_constant__ Lists lists, const __grid_constant__ Stats stats,
              const __grid_constant__ Sizes sizes, float* dq, char* dk, char* dv) {
  extern __shared__ char shared[];
  __shared__ int notes[GROUPS][SLOTS][NOTE_INTS];
  __shared__ u64 full[GROUPS][SLOTS], empty[GROUPS][SLOTS], kv_full[GROUPS], kv_empty[GROUPS];
  const u32 base = (smem_address(shared) + 1023) & ~1023u;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  if (threadIdx.x == 0) {
    for (int g = 0; g < GROUPS; g++) {
      for (int i = 0; i < SLOTS; i++) {
        mbarrier_init(smem_address(&full[g][i]), 1);
        mbarrier_init(smem_address(&empty[g][i]), CONSUMERS);
      }
      mbarrier_init(smem_address(&kv_full[g]), 1);
      mbarrier_init(smem_address(&kv_empty[g]), CONSUMERS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int group = warpgroup < WARPGROUPS ? warpgroup / CONSUMERS : warp < GROUPS ? warp : 0;
  const u32 mine = base + group * GROUP_BYTES;
  Resident kv{mine, mine + KV_BYTES, mine + 2 * KV_BYTES, smem_address(&kv_full[group]), smem_address(&kv_empty[group]), 0};
  Ring ring{kv.ds + DS_BUFFERS * DS_BYTES + SUMS * STAGED * CONSUMERS * STAGE_BYTES, smem_address(notes[group]), base + GROUPS * GROUP_BYTES + group * SLOTS * 8 * ROWS,
            smem_address(full[group]), smem_address(empty[group]), 0, 0};
  if (warpgroup == WARPGROUPS) {
    setmaxnreg_dec<24>();
    ring.phase = kv.phase = 1;  // at first, everything is free
    if (warp < GROUPS) producer(maps, lists, sizes, stats, ring, kv, group);
  } else {
    setmaxnreg_inc<240>();
    consumer(ring, kv, warpgroup % CONSUMERS, group, lists, sizes, dq, dk, dv);
  }
}

// A warp for each of padded queries of each head.
extern "C" __global__ void __launch_bounds__(256)
prepare_queries(const char* o, const char* d_o, const float* lse, float* lse_2, float* delta, float* dq, const __grid_constant__ Sizes sizes, int rows) {
  const int lane = threadIdx.x % 32;
  const long long warp = (long long)blockIdx.x * 8 + threadIdx.x / 32;
  const int head = warp / sizes.padded, row = warp % sizes.padded;
  if (head >= rows) return;
  float sum = 0.f, log_sum = INF;
  if (row < sizes.queries) {
    const long long place = (((long long)(head / sizes.heads) * sizes.queries + row) * sizes.heads + head % sizes.heads) * HEAD_DIM * 2;
    for (int i = lane; i < HEAD_DIM / 2; i += 32) {
      const u32 a = ((const u32*)(o + place))[i], b = ((const u32*)(d_o + place))[i];
      sum += to_float(a & 0xffff) * to_float(b & 0xffff) + to_float(a >> 16) * to_float(b >> 16);
    }
    for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    log_sum = lse[(long long)head * sizes.queries + row];
  }
  if (lane == 0) {
    lse_2[warp] = log_sum == -INF ? INF : log_sum * 1.44269504f;
    delta[warp] = sum;
  }
  float4* zero = (float4*)(dq + warp * HEAD_DIM);
  if (lane < HEAD_DIM / 4) zero[lane] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// A CTA for each 64 queries of each head.
extern "C" __global__ void __launch_bounds__(128)
finish_queries(const float* from, char* dq, const __grid_constant__ Sizes sizes) {
  const int tiles = sizes.padded / ROWS, head = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int row = tile * ROWS + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const float4* mine = (const float4*)(from + (long long)blockIdx.x * ROWS * HEAD_DIM) + threadIdx.x;
  float d[HEAD_DIM / 2];
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 8; i++) {
    const float4 v = mine[i * 128];
    d[4 * i] = v.x; d[4 * i + 1] = v.y; d[4 * i + 2] = v.z; d[4 * i + 3] = v.w;
  }
  const long long to = ((long long)(head / sizes.heads) * sizes.queries * sizes.heads + head % sizes.heads) * HEAD_DIM * 2;
  const float scales[2] = {sizes.scale, sizes.scale};
  store_rows<HEAD_DIM>(d, scales, dq + to, row, sizes.queries, (long long)sizes.heads * HEAD_DIM * 2);
}
