// What a CTA does with tiles of W and boxes of X, for spense_wgmma.cu, which draws it, and for
// experts_wgmma.cu: its pipelines, the main loop of a warpgroup, and the stores of the result.

#pragma once
#include "ring.cuh"
#include "scales.cuh"
#include "wgmma.cuh"

constexpr int SPARSE_BYTES = VALUE_BYTES + (FP8 ? 2048 : 1024);  // of a tile: values, metadata
constexpr int DENSE_BYTES = 2 * VALUE_BYTES;
constexpr int BOX_COLUMNS = ROW_BYTES / 2;  // the tensor map counts in 16 bits
constexpr int TILE_ROWS = WARPGROUPS * CLUSTER;  // of W in a work item: one for each warpgroup
constexpr bool GATED = ACTIVATION != 0;
[[maybe_unused]] constexpr int UNIT = WINDOWS ? 3 : 1;  // tiles of W: items start at multiples of it
constexpr int EXPANDERS = WARPGROUPS < 3 ? 3 - WARPGROUPS : 1;  // warps that make middle boxes

// The epilogue writes EPI_TOKENS tokens at a time to shared memory, and TMA STORE_TOKENS of them.
constexpr int EPI_ROW_BYTES = !GATED ? ROW_BYTES : FP8 ? 32 : 64;  // of a token, by a warpgroup
constexpr int EPI_TOKENS = TOKENS < 64 ? TOKENS : 64;
constexpr int EPI_TILES = (TOKENS + EPI_TOKENS - 1) / EPI_TOKENS;
constexpr int EPI_BYTES = EPI_TOKENS * EPI_ROW_BYTES, EPI_STAGES = EPI_TILES > 1 ? 2 : 1;
constexpr int STORES = (TOKENS + STORE_TOKENS - 1) / STORE_TOKENS;
constexpr int STORE_BYTES = STORE_TOKENS * EPI_ROW_BYTES;

// With SPLIT each CTA adds up and writes SHARE stores of an item. It keeps its own sums in
// registers and receives those of the other parts in its shared memory.
constexpr int SHARE = SPLIT ? (STORES + SPLIT - 1) / SPLIT : 0;
constexpr int SUMS_BYTES = SPLIT ? (SPLIT - 1) * SHARE * STORE_TOKENS * ROWS * 4 : 0;

// SHARED_BYTES include 1 KiB for each pipeline's mbarriers, 1 for those of sums, 1 for alignment.
constexpr int X_BYTES = TOKENS * ROW_BYTES, W_BYTES = SPARSE_BYTES;
constexpr int STAGES_BYTES = SHARED_BYTES - (WARPGROUPS + 2 + !!SPLIT) * 1024 -
                             WARPGROUPS * (SPLIT ? SUMS_BYTES : EPI_STAGES * EPI_BYTES);
__device__ constexpr int at_most(int limit, int value) { return value < limit ? value : limit; }
constexpr int TILES = at_most(AHEAD, STAGES_BYTES / (WARPGROUPS * W_BYTES + 2 * X_BYTES));
// With SPLIT = 1, more stages of W than that would take the room of a fifth box of X.
constexpr int MOST = SPLIT == 1 ? at_most(AHEAD, TILES + 1) : AHEAD;
constexpr int W_STAGES =
    at_most(MOST, (STAGES_BYTES - 2 * TILES * X_BYTES) / (WARPGROUPS * W_BYTES));
constexpr int X_STAGES =
    at_most(2 * AHEAD, (STAGES_BYTES - W_STAGES * WARPGROUPS * W_BYTES) / X_BYTES);

// Registers of a thread. All start with LAUNCHED; then producers give some to consumers.
constexpr int LAUNCHED = 65536 / THREADS / 8 * 8, PRODUCER_REGISTERS = WINDOWS ? 88 : 56;
constexpr int CONSUMER_REGISTERS = at_most(
    240, (LAUNCHED * THREADS - 128 * PRODUCER_REGISTERS) / (128 * WARPGROUPS) / 8 * 8);

static_assert(X_STAGES >= 4 && W_STAGES >= 2, "fewer would not overlap loads and wgmma");

