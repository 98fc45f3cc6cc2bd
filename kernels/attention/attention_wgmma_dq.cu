// dQ of block-sparse attention, and the sums that dK and dV need, by wgmma and TMA (Hopper):
//
//    S = Q K.T    P = 2^(scale S - LSE)    dP = dO V.T    dS = P (dP - delta)    dQ = scale dS K
//
// The walk is that of attention_wgmma.cu, which draws it: a tile of 64 queries for each warpgroup,
// a step of KEYS keys. Q and dO are in registers. While dS K of a step runs, the consumer computes
// dS of the next one. delta = sum(dO O) of a row comes from the same tiles; it and the LSE for exp2
// go to memory for attention_wgmma_backward.cu, which runs next. No sum depends on the order of
// CTAs.
//
//    ring     K 0, V 0, K 1, V 1, ...
//    consumer S 0, dP 0 | S 1, dP 1, dQ += dS 0 K 0 | S 2, dP 2, dQ += dS 1 K 1 | ...
//
// Registers of a lane, D = 128 and KEYS = 64: S 32, dP 32, dS 16, dQ 64, Q 32, dO 32.
// Macros: as attention_wgmma.cu. Source: PTX ISA 9.0.

#include "ring.cuh"
#include "mma.cuh"
#include "warpgroup.cuh"
constexpr int QUERY_MAPS = 3, SHARED_Q = 0, LAGGING = 0;  // Q, dO, O
constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
#include "walk.cuh"

// lse_2 and delta have `padded` rows for each head.
struct Stats { const float* lse; float *lse_2, *delta; int padded; };
struct Row { float lse, delta; };

// Take a tile: Q and dO to registers; delta and LSE of this lane's two rows.
__device__ __forceinline__ void take(u32 (&q)[HEAD_DIM / 4], u32 (&d_o)[HEAD_DIM / 4],
                                     Row (&rows)[2], const Buffer& buffer, int consumer, u32 note,
                                     int row, const Stats& stats, const Sizes& sizes) {
  const u32 tile = buffer.tile + consumer * 64 * HEAD_DIM * 2;
  const int query = ld_shared(note + 4) + row % SPAN, head = ld_shared(note + 8) + row / SPAN;
  queries_to_registers(d_o, tile + Q_BYTES);
  queries_to_registers(q, tile + 2 * Q_BYTES);  // its registers hold O until delta is known
  float sums[2] = {0.f, 0.f};
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 4; i++)
    sums[i % 2] += to_float(q[i] & 0xffff) * to_float(d_o[i] & 0xffff) +
                   to_float(q[i] >> 16) * to_float(d_o[i] >> 16);
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = sums[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const bool inside = query + 8 * r < sizes.queries;
    const float lse =
        inside ? stats.lse[(long long)head * sizes.queries + query + 8 * r] : -INF;
    rows[r] = Row{lse == -INF ? INF : lse * 1.44269504f, sum};
    if (inside && threadIdx.x % 4 == 0) {
      const long long place = (long long)head * stats.padded + query + 8 * r;
      stats.lse_2[place] = rows[r].lse;
      stats.delta[place] = sum;
    }
  }
  queries_to_registers(q, tile);
}

// dS in fp32, in place of S.
__device__ __forceinline__ void differentiate(float (&s)[KEYS / 2], const float (&dp)[KEYS / 2],
                                              const Row (&rows)[2], float log_scale) {
  #pragma unroll
  for (int i = 0; i < KEYS / 2; i++) {
    const Row& row = rows[i / 2 % 2];
    s[i] = exp2_approx(fmaf(s[i], log_scale, -row.lse)) * (dp[i] - row.delta);
  }
}

__device__ __forceinline__ void store(const float (&d)[HEAD_DIM / 2], u32 note, int row,
                                      const Sizes& sizes, char* out) {
  const int query = ld_shared(note + 4) + row % SPAN, head = ld_shared(note + 8) + row / SPAN;
  const long long row_bytes = (long long)sizes.heads * HEAD_DIM * 2;
  const float scale = sizes.scale * 0.69314718f, scales[2] = {scale, scale};
  char* to = out + head / sizes.heads * sizes.queries * row_bytes +
             head % sizes.heads * HEAD_DIM * 2;
  store_rows<HEAD_DIM>(d, scales, to, query, sizes.queries, row_bytes);
}

