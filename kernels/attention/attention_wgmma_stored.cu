// dQ of block-sparse attention from stored dS, by wgmma and TMA (Hopper):
//
//    delta = sum(dO O)    LSE in units of log2      weigh_rows, before attention_wgmma_backward.cu
//    dQ = scale dS K                                multiply_stored, after it
//
// attention_wgmma_backward.cu stores dS.T of each 64 keys x 64 queries, 8 KB, as its registers have
// it. Lane 4 g + t of warp w has keys 16 w + g and 8 more: for each 16 queries the 16 bytes
//
//    queries 2 t, 2 t + 1 of key g | of key g + 8 | queries 2 t + 8, 2 t + 9 of key g | of key g + 8
//
// so that a warp stores 512 contiguous bytes at a time. movmatrix transposes each 8 x 8 for wgmma.
// The stored blocks of a block of queries follow each other as its list does, part by part of 64
// queries, and in a part by 64 keys:
//
//    place of the block | 64 queries of it | 64 keys of it | 8 KB
//
// multiply_stored: a CTA for a tile of 64 queries for each of its warpgroups, which share K. The
// first warp also loads K and dS of later steps into a ring of SLOTS. Several CTAs share an SM, so
// one waits for memory while the products of another run.
//
// Cost of a step of 64 queries and 64 keys, D = 128: 1 MFLOP, 0.16 us of an SM at 850 TFLOP/s; 8 KB
// from memory, 0.26 us of an SM's share of 4.2 TB/s; 16 KB of K from L2, for one or two warpgroups.
//
// Macros: HEAD_DIM=64|128 BLOCK_Q BLOCK_K WARPGROUPS=1|2 SLOTS CTAS (of an SM), and hopper.cuh's.
// Source: PTX ISA 9.0.

#include "hopper.cuh"
#include "mma.cuh"
#include "warpgroup.cuh"

constexpr int ROW_BYTES = 128, HALVES = HEAD_DIM / 64, SIDE = 64;
constexpr int Q_PARTS = BLOCK_Q / SIDE, K_PARTS = BLOCK_K / SIDE;
constexpr int K_BYTES = SIDE * HEAD_DIM * 2, SCORE_BYTES = SIDE * SIDE * 2;
constexpr int SLOT_BYTES = K_BYTES + WARPGROUPS * SCORE_BYTES;
constexpr int THREADS = 128 * WARPGROUPS, PARTIAL = 1 << 31;  // PARTIAL: of a column
constexpr int LANES = HEAD_DIM / 8;  // that read a row, 16 bytes each
#define INF __int_as_float(0x7f800000)

// The host writes these (_wgmma_tiles.py). Heads count through all sequences.
struct alignas(16) Tile { int first, count, query, head; };
struct Lists { const Tile* tiles; const int *columns, *shifts; };  // shifts: of a head's places
// waits: all CTAs, for the predecessor; else only the last one, before the successor may start.
struct Sizes { int queries, keys, heads, kv_heads; float scale; int waits; };
// lse_2 and delta have `padded` rows for each head.
struct Stats { const float* lse; float *lse_2, *delta; int padded, queries, heads, rows; };