static_assert(WARPGROUPS <= 3, "each has a warp that brings its tiles");
static_assert(!SPLIT || W_STAGES * W_BYTES >= SHARE * STORE_BYTES, "stores lie in its stages");
static_assert(TOKENS % (8 * CLUSTER) == 0 && !(WINDOWS && TOKENS % 16), "whole swizzled rows of X");
static_assert(!SPLIT || CLUSTER == 1, "a cluster shares X, or the k tiles of an item");

using Out = TensorMap;  // of Y, or of H
// TMA takes 1 to 2.6 ns for a row of a box that lies beyond X, more than for one that it reads. So
// the last tile is loaded by `tail`, whose boxes are as high as its tokens.
struct Maps { TensorMap x; Out out; TensorMap tail; };

// Tile (row, column) of W is sparse if row < sparse_rows and column < sparse_columns. It is then
// [row, column] of the sparse tiles; else [row - dense_row, column - dense_column] of the dense
// tiles, which have dense_columns per row. Sparse and dense rows are interleaved, so that all
// groups of rows cost about the same (tile_row_of).
struct Weights {
  const char *sparse, *dense;
  int rows, sparse_rows, sparse_columns, dense_row, dense_column, dense_columns;
};

// `k_tiles` k tiles from `k_tile` on, for group `group` of TILE_ROWS rows of tiles and for TOKENS
// tokens from `token` on (_stream_k.py).
struct alignas(16) WorkTile { int group, token, k_tile, k_tiles; };

// The row of tiles of W for one consumer warpgroup of a worker. Rows past the end are the last row:
// two warpgroups then compute and write the same.
__device__ __forceinline__ int tile_row_of(const Weights& w, const WorkTile& tile, int consumer) {
  const int place = min(tile.group * TILE_ROWS + consumer, w.rows - 1);
  const u32 rows = w.rows, dense = rows - w.sparse_rows, before = place * dense / rows;
  return (place + 1) * dense / rows > before ? w.sparse_rows + before : place - before;
}
__device__ __forceinline__ int sparse_k_tiles(const Weights& w, const WorkTile& tile, int row) {
  return row < w.sparse_rows ? min(max(w.sparse_columns - tile.k_tile, 0), tile.k_tiles) : 0;
}

// ---- a pipeline: a ring with its stages ----

// Shared memory: the stages, then the full barrier of each stage, then the empty barrier of each.
template <int BYTES, int STAGES>
struct Pipeline : Ring<STAGES, BehindStages<STAGES, STAGES * BYTES>> {
  static constexpr int END = STAGES * BYTES + 1024;
  __device__ __forceinline__ u32 buffer() const { return this->base + this->stage * BYTES; }
};
using XPipeline = Pipeline<X_BYTES, X_STAGES>;
using WPipeline = Pipeline<W_BYTES, W_STAGES>;

// ---- producers: one lane each ----

__device__ __forceinline__ void produce_x(const Maps& maps, const WorkTile& tile,
                                          XPipeline& pipeline, int rank, int m) {
  constexpr int LOADED = TOKENS / CLUSTER;  // tokens that this CTA loads, at most
  constexpr unsigned short MULTICAST = (1 << CLUSTER) - 1;
  const int token = tile.token + rank * LOADED, here = min(max(m - token, 0), LOADED);
  const int bytes = min(max(m - tile.token, 0), TOKENS) * ROW_BYTES;  // of all CTAs
  const TensorMap* x = here < LOADED ? &maps.tail : &maps.x;
  for (int box = 2 * tile.k_tile; box < 2 * (tile.k_tile + tile.k_tiles); box++) {
    if (WINDOWS && box % 3 == 2) {  // a middle box
      pipeline.advance();
      continue;
    }
    const u32 to = pipeline.buffer() + rank * LOADED * ROW_BYTES;
    pipeline.producer_acquire();
    mbarrier_arrive_expect_tx(pipeline.full_barrier(), bytes);
    if (here > 0) {
      const int column = (WINDOWS ? box - box / 3 : box) * BOX_COLUMNS;
      if (CLUSTER == 1) tma_load(to, x, column, token, pipeline.full_barrier());
      else tma_load_multicast(MULTICAST, to, x, column, token, pipeline.full_barrier());
    }
    pipeline.advance();
  }
}

