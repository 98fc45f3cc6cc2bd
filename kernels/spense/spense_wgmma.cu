// Y[m, n] = X[m, k] @ W[n, k].T, where part of W is 2:4 sparse and the rest is dense
// (formats/spense.py).
// One launch on Hopper's tensor cores (wgmma and wgmma.sp). Compute capability 9.0 only.
//
//   A work item is 64 WARPGROUPS features x TOKENS tokens of Y, here with two warpgroups. A k tile
//   is a tile of W: 256 bytes of k.
//
//      W, two rows of tiles               X.T                         Y.T
//      +--------+--------+--------+     +---------+                 +---------+
//      | sparse | sparse | dense  |     | 2 boxes |    warpgroup 0  | 64      |
//      |        |        |        |     +---------+       ->        | TOKENS  |
//      +--------+--------+--------+  x  | 2 boxes |  =              +---------+
//      | sparse | sparse | dense  |     +---------+    warpgroup 1  | 64      |
//      |        |        |        |     | 2 boxes |       ->        | TOKENS  |
//      +--------+--------+--------+     +---------+                 +---------+
//
// W is operand A, because only A may be sparse. One instruction takes 64 rows of W; tokens are its
// width N. Sparse and dense tiles add to the same accumulators, in fp32. A sparse tile has 9 KiB
// (16 bits) or 10 KiB (8 bits), a dense one 16 KiB. A row of tiles begins sparse and ends dense
// (split by columns), or is of one kind (split by rows). Each warpgroup has its own row of tiles.
// All warpgroups read the same X. The more of them share it, the fewer bytes an SM copies: for a
// row of tiles, a k tile and 112 tokens, 9 KiB of W and 14 of X with two warpgroups, 9 and 9 with
// three.
//
// The pipeline, for two warpgroups: 12 warps, one CTA per SM, three pipelines of stages.
//
//    warp 8     X boxes, TOKENS x 128 bytes, by TMA -----> X pipeline -----+--> warpgroups 0 and 1
//    warp 9     W tiles of warpgroup 0, by bulk copies --> W pipeline 0 ---|--> warpgroup 0
//    warp 10    W tiles of warpgroup 1 ------------------> W pipeline 1 ---+--> warpgroup 1
//    warp 11    W tiles of warpgroup 2, if there is one
//
//   A stage of a W pipeline holds a whole sparse tile (values and metadata) or half of a dense one.
//   A box of X is multiplied by half of a sparse tile (2 wgmma.sp) or by half of a dense one
//   (4 wgmma). A warpgroup keeps the wgmma of one box in flight. It releases their stages after it
//   has issued the wgmma of the next box. With CLUSTER = 2 both CTAs have the same tokens and
//   neighbouring features. Each loads half of every box of X and multicasts it to both.
//
// If there are few work items, several CTAs share the k tiles of one (stream-K, _stream_k.py). Each
// warpgroup writes its partial sums to memory. A CTA that has finished its list waits for the other
// parts of its items (the fixup). Each part then reduces all partial sums of some of the tokens, so
// the parts share this work too. The order of the reduction is fixed: equal inputs give equal bits.
// CTAs wait for one another, so all must run at the same time: the launch is cooperative.
//
// With SPLIT there are no list and no partial sums in memory. The SPLIT CTAs of a cluster share the
// k tiles of one item. At the end each sends its sums, in registers, to the shared memory of the
// CTA that adds up and writes these tokens:
//
//    part 0   k tiles 0 to 3    ==> sums --+--> part 0 adds up and writes tokens 0 to 63
//    part 1   k tiles 4 to 7    ==> sums --+--> part 1 adds up and writes tokens 64 to 111
//
// Sizes are in bytes, so the same code multiplies 16 and 8 bits. One instruction takes 32 bytes of
// each row of W, stored or dense, and 64 or 32 bytes of each token. The tensor cores accumulate fp8
// in fewer bits than fp32, as in cuBLAS with use_fast_accum. The epilogue multiplies by a scale for
// each feature and each token, if there are any. Y is then bf16.
//
// Gate and up of a gated MLP may be one W: 8 rows of gate and the same 8 of up alternate. With an
// ACTIVATION the kernel writes H[m, n / 2] = act(G) * U ("hidden units" below). G and U stay in
// registers. H is rounded once, to the operands' dtype; for fp8 that is e4m3, which saturates.
//
// Clocks of an SM for one box, TOKENS = 256 (shared memory: 128 bytes a clock):
//
//                     tensor cores   X, read by each warpgroup   W, read   both, written by copies
//    half a sparse tile        512                         512        64                 328
//    half a dense tile        1024                         512       128                 384
//
// Half a sparse tile needs 512 + 64 + 328 = 904 clocks of shared memory: 0.88 of the 1024 that half
// a dense tile needs on the tensor cores. So 2:4 cannot be twice as fast if compute is the limit.
// If memory is the limit (up to about 128 tokens), the bytes of W count: a sparse tile has 0.5625
// (16 bits) or 0.625 (8 bits) of those of a dense one.
//
// wgmma.sp reads its metadata from registers while it runs, so they must not change before it is
// done. ptxas does not ensure that for the loads of the next tile's metadata. (If it notices, it
// serialises the wgmma: warning C7513.) So each half of a tile has its own registers, which are
// loaded again only after the wgmma that read their old contents are done.
//
// With WINDOWS, W is a lifted 6:8 matrix (formats/slide.py) and X is not lifted. The warps that
// otherwise do nothing make every third box of X from the two boxes before it. Work items start and
// end at multiples of UNIT tiles, so that these three boxes are in one item ("middle boxes" below).
//
// At most AHEAD tiles of W are in flight for a warpgroup. If all stages that fit were used, 20 MB
// would be in flight at a time, and some SMs would get their tiles much later than others. With 4
// to 5 tiles the kernel is 6 % faster.
//
// Macros from spense_wgmma.py: TOKENS=16..256 by 16, or from 128 on by 8, CLUSTER=1|2, AHEAD=2...,
// WARPGROUPS=1|2|3, SPLIT=0 (a list)|1|2|3|4|5|8 (CTAs of a cluster for each item), WINDOWS=0|1,
// FP8=0|1, FP16=0|1 (0 is bf16), ACTIVATION=0 (none)|1 silu|2 relu|3 relu2|4 gelu_tanh, and the
// constants that both files share: THREADS, SHARED_BYTES, ROWS, ROW_BYTES, VALUE_BYTES, STORE_TOKENS, WORKERS. With
// WATCHDOG=1 a kernel that hangs ends and reports where.
// Source: PTX ISA 9.0, wgmma.mma_async.sp.

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