__device__ __forceinline__ void consume(Slots ring, Buffer buffer, int consumer, const Lists& lists,
                                        const Sizes& sizes, const Stats& stats, char* out) {
  const int row = 64 * consumer + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;  // in the tile
  const int barrier = 3 + threadIdx.x / 128;  // of this warpgroup
  float s[KEYS / 2], dp[KEYS / 2], dq[HEAD_DIM / 2];
  u32 ds[KEYS / 4], q[HEAD_DIM / 4], d_o[HEAD_DIM / 4];
  Row rows[2];

  ring.consumer_wait();
  int flags = __shfl_sync(~0u, ld_shared(ring.note()), 0);
  if (flags & END) return;
  Slots k = ring;
  ring.advance();
  mbarrier_wait(buffer.full, buffer.phase, "Q");
  buffer.phase ^= 1;
  take(q, d_o, rows, buffer, consumer, k.note(), row, stats, sizes);
  ring.consumer_wait();
  if (consumer == 1) give_turn(1);
  take_turn(consumer);
  multiply_keys(s, q, k.tile());
  multiply_keys(dp, d_o, ring.tile());
  wgmma_commit();
  give_turn(consumer);
  wgmma_wait<0>();
  hold(s);
  hold(dp);
  if (flags & MASKED) mask(s, k.note(), row, lists, sizes);
  release(ring.empty_barrier());
  release(buffer.empty);
  ring.advance();
  differentiate(s, dp, rows, sizes.scale);
  #pragma unroll
  for (int i = 0; i < KEYS / 4; i++) ds[i] = pack_pair(s[2 * i], s[2 * i + 1]);
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; i++) dq[i] = 0.f;

  for (;;) {
    const Slots last = k;
    k = ring;
    ring.advance();
    k.consumer_wait();
    flags = __shfl_sync(~0u, ld_shared(k.note()), 0);
    if (flags & END) {
      k = last;
      break;
    }
    if (flags & FIRST) {
      mbarrier_wait(buffer.full, buffer.phase, "Q");
      buffer.phase ^= 1;
      take(q, d_o, rows, buffer, consumer, k.note(), row, stats, sizes);
    }
    ring.consumer_wait();
    take_turn(consumer);
    multiply_keys(s, q, k.tile());
    multiply_keys(dp, d_o, ring.tile());
    wgmma_commit();
    add_rows<KEYS>(dq, ds, last.tile());
    give_turn(consumer);
    wgmma_wait<1>();  // for S and dP
    hold(s);
    hold(dp);
    if (flags & MASKED) mask(s, k.note(), row, lists, sizes);
    release(ring.empty_barrier());
    if (flags & FIRST) release(buffer.empty);
    ring.advance();
    differentiate(s, dp, rows, sizes.scale);
    wgmma_wait<0>();
    hold(dq);
    if (flags & FIRST) {
      store(dq, last.note(), row, sizes, out);
      warpgroup_sync(barrier);  // all warps have read the note
      #pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; i++) dq[i] = 0.f;
    }
    release(last.empty_barrier());
    #pragma unroll
    for (int i = 0; i < KEYS / 4; i++) ds[i] = pack_pair(s[2 * i], s[2 * i + 1]);
  }
  add_rows<KEYS>(dq, ds, k.tile());
  wgmma_wait<0>();
  hold(dq);
  store(dq, k.note(), row, sizes, out);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
differentiate_queries(const __grid_constant__ Maps maps, const __grid_constant__ Lists lists,
                      const __grid_constant__ Stats stats, char* out,
                      const __grid_constant__ Sizes sizes) {
  walk(maps, lists, sizes, [&](Slots ring, Buffer q, int consumer) {
    consume(ring, q, consumer, lists, sizes, stats, out);
  });
}