template <int BYTES>
__device__ __forceinline__ void produce_tiles(WPipeline& pipeline, const char* from, int count) {
  for (int i = 0; i < count; i++) {
    pipeline.producer_acquire();
    mbarrier_arrive_expect_tx(pipeline.full_barrier(), BYTES);
    bulk_load(pipeline.buffer(), from + (u64)i * BYTES, BYTES, pipeline.full_barrier());
    pipeline.advance();
  }
}

__device__ __forceinline__ void produce_w(const Weights& w, const WorkTile& tile,
                                          WPipeline& pipeline, int row) {
  const int sparse = sparse_k_tiles(w, tile, row);
  const int column = tile.k_tile + sparse;  // of the first dense tile
  const u64 of_sparse = (u64)row * w.sparse_columns + tile.k_tile;
  const u64 of_dense = (u64)(row - w.dense_row) * w.dense_columns + column - w.dense_column;
  produce_tiles<SPARSE_BYTES>(pipeline, w.sparse + of_sparse * SPARSE_BYTES, sparse);
  produce_tiles<VALUE_BYTES>(pipeline, w.dense + of_dense * DENSE_BYTES,
                             2 * (tile.k_tiles - sparse));
}

// ---- WINDOWS: middle boxes ----
//
//   Boxes 3 i and 3 i + 1 have 16 pieces of 16 bytes of each token: one group of 8 elements (16
//   bits) or two (8 bits). Box 3 i + 2 has the middle four elements of each group, so two pieces
//   make one:
//
//      box 3 i                                    box 3 i + 1
//      |a b c d e f g h|i j k l m n o p|...       |...         16 bits
//          \_____/         \_____/
//      |c d e f k l m n|...                       box 3 i + 2, its first piece
//
//   The eight lanes of a row read both pieces in an order in which they lie in different banks.

static_assert(!WINDOWS || WARPGROUPS < 3, "no warp is left to make middle boxes");

__device__ __forceinline__ uint4 ld_shared_uint4(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void st_shared_uint4(u32 at, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ uint2 middle_of(const uint4& piece) {
  if (FP8)
    return uint2{__byte_perm(piece.x, piece.y, 0x5432), __byte_perm(piece.z, piece.w, 0x5432)};
  return uint2{piece.y, piece.z};
}
// Write a middle box. Eight threads write a row; all arguments are the addresses of boxes. A thread
// reads BATCH rows before it writes them, because their latencies add up otherwise.
__device__ __forceinline__ void expand_box(u32 low, u32 high, u32 middle) {
  constexpr int STEP = 4 * EXPANDERS, ROUNDS = TOKENS / STEP;
  constexpr int BATCH = ROUNDS % 8 == 0 && TOKENS < 256 ? 8 : ROUNDS % 4 == 0 ? 4 : 2;
  const int thread = threadIdx.x % 128 - 32 * (WARPGROUPS + 1);
  const int piece = thread % 8, late = piece / 4;
  const u32 from = late ? high : low;
  #pragma unroll 1
  for (int start = thread / 8; start < TOKENS; start += BATCH * STEP) {
    uint2 first[BATCH], second[BATCH];
    #pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int row = start + i * STEP;
      const u32 at = from + row * ROW_BYTES + (((2 * piece + late) % 8 ^ row % 8) << 4);
      first[i] = middle_of(ld_shared_uint4(at));
      second[i] = middle_of(ld_shared_uint4(at ^ 1 << 4));
    }
    #pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int row = start + i * STEP;
      const uint2 a = first[i], b = second[i];
      st_shared_uint4(middle + row * ROW_BYTES + ((piece ^ row % 8) << 4),
                      uint4{late ? b.x : a.x, late ? b.y : a.y, late ? a.x : b.x,
                            late ? a.y : b.y});
    }
  }
}
__device__ __forceinline__ void expanders_sync() {
  asm volatile("bar.sync %0, %1;" :: "n"(WARPGROUPS + 1), "n"(32 * EXPANDERS) : "memory");
}
// Write the middle boxes of an item. `pipeline` is in the phase of a consumer.
__device__ __forceinline__ void expand_x(XPipeline& pipeline, int k_tiles) {
  const int thread = threadIdx.x % 128 - 32 * (WARPGROUPS + 1);
  for (int i = 0; i < 2 * k_tiles; i += 3) {
    int stages[3];
    u32 boxes[2];
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      pipeline.consumer_wait();
      stages[j] = pipeline.stage;
      boxes[j] = pipeline.buffer();
      pipeline.advance();
    }
    stages[2] = pipeline.stage;
    mbarrier_wait(pipeline.empty_barrier(pipeline.stage), pipeline.phase ^ 1, "an empty stage");
    expand_box(boxes[0], boxes[1], pipeline.buffer());
    fence_proxy_async();
    expanders_sync();
    if (thread == 0) mbarrier_arrive(pipeline.full_barrier());
    #pragma unroll
    for (int j = 0; j < 3; j++) {
      if (CLUSTER == 1 && thread == 0) mbarrier_arrive(pipeline.empty_barrier(stages[j]));
      if (CLUSTER > 1 && thread < CLUSTER)
        mbarrier_arrive_cluster(pipeline.empty_barrier(stages[j]), thread);
    }
    pipeline.advance();
  }
}