// Of SHARED_BYTES, 1 KiB for each pipeline is for mbarriers, 1 for those of sums, 1 for alignment.
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
// This is part `part` of `parts` that share these features and tokens. Their partial sums are in
// `parts` slots of the workspace, from `slot` on. `counter` counts the parts that have arrived.
struct alignas(16) Fixup { int part, parts, slot, counter; };
struct WorkItem { WorkTile tile; Fixup fixup; };
// The first work tile of each worker is a kernel argument. If the worker read it from memory, the
// first copy would start 1.3 us later.
struct First { WorkTile items[WORKERS]; int starts[WORKERS]; };
// With SPLIT, items of one group follow each other, one for each tile of tokens.
struct Items { int token_tiles, k_tiles; };

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
                                          WPipeline& pipeline, int consumer) {
  const int row = tile_row_of(w, tile, consumer), sparse = sparse_k_tiles(w, tile, row);
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

// ---- stream-K: partial sums and their reduction ----

constexpr int PARTIAL_FLOAT4S = TILE_ROWS * STORES * 2 * 128;  // of a part, all its warpgroups

// Thread 0 of a warpgroup has its first four partial sums of the item's first part here.
__device__ __forceinline__ float4* partial_sums(float4* workspace, const Fixup& fixup,
                                                int consumer) {
  return workspace + (u64)fixup.slot * PARTIAL_FLOAT4S + consumer * STORES * 2 * 128 +
         threadIdx.x % 128;
}

// A thread that reads the new count with ld_acquire also sees what the warpgroup wrote.
__device__ __forceinline__ void red_release_add_1(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(counter) : "memory");
}