extern "C" __global__ void __launch_bounds__(256)
weigh_rows(const uint4* o, const uint4* d_o, const __grid_constant__ Stats stats) {
  const int row = (blockIdx.x * 256 + threadIdx.x) / LANES, lane = threadIdx.x % LANES;
  launch_dependent_grids();
  const long long at = (long long)min(row, stats.rows - 1) * LANES + lane;
  const uint4 x = o[at], y = d_o[at];
  const u32 pairs[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
  float sum = 0.f;
  #pragma unroll
  for (int i = 0; i < 4; i++)
    sum += to_float(pairs[0][i] & 0xffff) * to_float(pairs[1][i] & 0xffff) +
           to_float(pairs[0][i] >> 16) * to_float(pairs[1][i] >> 16);
  #pragma unroll
  for (int by = 1; by < LANES; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
  if (lane || row >= stats.rows) return;
  const int token = row / stats.heads, query = token % stats.queries;
  const int head = token / stats.queries * stats.heads + row % stats.heads;
  const float lse = stats.lse[(long long)head * stats.queries + query];
  const long long place = (long long)head * stats.padded + query;
  stats.lse_2[place] = lse == -INF ? INF : lse * 1.44269504f;
  stats.delta[place] = sum;
}

// The copies of a tile's steps into the ring, by the first warp: each lane has one of them.
struct Loader {
  const TensorMap* map;
  const char* scores;  // of the tile's first block, for this lane
  const int* columns;  // of the tile
  int column, sequence, key;  // key: of the step that is loaded next

  __device__ __forceinline__ void look(int step, int steps) {
    if (step < steps)
      key = (columns[step / K_PARTS] & ~PARTIAL) * BLOCK_K + step % K_PARTS * SIDE;
  }
  __device__ __forceinline__ void load(int step, int steps, u32 slots, u32 full, u32 empty) {
    const int lane = threadIdx.x % 32, slot = step % SLOTS;
    const u32 to = slots + slot * SLOT_BYTES, barrier = full + 8 * slot;
    mbarrier_wait(empty + 8 * slot, step / SLOTS % 2 ^ 1, "a free slot");
    if (lane == 0) mbarrier_arrive_expect_tx(barrier, SLOT_BYTES);
    __syncwarp();
    if (lane < HALVES)
      tma_load(to + lane * SIDE * ROW_BYTES, map, column + 64 * lane, key, sequence, barrier);
    else if (lane < HALVES + WARPGROUPS)
      bulk_load(to + K_BYTES + (lane - HALVES) * SCORE_BYTES,
                scores + ((long long)step / K_PARTS * Q_PARTS * K_PARTS + step % K_PARTS) *
                             SCORE_BYTES,
                SCORE_BYTES, barrier, evict_first());
    __syncwarp();
    look(step + 1, steps);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
multiply_stored(const __grid_constant__ TensorMap k, const __grid_constant__ Lists lists,
                const char* scores, char* out, const __grid_constant__ Sizes sizes) {
  extern __shared__ char shared[];
  __shared__ u64 full[SLOTS], empty[SLOTS];
  const u32 slots = (smem_address(shared) + 1023) & ~1023u;  // alignment for the swizzle
  const u32 all_full = smem_address(full), all_empty = smem_address(empty);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      mbarrier_init(smem_address(&full[i]), 1);
      mbarrier_init(smem_address(&empty[i]), 4 * WARPGROUPS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (sizes.waits || blockIdx.x == gridDim.x - 1) wait_on_dependent_grids();
  launch_dependent_grids();
  const Tile tile = lists.tiles[blockIdx.x];
  const int* const columns = lists.columns + tile.first;
  int steps = tile.count * K_PARTS;
  if (tile.count) {  // behind the last key of all, nothing is stored
    const int last = columns[tile.count - 1] & ~PARTIAL;
    steps += min(0, (sizes.keys - last * BLOCK_K + SIDE - 1) / SIDE - K_PARTS);
  }
  const int part = tile.query % BLOCK_Q / SIDE + lane - HALVES, head = tile.head % sizes.heads;
  const long long place = tile.first + lists.shifts[tile.head];
  Loader loader{&k, scores + (place * Q_PARTS + part) * K_PARTS * SCORE_BYTES, columns,
                head / (sizes.heads / sizes.kv_heads) * HEAD_DIM, tile.head / sizes.heads, 0};
  if (warp == 0) {
    loader.look(0, steps);
    for (int step = 0; step < min(SLOTS - 1, steps); step++)
      loader.load(step, steps, slots, all_full, all_empty);
  }

  float d[HEAD_DIM / 2];  // dQ
  u32 ds[SIDE / 4];
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; i++) d[i] = 0.f;
  for (int step = 0; step < steps; step++) {
    if (warp == 0 && step + SLOTS - 1 < steps)
      loader.load(step + SLOTS - 1, steps, slots, all_full, all_empty);
    const int slot = step % SLOTS;
    const u32 tile_at = slots + slot * SLOT_BYTES;
    const u32 from = tile_at + K_BYTES + warp / 4 * SCORE_BYTES + warp % 4 * 512 + lane * 16;
    mbarrier_wait(all_full + 8 * slot, step / SLOTS % 2, "K and dS");
    #pragma unroll
    for (int i = 0; i < SIDE / 16; i++) {
      const uint4 words = ld_shared_quad(from + i * 2048);
      ds[4 * i] = movmatrix_trans(words.x);
      ds[4 * i + 1] = movmatrix_trans(words.z);
      ds[4 * i + 2] = movmatrix_trans(words.y);
      ds[4 * i + 3] = movmatrix_trans(words.w);
    }
    add_rows<SIDE>(d, ds, tile_at);
    wgmma_wait<0>();
    hold(d);
    if (lane == 0) mbarrier_arrive(all_empty + 8 * slot);
  }
  const long long row_bytes = (long long)sizes.heads * HEAD_DIM * 2;
  char* to = out + tile.head / sizes.heads * sizes.queries * row_bytes + head * HEAD_DIM * 2;
  const float scales[2] = {sizes.scale, sizes.scale};
  store_rows<HEAD_DIM>(d, scales, to, tile.query + 16 * warp + lane / 4, sizes.queries, row_bytes);
}