// ---- wgmma ----

using Accumulators = float[8 * STORES];
constexpr int DESC_32_BYTES = 32 >> 4, DESC_64_BYTES = 64 >> 4;  // steps of an smem descriptor

__device__ __forceinline__ void mma_sparse(Accumulators& d, u64 w, u64 x, const uint2& metadata) {
  wgmma_fence();
  Wgmma<TOKENS>::multiply_sparse(d, w, x, metadata.x);
  Wgmma<TOKENS>::multiply_sparse(d, w + DESC_32_BYTES, x + DESC_64_BYTES, metadata.y);
  wgmma_commit();
}
__device__ __forceinline__ void mma_dense(Accumulators& d, u64 w, u64 x) {
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < 4; i++)
    Wgmma<TOKENS>::multiply(d, w + i * DESC_32_BYTES, x + i * DESC_32_BYTES);
  wgmma_commit();
}

// Load a thread's metadata for the two wgmma.sp of half a tile. At 16 bits the instruction reads
// the first two of every four lanes (selector 0). The other two lanes load the same words.
__device__ __forceinline__ uint2 load_metadata(u32 tile, int half) {
  const int thread = threadIdx.x % 128;
  const int place = FP8 ? thread : thread / 4 * 2 + thread % 2;
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y) : "r"(tile + VALUE_BYTES + 16 * place + 8 * half) : "memory");
  return v;
}
// Make the compiler keep the metadata in its registers up to here.
__device__ __forceinline__ void fence_metadata(const uint2& v) {
  asm volatile("" :: "r"(v.x), "r"(v.y));
}

// ---- consumers: the main loop of a warpgroup ----

struct InFlight { int x, w; };  // stages that the wgmma in flight read; -1 for none

// Release both stages. The empty barrier of X counts one arrival of each warpgroup of each CTA that
// receives the box, and one of the expanders of each. That of W counts one arrival of each warp.
__device__ __forceinline__ void consumer_release(const XPipeline& x, const WPipeline& w,
                                                 InFlight done) {
  x.warpgroup_release<CLUSTER>(done.x, done.x >= 0);
  if (done.w >= 0 && threadIdx.x % 32 == 0) mbarrier_arrive(w.empty_barrier(done.w));
}

