// Y[m, n] = X[m, k] @ W[n, k].T, W with zeros anywhere (formats/bitmap.py), for 17 to 128 tokens.
// W is loaded as records and decoded into registers, which are wgmma's operand A. (In bitmap_mma.cu
// each warp reads X for its own 16 features, here a warpgroup reads it once for 64.)
//
//   A CTA has up to 64 ROW_GROUPS features, and all of k. It has ROW_GROUPS x PARTS warpgroups, of
//   which part p has the tiles p, p + PARTS, ... along k, and a warp that loads X. With ROW_GROUPS =
//   1 and PARTS = 2:
//
//        W                                                X.T
//        +--------+--------+--------+--------+- ...       +------+   64 columns of k at a time, in a
//        | warp 0 | warp 4 | warp 0 | warp 4 |            |      |   ring of X_STAGES for each part
//        | 16x256 |        |        |        |            +------+
//        +--------+--------+--------+--------+- ...       |      |
//        | warp 1 | warp 5 | ...                     x    +------+  =  Y.T
//        | warp 2 | warp 6 |                              | ...  |
//        | warp 3 | warp 7 |
//        +--------+--------+- ...
//
//   Neighbouring row tiles of a CTA belong to different row groups, so that all have as many.
//   A warp without a row tile multiplies zeros. At the end parts 1 and on give their sums to part 0
//   through shared memory, always added in the same order, so equal inputs give equal bits.
//
// wgmma fixes the order of k: of each 16 columns, lane q of A has the pairs q and q + 4. A record gives
// it four neighbouring pairs of each strip of 32 columns (records.cuh). So the host exchanges pairs
// of W's columns before it makes the records, and X comes by TMA as it is:
//
//     pairs of a strip of W:      0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15
//     in the records:             0 4 8 12 | 1 5 9 13 | 2 6 10 14 | 3 7 11 15       lane 0 | 1 | 2 | 3
//     instruction:                0 0 1 1
//
// Clocks of an SM for 256 weights of a warp (a step), 64 tokens: the decode as in NOTES.md, and of
// shared memory 16 / 4 for B, instead of 16 or 8.
//
// Macros from bitmap_wgmma.py: TOKENS=32|48|64|96|128, ROW_GROUPS, PARTS, STAGES, X_STAGES,
// TABLE=0|1, FP16=0|1, VALUE_BYTES=2, and the constants of records.cuh.

#include "records.cuh"
#include "wgmma_registers.cuh"

constexpr int THREADS = 32 * (WARPS + 1);
constexpr int X_COLUMNS = 64, X_BYTES = TOKENS * X_COLUMNS * 2, SUBTILES = COLUMNS / X_COLUMNS;
constexpr int X_BARRIERS = PARTS * X_STAGES;
constexpr int BARRIER_BYTES = (8 * (WARPS * STAGES + 2 * X_BARRIERS) + 15) / 16 * 16;
constexpr int NB = TOKENS / 8, OF_PART = ROW_WARPS * NB * 32;  // sums of a part, of 16 bytes

static_assert(ROW_WARPS == 4 * ROW_GROUPS && GROUP == 1 && SPLIT == 1, "a warp has a row tile");
static_assert(TOKENS % 4 == 0 && X_BYTES % 1024 == 0, "tiles of X are swizzled");

