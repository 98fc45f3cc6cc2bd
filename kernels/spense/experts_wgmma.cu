// Y_e = X_e @ W_e.T for all experts e in one launch, on the tiles and the pipelines of
// spense_tiles.cuh. Hopper only.
//
//   W, experts one below the other      X, sorted by expert     `ends`
//   +------------------------+          +---------------+
//   | expert 0: tile rows    |    x     | its rows      |
//   |                        |          +---------------+  ends[0]
//   +------------------------+          | no row        |  ends[1]
//   | expert 1               |          +---------------+
//   +------------------------+          | its rows      |
//   | expert 2               |          +---------------+  ends[2]
//
// A work item is 64 WARPGROUPS features and TOKENS rows of an expert. Items are numbered by expert,
// then by features, then by rows, so that the rows of an expert meet the same W while it is in the
// L2 cache. The host knows no end: each CTA counts the items of all experts in its prologue (0.5 us
// for 256 experts), and takes every gridDim.x-th item.
//
//   ends      2      2      7
//   TOKENS 4: 1 tile, 0     2 tiles of rows 2 to 5 and 6
//   starts    0      1 F    1 F     3 F        F: groups of features of an expert
//
// A tile may reach beyond its expert. Only the boxes of 16 rows that begin inside are loaded, and
// the sums of other rows, which are made of stale numbers, are not stored: TMA stores 16 rows at a
// time, and threads store the rest. Rows after the last end become zero.
//
// Macros from experts_wgmma.py: those of spense_wgmma.cu, with CLUSTER=1, SPLIT=0 and WINDOWS=0,
// and MOST_EXPERTS, a power of two from 256 on.

#include "spense_tiles.cuh"

static_assert(CLUSTER == 1 && !SPLIT && !WINDOWS && !HALF_STORES, "an item is one CTA's");

// `count` experts of `tile_rows` rows of tiles; `rows` of X; `out` has rows of `row_bytes`.
struct Experts {
  const int* ends;
  char* out;
  int count, tile_rows, rows, k_tiles, row_bytes;
};
struct Item { int expert, group, token, rows; };  // the first of `rows` rows of X

// In shared memory: where the rows of expert e - 1 end, and where the items of e start.
struct Lists { int ends[MOST_EXPERTS + 1], starts[MOST_EXPERTS + 1]; };

__device__ __forceinline__ int groups_of(const Experts& experts) {
  return (experts.tile_rows + TILE_ROWS - 1) / TILE_ROWS;
}

// A warp writes the lists. Each lane has the next EACH experts; scans over the lanes join them.
__device__ __forceinline__ void write_lists(const Experts& experts, Lists& lists) {
  constexpr int EACH = MOST_EXPERTS / 32;
  const int lane = threadIdx.x % 32, first = lane * EACH;
  int ends[EACH], most = 0, items = 0;
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int end = first + i < experts.count ? experts.ends[first + i] : 0;
    ends[i] = most = max(most, min(end, experts.rows));
  }
  int before = most;
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(~0u, before, by);
    if (lane >= by) before = max(before, other);
  }
  before = __shfl_up_sync(~0u, before, 1);
  if (lane == 0) before = 0;
  const int groups = groups_of(experts);
  int starts[EACH];
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int end = max(before, ends[i]);
    starts[i] = items;
    items += (end - before + TOKENS - 1) / TOKENS * groups;
    lists.ends[first + i + 1] = before = end;
  }
  int sum = items;
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(~0u, sum, by);
    if (lane >= by) sum += other;
  }
  #pragma unroll
  for (int i = 0; i < EACH; i++) lists.starts[first + i] = sum - items + starts[i];
  if (lane == 0) lists.ends[0] = 0;
  if (lane == 31) lists.starts[MOST_EXPERTS] = sum;
}

__device__ __forceinline__ Item item_of(const Experts& experts, const Lists& lists, int number) {
  int expert = 0;  // the last one that starts at or before the item
  #pragma unroll
  for (int step = MOST_EXPERTS / 2; step; step /= 2)
    if (lists.starts[expert + step] <= number) expert += step;
  const int begin = lists.ends[expert], rows = lists.ends[expert + 1] - begin;
  const int tiles = (rows + TOKENS - 1) / TOKENS, place = number - lists.starts[expert];
  const int token = place % tiles * TOKENS;
  return Item{expert, place / tiles, begin + token, min(rows - token, TOKENS)};
}
// The row of tiles of W for a consumer warpgroup. Past the end of an expert it is its last row.
__device__ __forceinline__ int tile_row_of(const Experts& experts, const Item& item, int consumer) {
  return item.expert * experts.tile_rows + min(item.group * TILE_ROWS + consumer, experts.tile_rows - 1);
}