// Write the partial sums of a part, and count it as arrived.
__device__ __forceinline__ void store_partial(const Accumulators& d, const Fixup& fixup,
                                              float4* workspace, int* counters, int consumer,
                                              int warpgroup) {
  float4* to = partial_sums(workspace, fixup, consumer) + (u64)fixup.part * PARTIAL_FLOAT4S;
  #pragma unroll
  for (int i = 0; i < 2 * STORES; i++)
    to[i * 128] = float4{d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
  warpgroup_sync(warpgroup + 1);
  if (threadIdx.x % 128 == 0) red_release_add_1(counters + fixup.counter * TILE_ROWS + consumer);
}

__device__ __forceinline__ int ld_acquire(const int* counter) {
  int count;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}
__device__ __forceinline__ void wait_for_parts(const int* counter, int parts) {
  for (int tries = 0; ld_acquire(counter) < parts; tries++) {
#ifdef WATCHDOG
    if (tries == 1 << 18) __assertfail("all parts", __FILE__, __LINE__, "wait_for_parts", 1);
#endif
  }
}

// Reduce all parts of stores `index` to `end`, COUNT at a time, and write the result. The partial
// sums of UNROLL parts are read at a time. With ten instead of six, 20 parts of few tokens take 0.5
// to 0.9 us less. Three warpgroups have registers for fewer.
constexpr bool ROOM = WARPGROUPS <= 2;
template <int COUNT, int UNROLL>
__device__ __forceinline__ void reduce_parts(const float4* from, int parts, int index, int end,
                                             const Scales& scales, const Out* to, u32 out,
                                             int feature, int token, int warpgroup) {
  const bool writer = is_writer();
  const u32 address = epilogue_address(out);
  for (; index < end; index += COUNT) {
    float d[8 * COUNT] = {};
    #pragma unroll UNROLL
    for (int i = 0; i < parts; i++) {
      const float4* v = from + (u64)i * PARTIAL_FLOAT4S + index * 2 * 128;
      #pragma unroll
      for (int j = 0; j < 2 * COUNT; j++)
        if (index + j / 2 < end) {
          const float4 four = __ldcg(v + j * 128);
          float* sum = d + 4 * j;
          sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
        }
    }
    if (FP8) apply_scales<2 * COUNT>(d, scales, feature, token + index * STORE_TOKENS);
    if (writer) tma_store_wait_read<0>();
    warpgroup_sync(warpgroup + 1);
    #pragma unroll
    for (int j = 0; j < COUNT; j++) copy_r2s(address + j * STORE_BYTES, d + 8 * j);
    fence_proxy_async();
    warpgroup_sync(warpgroup + 1);
    if (writer) {
      for (int j = 0; j < COUNT && index + j < end; j++)
        copy_s2g(to, out + j * STORE_BYTES, feature, token + (index + j) * STORE_TOKENS,
                 index + j);
      tma_store_commit();
    }
  }
}

// Wait for all parts, and reduce this part's share of the stores. The last part resets the counter
// to 0 for the next launch.
__device__ __forceinline__ void fixup_part(const WorkItem& item, const float4* from, int* counter,
                                           const Scales& scales, const Out* to, u32 out,
                                           int feature, int warpgroup) {
  const int part = item.fixup.part, parts = item.fixup.parts, token = item.tile.token;
  const int each = (STORES + parts - 1) / parts, reducers = (STORES + each - 1) / each;
  if (part >= reducers) return;
  const bool leader = threadIdx.x % 128 == 0;
  if (leader) wait_for_parts(counter, parts);
  warpgroup_sync(warpgroup + 1);
  const int index = part * each, end = min(index + each, STORES);
  if (each == 1)
    reduce_parts<1, ROOM ? 10 : 6>(from, parts, index, end, scales, to, out, feature, token,
                                   warpgroup);
  else
    reduce_parts<EPI_TOKENS / STORE_TOKENS, ROOM ? 3 : 1>(from, parts, index, end, scales, to, out,
                                                          feature, token, warpgroup);
  if (leader && atomicAdd(counter, 1) == parts + reducers - 1) *counter = 0;
}

// Write the result of a work item that is not cut.
__device__ __forceinline__ void epilogue(const Accumulators& d, const Out* to, u32 out, int feature,
                                         int token, int warpgroup) {
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
    if (writer) {
      #pragma unroll
      for (int i = 0; i < stores; i++)
        copy_s2g(to, out + stage + i * STORE_BYTES, feature,
                 token + c * EPI_TOKENS + i * STORE_TOKENS, c * EACH + i);
      tma_store_commit();
    }
  }
}

// ---- SPLIT: the CTAs of a cluster share the k tiles of an item ----
//
//   CTA `part` adds up and writes SHARE stores of tokens, from part * SHARE on. Each warpgroup of
//   the other CTAs sends its sums to the same warpgroup there, in the layout
//   [sender][store][2][thread] of 16 bytes. An mbarrier counts their bytes.