// The wgmma of one half run while the metadata of the other half is loaded.
__device__ __forceinline__ void mainloop_sparse(Accumulators& d, XPipeline& x, WPipeline& w,
                                                int tiles) {
  InFlight in_flight{-1, -1};
  uint2 metadata[2]{};
  for (int i = 0; i < tiles; i++) {
    w.consumer_wait();
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      metadata[half] = load_metadata(w.buffer(), half);
      x.consumer_wait();
      mma_sparse(d, smem_descriptor(w.buffer()) + half * DESC_64_BYTES, smem_descriptor(x.buffer()),
                 metadata[half]);
      wgmma_wait<1>();
      fence_metadata(metadata[1 - half]);
      consumer_release(x, w, in_flight);
      in_flight = InFlight{x.stage, half ? w.stage : -1};
      x.advance();
    }
    w.advance();
  }
  wgmma_wait<0>();
  fence_metadata(metadata[1]);
  consumer_release(x, w, in_flight);
}

__device__ __forceinline__ void mainloop_dense(Accumulators& d, XPipeline& x, WPipeline& w,
                                               int halves) {
  InFlight in_flight{-1, -1};
  for (int i = 0; i < halves; i++) {
    w.consumer_wait();
    x.consumer_wait();
    mma_dense(d, smem_descriptor(w.buffer()), smem_descriptor(x.buffer()));
    wgmma_wait<1>();
    consumer_release(x, w, in_flight);
    in_flight = InFlight{x.stage, w.stage};
    x.advance();
    w.advance();
  }
  wgmma_wait<0>();
  consumer_release(x, w, in_flight);
}

// ---- epilogue: hidden units ----
//
//   A warp's 16 rows of W are 8 units of gate and the same 8 of up. Lane 4 u + q has, of 8 tokens,
//
//      gate's unit u, tokens 2 q, 2 q + 1:   s[0] s[1]       H[2 q][u]     = act(s[0]) * s[2]
//      up's                                  s[2] s[3]       H[2 q + 1][u] = act(s[1]) * s[3]
//
//   A warpgroup writes 32 units of 16 tokens, in rows of 64 bytes (16 bits) or 32 bytes (e4m3), in
//   the swizzle that TMA reads. At 16 bits stmatrix.trans puts a warp's 8 units into a row; e4m3 is
//   stored byte by byte.