// Load the boxes of X: TOKENS rows at a time, or 16 if an item has fewer.
__device__ __forceinline__ void produce_rows(const Maps& maps, const Item& item, int k_tiles,
                                             XPipeline& pipeline) {
  const int stores = (item.rows + STORE_TOKENS - 1) / STORE_TOKENS;
  for (int box = 0; box < 2 * k_tiles; box++) {
    pipeline.producer_acquire();
    const u32 barrier = pipeline.full_barrier(), to = pipeline.buffer();
    mbarrier_arrive_expect_tx(barrier, stores * STORE_TOKENS * ROW_BYTES);
    if (stores == STORES) tma_load(to, &maps.x, box * BOX_COLUMNS, item.token, barrier);
    else
      for (int i = 0; i < stores; i++)
        tma_load(to + i * STORE_TOKENS * ROW_BYTES, &maps.tail, box * BOX_COLUMNS,
                 item.token + i * STORE_TOKENS, barrier);
    pipeline.advance();
  }
}

// A warpgroup copies the first `rows` rows of a store, in the swizzle of TMA, to its row of Y.
__device__ __forceinline__ void store_rows(char* to, u32 from, int rows, int row_bytes) {
  constexpr int PIECES = EPI_ROW_BYTES / 16;  // of a row
  const int thread = threadIdx.x % 128, row = thread / PIECES, piece = thread % PIECES;
  if (row >= rows) return;
  uint4 v;
  const int place = piece ^ row / (8 / PIECES) % PIECES;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from + row * EPI_ROW_BYTES + 16 * place) : "memory");
  *(uint4*)(to + (u64)row * row_bytes + 16 * piece) = v;
}

// The consumers of all CTAs write zeros to the rows of Y after the last end.
__device__ __forceinline__ void clear_rest(const Experts& experts, const Lists& lists) {
  const u64 row_pieces = experts.row_bytes / 16, stride = gridDim.x * 128 * WARPGROUPS;
  const u64 end = experts.rows * row_pieces;
  u64 place = lists.ends[MOST_EXPERTS] * row_pieces + blockIdx.x * 128 * WARPGROUPS + threadIdx.x;
  for (; place < end; place += stride) ((uint4*)experts.out)[place] = uint4{};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
multiply_experts(const __grid_constant__ Maps maps, const __grid_constant__ Weights w,
                 const __grid_constant__ Experts experts, const __grid_constant__ Scales scales) {
  extern __shared__ char shared[];
  __shared__ Lists lists;
  const u32 stages = (smem_address(shared) + 1023) & ~1023u;  // the alignment of a swizzled tile
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
  if (threadIdx.x == 128 * WARPGROUPS) {
    init_barriers(stages);
    fence_mbarrier_init();
    prefetch_map(&maps.x), prefetch_map(&maps.out), prefetch_map(&maps.tail);
  }
  if (threadIdx.x < 32) write_lists(experts, lists);
  __syncthreads();
  const int items = lists.starts[MOST_EXPERTS];
  XPipeline x{stages, role == WARPGROUPS, 0};
  if (role == WARPGROUPS) {
    if (WARPGROUPS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x % 32 == 0 && warp <= WARPGROUPS) {
      WPipeline w_pipeline = w_pipeline_of(stages, warp - 1, true);
      const WorkTile tile{0, 0, 0, experts.k_tiles};
      for (int i = blockIdx.x; i < items; i += gridDim.x) {
        const Item item = item_of(experts, lists, i);
        if (warp == 0) produce_rows(maps, item, experts.k_tiles, x);
        else produce_w(w, tile, w_pipeline, tile_row_of(experts, item, warp - 1));
      }
    }
    __syncwarp();
  } else {
    if (WARPGROUPS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
    WPipeline w_pipeline = w_pipeline_of(stages, role, false);
    const u32 out = stages + XPipeline::END + WARPGROUPS * WPipeline::END +
                    role * EPI_STAGES * EPI_BYTES;
    const WorkTile tile{0, 0, 0, experts.k_tiles};
    Accumulators d;
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
      {
        const int row = tile_row_of(experts, item_of(experts, lists, i), role);
        mainloop(d, x, w_pipeline, w, tile, row);
      }
      const Item item = item_of(experts, lists, i);  // again, because sums fill the registers
      const int row = tile_row_of(experts, item, role);
      if (FP8) apply_scales<TOKENS / 8>(d, scales, row * ROWS, item.token);
      const int feature = (row - item.expert * experts.tile_rows) * ROWS;
      const u64 column = feature / (ROW_BYTES / EPI_ROW_BYTES) * 2;  // in bytes
      char* const rows_of_y = experts.out + (u64)item.token * experts.row_bytes + column;
      epilogue(d, out, role, [&](bool writer, int first, int stores, u32 from) {
        #pragma unroll
        for (int j = 0; j < stores; j++) {
          const int store = first + j, left = item.rows - store * STORE_TOKENS;
          const u32 at = from + j * STORE_BYTES;
          if (left >= STORE_TOKENS) {
            if (writer)
              copy_s2g(&maps.out, at, feature, item.token + store * STORE_TOKENS, store);
          } else if (left > 0) {
            store_rows(rows_of_y + (u64)store * STORE_TOKENS * experts.row_bytes, at, left,
                       experts.row_bytes);
          }
        }
        if (writer) tma_store_commit();
      });
    }
    clear_rest(experts, lists);
    if (is_writer()) tma_store_wait();
  }
}