// Keep A in its registers up to here: wgmma reads them while it runs.
__device__ __forceinline__ void hold(const u32 (&a)[4]) {
  asm volatile("" :: "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}

// The warp that loads X: a thread fills the buffers in the order in which the parts need them. TMA
// writes zeros past the end of k.
__device__ __forceinline__ void load_x(const TensorMap* x, int tiles, int tokens, u32 ring,
                                       u32 full) {
  const u32 empty = full + 8 * X_BARRIERS;
  for (int number = 0, stage = 0, phase = 1; number < tiles * SUBTILES; number++) {
    for (int part = 0; part < PARTS; part++) {
      const int tile = number / SUBTILES * PARTS + part, slot = part * X_STAGES + stage;
      if (tile >= tiles) break;
      mbarrier_wait(empty + 8 * slot, phase, "X is read");
      mbarrier_arrive_expect_tx(full + 8 * slot, tokens * X_COLUMNS * 2);
      tma_load(ring + slot * X_BYTES, x, tile * COLUMNS + number % SUBTILES * X_COLUMNS, 0,
               full + 8 * slot);
    }
    if (++stage == X_STAGES) stage = 0, phase ^= 1;
  }
}

// ---- the kernel ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
multiply_records(const __grid_constant__ TensorMap x, const __grid_constant__ Weights w, u16* y,
                 int m, int n, int room) {
  extern __shared__ __align__(1024) char shared[];
  // X first: its tiles need 1024 bytes. Sums take its place at the end.
  const u32 x_ring = smem_address(shared), table = x_ring + X_BARRIERS * X_BYTES;
  const u32 records_full = table + TABLE_BYTES, x_full = records_full + 8 * WARPS * STAGES;
  const u32 x_empty = x_full + 8 * X_BARRIERS;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Range range = rows_of(blockIdx.x, w);
  const int part = warp / ROW_WARPS, own = warp % 4 * ROW_GROUPS + warp % ROW_WARPS / 4;
  const u32 full = records_full + 8 * STAGES * warp;
  const u32 ring = table + TABLE_BYTES + BARRIER_BYTES + warp * STAGES * room;
  Loader loader(w, ring, full, part, range.first + own, range.last, 1, room);
#if TABLE
  if (threadIdx.x < 16) ((Entry*)(shared + X_BARRIERS * X_BYTES))[threadIdx.x] = entry_of(threadIdx.x);
#endif
  if (threadIdx.x == 0) {
    for (int i = 0; i < WARPS * STAGES; i++) mbarrier_init(records_full + 8 * i, 1);
    for (int i = 0; i < X_BARRIERS; i++) {
      mbarrier_init(x_full + 8 * i, 1);
      mbarrier_init(x_empty + 8 * i, ROW_WARPS);
    }
  }
  fence_proxy_async();
  __syncthreads();
  if (warp == WARPS) {
    if (lane == 0) load_x(&x, w.tiles, m, x_ring, x_full);
    return;
  }

  for (int i = 0; i < STAGES; i++) loader.load(w);
  const bool mine = range.first + own < range.last;
  const u32 x_of_part = x_ring + part * X_STAGES * X_BYTES;
  float d[TOKENS / 2];
  #pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) d[i] = 0.f;
  u32 a[2][4] = {};
  int stage = 0, parity = 0, x_stage = 0, x_parity = 0, in_use = -1;
  for (int tile = part; tile < w.tiles; tile += PARTS) {
    const u32 record = ring + stage * room;
    Stream stream = stream_at(record);
    if (mine) {
      mbarrier_wait(full + 8 * stage, parity, "a record");
      stream = stream_at(join_tail(record));
    }
    __syncwarp();
    #pragma unroll 1
    for (int sub = 0; sub < SUBTILES; sub++) {
      const Word word = word_of(mine ? load_32(record + 4 * lane + 128 * sub) : 0);
      mbarrier_wait(x_full + 8 * (part * X_STAGES + x_stage), x_parity, "X");
      const u64 b = smem_descriptor(x_of_part + x_stage * X_BYTES);
      #pragma unroll
      for (int at = 0; at < 4; at++) {
        decode(a[at % 2], stream, word, at, table);
        wgmma_fence();
        WGMMA_A(TOKENS, a[at % 2], b + (at * 32 >> 4));
        wgmma_commit();
        wgmma_wait<1>();
        hold(a[(at + 1) % 2]);
        if (at == 0 && in_use >= 0 && lane == 0) mbarrier_arrive(x_empty + 8 * in_use);
      }
      pass(stream, word);
      in_use = part * X_STAGES + x_stage;
      if (++x_stage == X_STAGES) x_stage = 0, x_parity ^= 1;
    }
    fence_proxy_async();
    __syncwarp();
    loader.load(w);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  wgmma_wait<0>();
  hold(a[1]);

  // ---- the sums of the parts, and Y ----
  float4* mine_of = (float4*)shared + warp % ROW_WARPS * NB * 32 + lane;
  if (PARTS > 1) {
    multiplying_warps_sync();  // all have read X and their records
    if (part > 0)
      #pragma unroll
      for (int j = 0; j < NB; j++)
        mine_of[(part - 1) * OF_PART + j * 32] =
            float4{d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
    multiplying_warps_sync();
    if (part > 0) return;
  }
  if (!mine) return;
  const int feature = (range.first + own) * ROWS + lane / 4, token = lane % 4 * 2;
  u16* to = y + (u64)token * n + feature;
  #pragma unroll
  for (int j = 0; j < NB; j++, to += 8 * n) {
    float* s = d + 4 * j;
    for (int p = 0; p < PARTS - 1; p++) add(s, mine_of[p * OF_PART + j * 32]);
    #pragma unroll
    for (int e = 0; e < 4; e++)
      if (8 * j + token + e % 2 < m && feature + e / 2 * 8 < n)
        to[e % 2 * n + e / 2 * 8] = rounded(s[e]);
  }
}