__device__ __forceinline__ float activate(float g) {
  if (ACTIVATION == 1) return __fdividef(g, 1 + __expf(-g));  // 0 below -87, where it is -1e-36
  if (ACTIVATION == 4) {  // (1 + tanh(z / 2)) / 2 is 1 / (1 + exp(-z))
    const float z = 1.5957691216057308f * (g + 0.044715f * g * g * g);  // 2 sqrt(2 / pi)
    return __fdividef(g, 1 + __expf(-z));
  }
  const float relu = g <= 0 ? 0.f : g;  // NaN stays
  return ACTIVATION == 3 ? relu * relu : relu;
}
__device__ __forceinline__ void st_shared_u8(u32 at, u32 value) {
  asm volatile("st.shared.u8 [%0], %1;" :: "r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u32 cvt_e4m3x2(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
// Two matrices of 8 x 8, to the rows whose addresses lanes 0 to 15 give.
__device__ __forceinline__ void stmatrix_x2_trans(u32 row, u32 first, u32 second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               :: "r"(row), "r"(first), "r"(second) : "memory");
}

__device__ __forceinline__ u32 hidden_address(u32 tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  if (FP8) {
    const int unit = 8 * warp + lane / 4, row = lane % 4 * 2;
    return tile + row * EPI_ROW_BYTES + (unit ^ (row / 4 % 2) << 4);
  }
  const int row = lane % 16;
  return tile + row * EPI_ROW_BYTES + ((warp ^ row / 2 % 4) << 4);
}
__device__ __forceinline__ void copy_hidden_r2s(u32 address, const float* s) {  // 16 tokens
  const float a = activate(s[0]) * s[2], b = activate(s[1]) * s[3];
  const float c = activate(s[4]) * s[6], d = activate(s[5]) * s[7];
  if (FP8) {
    const u32 first = cvt_e4m3x2(a, b), second = cvt_e4m3x2(c, d);
    st_shared_u8(address, first), st_shared_u8(address + EPI_ROW_BYTES, first >> 8);
    st_shared_u8(address + 8 * EPI_ROW_BYTES, second);
    st_shared_u8(address + 9 * EPI_ROW_BYTES, second >> 8);
  } else {
    stmatrix_x2_trans(address, pack_pair(a, b), pack_pair(c, d));
  }
}

// ---- epilogue: accumulators to shared memory, STORE_TOKENS at a time; from there by TMA ----

__device__ __forceinline__ u32 epilogue_address(u32 tile) {
  return GATED ? hidden_address(tile) : stmatrix_address(tile);
}
__device__ __forceinline__ void copy_r2s(u32 address, const float* d) {
  if (GATED) copy_hidden_r2s(address, d);
  else stmatrix_x4_trans(address, d);
}
// If the last store of a tile is half a store, each is written as two of 8 tokens, because those
// after the tile belong to the next one. These are twice as many, so one lane of each warp writes
// some of them; otherwise one lane writes all stores of a warpgroup.
constexpr bool HALF_STORES = TOKENS % STORE_TOKENS != 0;
__device__ __forceinline__ bool is_writer() {
  return threadIdx.x % (HALF_STORES ? 32 : 128) == 0;
}
// Write store `store` of a tile, which starts at `token`.
__device__ __forceinline__ void copy_s2g(const Out* out, u32 from, int feature, int token,
                                         int store) {
  const int column = feature / (ROW_BYTES / EPI_ROW_BYTES);  // the map counts in 16 bits
  if (HALF_STORES && store % 4 != threadIdx.x / 32 % 4) return;
  tma_store(out, from, column, token);
  if (HALF_STORES && store < STORES - 1)
    tma_store(out, from + STORE_BYTES / 2, column, token + STORE_TOKENS / 2);
}

// ---- an item ----

__device__ __forceinline__ void zero(Accumulators& d) {
  #pragma unroll
  for (int i = 0; i < 8 * STORES; i++) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[i]));
}
// Multiply a row of tiles of an item.
__device__ __forceinline__ void mainloop(Accumulators& d, XPipeline& x, WPipeline& pipeline,
                                         const Weights& w, const WorkTile& tile, int row) {
  // The shuffles show ptxas that these counts are equal in a warp; else it serialises wgmma.
  const int sparse = __shfl_sync(~0u, sparse_k_tiles(w, tile, row), 0);
  const int dense = __shfl_sync(~0u, tile.k_tiles, 0) - sparse;
  zero(d);
  mainloop_sparse(d, x, pipeline, sparse);
  mainloop_dense(d, x, pipeline, 2 * dense);
}
__device__ __forceinline__ void init_barriers(u32 stages) {
  XPipeline{stages}.init_barriers(1, (WARPGROUPS + WINDOWS) * CLUSTER);
  for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++)
    WPipeline{stages + XPipeline::END + warpgroup * WPipeline::END}.init_barriers(1, 4);  // warps
}
__device__ __forceinline__ WPipeline w_pipeline_of(u32 stages, int warpgroup, bool producer) {
  return WPipeline{stages + XPipeline::END + warpgroup * WPipeline::END, producer, 0};
}

// Write all sums of a work item. All threads call `write` for `stores` stores, from `first` on; the
// first of them is at `from`. The writers commit what they store.
template <class Write>
__device__ __forceinline__ void epilogue(const Accumulators& d, u32 out, int warpgroup,
                                         Write write) {
  const bool writer = is_writer();
  const u32 address = epilogue_address(out);
  #pragma unroll
  for (int c = 0; c < EPI_TILES; c++) {
    const int stage = c % EPI_STAGES * EPI_BYTES;
    if (writer) tma_store_wait_read<EPI_STAGES - 1>();
    // With two stages, a barrier below lies between the reads of one and the next writes to it.
    warpgroup_sync(warpgroup + 1);
    constexpr int EACH = EPI_TOKENS / STORE_TOKENS;
    const int stores = at_most(EACH, STORES - c * EACH);
    #pragma unroll
    for (int i = 0; i < EACH; i++)  // a constant, or it is not unrolled
      if (i < stores) copy_r2s(address + stage + i * STORE_BYTES, d + 8 * (c * EACH + i));
    fence_proxy_async();
    warpgroup_sync(warpgroup + 1);
    write(writer, c * EACH, stores, out + stage);
  }
}