#if SPLIT
__device__ __forceinline__ int stores_of(int part) {
  return max(min(SHARE, STORES - part * SHARE), 0);
}
__device__ __forceinline__ int bytes_for(int part) {  // that a warpgroup receives from all others
  return (SPLIT - 1) * stores_of(part) * STORE_TOKENS * ROWS * 4;
}
// Send the sums of all stores except this CTA's own, and keep those.
__device__ __forceinline__ void exchange(const Accumulators& d, float (&own)[8 * SHARE], u32 sums,
                                         u32 received, int part) {
  #pragma unroll
  for (int owner = 0; owner < SPLIT; owner++) {
    const int place = part - (part > owner);  // among the senders
    const u32 from = sums + place * SHARE * 2 * 2048 + threadIdx.x % 128 * 16;
    const u32 to = map_shared_rank(from, owner), barrier = map_shared_rank(received, owner);
    #pragma unroll
    for (int i = 0; i < 2 * SHARE; i++) {
      const int at = 4 * (owner * 2 * SHARE + i);
      if (at >= 8 * STORES) continue;
      if (owner != part)
        st_async(to + i * 2048, float4{d[at], d[at + 1], d[at + 2], d[at + 3]}, barrier);
      else
        #pragma unroll
        for (int j = 0; j < 4; j++) own[4 * i + j] = d[at + j];
    }
  }
}
__device__ __forceinline__ float4 ld_shared_float4(u32 at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}
// Add the received sums to eight sums of a thread, those of 16 tokens.
__device__ __forceinline__ void add_received(float* d, u32 from) {
  #pragma unroll
  for (int sender = 0; sender < SPLIT - 1; sender++)
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      const float4 four = ld_shared_float4(from + (sender * SHARE * 2 + j) * 2048);
      float* sum = d + 4 * j;
      sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
    }
}
// Write the stores of this CTA. `out` is free.
__device__ __forceinline__ void write_share(float* own, const Scales& scales, const Out* to,
                                            u32 out, u32 sums, int part, int feature, int token,
                                            int warpgroup) {
  const u32 address = epilogue_address(out), from = sums + threadIdx.x % 128 * 16;
  const int stores = stores_of(part), first = token + part * SHARE * STORE_TOKENS;
  #pragma unroll
  for (int i = 0; i < SHARE; i++) {
    if (i >= stores) break;
    add_received(own + 8 * i, from + i * 2 * 2048);
    if (FP8) apply_scales<2>(own + 8 * i, scales, feature, first + i * STORE_TOKENS);
    copy_r2s(address + i * STORE_BYTES, own + 8 * i);
  }
  fence_proxy_async();
  warpgroup_sync(warpgroup + 1);
  if (is_writer()) {
    for (int i = 0; i < stores; i++)
      copy_s2g(to, out + i * STORE_BYTES, feature, first + i * STORE_TOKENS,
               part * SHARE + i);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
}
#endif

// ---- the kernel ----

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

#if SPLIT

constexpr int SUMS = XPipeline::END + WARPGROUPS * WPipeline::END;
constexpr int RECEIVED = SUMS + WARPGROUPS * SUMS_BYTES;  // an mbarrier for each warpgroup
static_assert(RECEIVED + 1024 <= SHARED_BYTES - 1024);

// One cluster for each item, one CTA for each part of its k tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
multiply_tiles(const __grid_constant__ Maps maps, const __grid_constant__ Weights w,
               const __grid_constant__ Items items, const __grid_constant__ Scales scales) {
  extern __shared__ char shared[];
  const u32 stages = (smem_address(shared) + 1023) & ~1023u;  // the alignment of a swizzled tile
  const int part = blockIdx.x % SPLIT, item = blockIdx.x / SPLIT;
  if (threadIdx.x == 0) {
    init_barriers(stages);
    for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++) {
      const u32 received = stages + RECEIVED + 8 * warpgroup;
      mbarrier_init(received, 1);
      mbarrier_arrive_expect_tx(received, bytes_for(part));
    }
    fence_mbarrier_init();
  } else if (threadIdx.x == 128 * WARPGROUPS) {  // the warp that loads X
    prefetch_map(&maps.x), prefetch_map(&maps.out);
  }
  __syncthreads();
  if (SPLIT > 1) cluster_arrive_relaxed();  // its mbarriers are initialised
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
  const int units = items.k_tiles / UNIT;
  const int begin = units * part / SPLIT * UNIT, end = units * (part + 1) / SPLIT * UNIT;
  const WorkTile tile{item / items.token_tiles, item % items.token_tiles * TOKENS, begin,
                      end - begin};
  // Producers start one phase ahead: in the first round all stages are empty.
  XPipeline x{stages, role == WARPGROUPS, 0};
  if (role == WARPGROUPS) {
    if (WARPGROUPS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (WINDOWS && warp > WARPGROUPS) {
      x.phase = 0;  // of a consumer
      expand_x(x, tile.k_tiles);
    } else if (threadIdx.x % 32 == 0) {
      WPipeline w_pipeline = w_pipeline_of(stages, warp - 1, true);
      if (warp == 0) produce_x(maps, tile, x, 0, scales.m);
      else if (warp <= WARPGROUPS) produce_w(w, tile, w_pipeline, warp - 1);
    }
    __syncwarp();
    if (SPLIT > 1) cluster_wait();
  } else {
    if (WARPGROUPS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
    WPipeline w_pipeline = w_pipeline_of(stages, role, false);
    const u32 out = w_pipeline.base, sums = stages + SUMS + role * SUMS_BYTES;
    const int row = tile_row_of(w, tile, role);
    Accumulators d;
    mainloop(d, x, w_pipeline, w, tile, row);
    if (SPLIT > 1) {
      const u32 received = stages + RECEIVED + 8 * role;
      float own[8 * SHARE];
      cluster_wait();
      exchange(d, own, sums, received, part);
      mbarrier_wait(received, 0, "sums of all parts");
      warpgroup_sync(role + 1);  // all its warps are done with its stages
      write_share(own, scales, &maps.out, out, sums, part, row * ROWS, tile.token, role);
    } else {
      warpgroup_sync(role + 1);
      write_share(d, scales, &maps.out, out, sums, part, row * ROWS, tile.token, role);
    }
  }
}

#else

// As many workers, CTAs or clusters, as the GPU runs at a time.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
multiply_tiles(const __grid_constant__ Maps maps, const __grid_constant__ Weights w,
               const __grid_constant__ First first, const __grid_constant__ Scales scales,
               const WorkItem* items, float4* workspace, int* counters) {
  extern __shared__ char shared[];
  const u32 stages = (smem_address(shared) + 1023) & ~1023u;  // the alignment of a swizzled tile
  if (threadIdx.x == 0) {
    init_barriers(stages);
    fence_mbarrier_init();
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
  const int rank = blockIdx.x % CLUSTER, worker = blockIdx.x / CLUSTER;
  const int begin = first.starts[worker], end = first.starts[worker + 1];
  XPipeline x{stages, role == WARPGROUPS, 0};
  if (role == WARPGROUPS) {
    if (WARPGROUPS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (WINDOWS && warp > WARPGROUPS) {
      x.phase = 0;  // of a consumer
      for (int i = begin; i < end; i++) expand_x(x, items[i].tile.k_tiles);
    } else if (threadIdx.x % 32 == 0) {
      WPipeline w_pipeline = w_pipeline_of(stages, warp - 1, true);
      WorkTile next = first.items[worker];
      for (int i = begin; i < end; i++) {
        const WorkTile tile = next;
        next = items[i + 1].tile;  // READ_AHEAD
        if (warp == 0) produce_x(maps, tile, x, rank, scales.m);
        else if (warp <= WARPGROUPS) produce_w(w, tile, w_pipeline, WARPGROUPS * rank + warp - 1);
      }
    }
    __syncwarp();
  } else {
    if (WARPGROUPS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
    WPipeline w_pipeline = w_pipeline_of(stages, role, false);
    const int consumer = WARPGROUPS * rank + role;
    const u32 out = stages + XPipeline::END + WARPGROUPS * WPipeline::END +
                    role * EPI_STAGES * EPI_BYTES;
    Accumulators d;
    for (int i = begin; i < end; i++) {
      const WorkItem& item = items[i];  // read when used, because accumulators fill the registers
      const int row = tile_row_of(w, item.tile, consumer);
      mainloop(d, x, w_pipeline, w, item.tile, row);
      if (item.fixup.parts > 1) {
        store_partial(d, item.fixup, workspace, counters, consumer, role);
      } else {
        if (FP8) apply_scales<TOKENS / 8>(d, scales, row * ROWS, item.tile.token);
        epilogue(d, &maps.out, out, row * ROWS, item.tile.token, role);
      }
    }
    for (int i = begin; i < end; i++) {
      const WorkItem& item = items[i];
      if (item.fixup.parts > 1)
        fixup_part(item, partial_sums(workspace, item.fixup, consumer),
                   counters + item.fixup.counter * TILE_ROWS + consumer, scales, &maps.out, out,
                   tile_row_of(w, item.tile, consumer) * ROWS, role);
    }
    if (is_writer()) tma_store_wait();
  }
  if (CLUSTER > 1) cluster_sync();  // the other CTA may still send boxes and arrivals to this one
}

#endif
