// Y[m, n] = X[m, k] @ W[n, k].T, a part of W 2:4 sparse and the rest dense (formats/spense.py), in
// one launch on Hopper's tensor cores (wgmma, wgmma.sp). Compute capability 9.0 alone.
//
//   an item: 128 features x TOKENS tokens of Y        a step: a tile of W, 256 bytes of k
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
// W is the left operand, for it is the one that may be sparse: 64 of its rows are an instruction,
// tokens its width. Both kinds of tiles are added up in the same registers, in fp32. A sparse tile
// is 9 or 10 KB for the work of 16 KB. A row of tiles begins sparse and ends dense (split by
// columns), or is of one kind (by rows); each warpgroup has its own, and they share X, which is the
// same for both kinds.
//
// The pipeline: 12 warps, one CTA an SM for the whole launch; three rings of slots.
//
//    warp 8     X boxes, TOKENS x 128 bytes, by TMA -----> X ring -----+--> warpgroups 0 and 1
//    warp 9     W tiles of warpgroup 0, by bulk copies --> W ring 0 ---|--> warpgroup 0
//    warp 10    W tiles of warpgroup 1 ------------------> W ring 1 ---+--> warpgroup 1
//
//   A slot of a W ring holds a sparse tile, values and metadata, or half of a dense one. A box of X
//   meets half of a sparse tile, or the half of a dense one: two products or four. A warpgroup
//   keeps the products of one box in flight, and frees what they read when those of the next are
//   issued. With CLUSTER = 2 the CTAs have the same tokens and neighbouring features; each loads
//   half of every box of X and sends it to both.
//
// Where items are few, several CTAs have a part of an item's steps each (_stream_k.py). A warpgroup
// then writes its sums to memory. When a CTA has been through its list it waits for the other parts
// of its items, and adds up every so many tokens of all: the parts share that work, too. They do so
// always in the same order: equal inputs give equal bits. All CTAs run at the same time, since they
// wait for one another: the launch is a cooperative one.
//
// Everything is in units of bytes, so that the same code multiplies 16 and 8 bits: a product takes
// 32 bytes of each row of W, stored or dense, and 64 or 32 bytes of each token. fp8 is added up as
// the tensor cores do it, in fewer bits than fp32's, as cuBLAS does with use_fast_accum, and then
// multiplied by a scale for each feature and each token, where there are any; Y is bf16.
//
// Gate and up of a gated MLP may be one W, 8 rows of gate and the same 8 of up in turn. With an
// ACTIVATION, what is written is H[m, n / 2] = act(G) * U ("hidden units" below): G and U stay in
// registers, and H is rounded once, to the operands' dtype: in fp8 to e4m3, which saturates.
//
// With PACKED, Y is the gate of a layer whose units are mostly off (ffn_sparse.cu): a bitmap of who
// is on is written, and values where there are such ("who is on" below).
//
// Counts of a box, TOKENS = 256, in clocks of an SM (128 bytes of shared memory each):
//
//                     tensor cores   X, read by each warpgroup   W, read   both, written by copies
//    half a sparse tile        512                         512        64                 328
//    half a dense tile        1024                         512       128                 384
//
// A sparse product needs all that shared memory gives for X alone, so 2:4 cannot be twice as fast
// where tensor cores are the limit: 904 of these clocks are 0.88 of a dense box's. Where memory is
// (up to about 128 tokens) the share of W's bytes counts, 0.5625 and 0.625.
//
// The words of metadata are an input in registers, as A can be: they may not change before the
// product is done, which ptxas does not see to where the next tile's are read (it serialises the
// products where it sees it, C7513). So a half tile's words are read when those that they replace
// are done with, and kept in registers of their own until then.
//
// No more than AHEAD tiles of W are on their way to a warpgroup. With all that fit, 20 MB wait for
// memory at a time, and some SMs get theirs much later than others: 4 to 5 tiles are 6 % faster.
//
// Compiled with -DTOKENS=256|128|64|32|16 -DCLUSTER=1|2 -DAHEAD=2... -DFP8=0|1 -DFP16=0|1 (0 is
// bf16) -DACTIVATION=0 (none) | 1 silu | 2 relu | 3 relu2 | 4 gelu_tanh -DPACKED=0|1 (of 16 bits,
// without an activation), and for a look at a kernel that hangs with -DWATCHDOG=1.
// Source: PTX ISA 9.0, wgmma.mma_async.sp.

#include "hopper.cuh"

constexpr int ROWS = 64, ROW_BYTES = 128, VALUE_BYTES = ROWS * ROW_BYTES;
constexpr int SPARSE_BYTES = VALUE_BYTES + (FP8 ? 2048 : 1024);  // of a tile: values, metadata
constexpr int DENSE_BYTES = 2 * VALUE_BYTES;
constexpr int BOX_COLUMNS = ROW_BYTES / 2;  // the tensor map counts in 16 bits
constexpr int SHARES = 2 * CLUSTER;         // rows of tiles of an item
constexpr bool GATED = ACTIVATION != 0;
constexpr int OUT_BYTES = !GATED ? ROW_BYTES : FP8 ? 32 : 64;  // of a token, by a warpgroup
constexpr int CHUNK = TOKENS < 64 ? TOKENS : 64, CHUNKS = TOKENS / CHUNK;
constexpr int CHUNK_BYTES = CHUNK * OUT_BYTES, BUFFERS = CHUNKS > 1 ? 2 : 1;
constexpr int X_BYTES = TOKENS * ROW_BYTES, W_BYTES = SPARSE_BYTES;
constexpr int RING_BYTES = 222 * 1024 - 2 * BUFFERS * CHUNK_BYTES;  // of slots; barriers have 3 KB
__device__ constexpr int at_most(int limit, int value) { return value < limit ? value : limit; }
constexpr int X_SLOTS = at_most(2 * AHEAD, RING_BYTES / (2 * W_BYTES + 2 * X_BYTES) * 2);
constexpr int W_SLOTS = at_most(AHEAD, (RING_BYTES - X_SLOTS * X_BYTES) / (2 * W_BYTES));

static_assert(X_SLOTS >= 4 && W_SLOTS >= 2, "less would not overlap loads and products");

#if PACKED
static_assert(!FP8 && !GATED, "gates of 16 bits, as they are");
// Of values [m, n] and bits [ceil(m / 8), n]; as large as a map.
struct alignas(128) Out { unsigned short* values; unsigned char* bits; int m, n; };
#else
using Out = TensorMap;  // of Y, or of H
#endif
struct Maps { TensorMap x; Out out; };

// Tile (row, column) of W is sparse where row < sparse_rows and column < sparse_columns, and then
// lies at [row, column] of the sparse tiles; else at [row - dense_row, column - dense_column] of
// the dense ones, which have dense_columns in a row. Of rows in turn so many are sparse, so many
// dense, that all groups of them are about equal.
struct Weights {
  const char *sparse, *dense;
  int rows, sparse_rows, sparse_columns, dense_row, dense_column, dense_columns;
};

// Of fp8, by feature and by token, n and m of them; or none.
struct Scales { const float *features, *tokens; int n, m; };

// Steps first to first + count of a group of SHARES rows of tiles and TOKENS tokens (_stream_k.py).
struct alignas(16) Work { int group, token, first, count; };
// Of `parts` items that share these features and tokens this one is number `part`; their sums are
// in `parts` places from `place` on, and `counter` counts them.
struct alignas(16) Join { int part, parts, place, counter; };
struct Item { Work work; Join join; };
// An argument: read from memory, one after the other, they come 1.3 us later to the first copy.
struct First { Work items[WORKERS]; int starts[WORKERS]; };

__device__ __forceinline__ int row_of(const Weights& w, const Work& item, int share) {
  const int place = min(item.group * SHARES + share, w.rows - 1);  // a missing one is done twice
  const u32 rows = w.rows, dense = rows - w.sparse_rows, before = place * dense / rows;
  return (place + 1) * dense / rows > before ? w.sparse_rows + before : place - before;
}
__device__ __forceinline__ int sparse_steps(const Weights& w, const Work& item, int row) {
  return row < w.sparse_rows ? min(max(w.sparse_columns - item.first, 0), item.count) : 0;
}

// ---- a ring of slots, and where in it a thread is ----

// In shared memory: the slots, then for each a barrier that is full, then one that is empty.
template <int BYTES, int SLOTS> struct Ring {
  static constexpr int FULL = SLOTS * BYTES, EMPTY = FULL + 8 * SLOTS, END = FULL + 1024;
  u32 base, parity;
  int slot;
  __device__ __forceinline__ u32 at() const { return base + slot * BYTES; }
  __device__ __forceinline__ u32 filled() const { return base + FULL + 8 * slot; }
  __device__ __forceinline__ u32 freed(int which) const { return base + EMPTY + 8 * which; }
  __device__ __forceinline__ void wait_filled() const {
    mbarrier_wait(filled(), parity, "a full slot");
  }
  __device__ __forceinline__ void wait_freed() const {
    mbarrier_wait(freed(slot), parity, "a free slot");
  }
  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) { slot = 0; parity ^= 1; }
  }
  __device__ __forceinline__ void init_barriers(int words) const {  // that free a slot
    for (int i = 0; i < SLOTS; i++) {
      mbarrier_init(base + FULL + 8 * i, 1);  // its producer, with bytes to expect
      mbarrier_init(base + EMPTY + 8 * i, words);
    }
  }
};
using XRing = Ring<X_BYTES, X_SLOTS>;
using WRing = Ring<W_BYTES, W_SLOTS>;

// ---- producers: one lane each ----

__device__ __forceinline__ void produce_x(const TensorMap& x, Work next, const Item* items,
                                          int at, int end, XRing ring, int rank) {
  constexpr int PART = TOKENS / CLUSTER;  // of the tokens that this CTA loads
  constexpr unsigned short ALL = (1 << CLUSTER) - 1;
  for (; at < end; at++) {
    const Work item = next;
    next = items[at + 1].work;  // READ_AHEAD
    const int token = item.token + rank * PART;
    for (int box = 2 * item.first; box < 2 * (item.first + item.count); box++) {
      const u32 to = ring.at() + rank * PART * ROW_BYTES;
      ring.wait_freed();
      mbarrier_arrive_expect_tx(ring.filled(), X_BYTES);
      if (CLUSTER == 1) tma_load(to, &x, box * BOX_COLUMNS, token, ring.filled());
      else tma_load_multicast(ALL, to, &x, box * BOX_COLUMNS, token, ring.filled());
      ring.advance();
    }
  }
}

template <int BYTES>
__device__ __forceinline__ void produce_tiles(WRing& ring, const char* from, int count) {
  for (int i = 0; i < count; i++) {
    ring.wait_freed();
    mbarrier_arrive_expect_tx(ring.filled(), BYTES);
    bulk_load(ring.at(), from + (u64)i * BYTES, BYTES, ring.filled());
    ring.advance();
  }
}

__device__ __forceinline__ void produce_w(const Weights& w, Work next, const Item* items, int at,
                                          int end, WRing ring, int share) {
  for (; at < end; at++) {
    const Work item = next;
    next = items[at + 1].work;
    const int row = row_of(w, item, share), sparse = sparse_steps(w, item, row);
    const int column = item.first + sparse;  // of the first dense tile
    const u64 of_sparse = (u64)row * w.sparse_columns + item.first;
    const u64 of_dense = (u64)(row - w.dense_row) * w.dense_columns + column - w.dense_column;
    produce_tiles<SPARSE_BYTES>(ring, w.sparse + of_sparse * SPARSE_BYTES, sparse);
    produce_tiles<VALUE_BYTES>(ring, w.dense + of_dense * DENSE_BYTES, 2 * (item.count - sparse));
  }
}

// ---- products ----

#if FP8
#define OPERANDS "e4m3.e4m3"
#define DEPTH "k32"
#define SPARSE_DEPTH "k64"
#define BY_ROWS ""
#else
#define OPERANDS TYPE "." TYPE
#define DEPTH "k16"
#define SPARSE_DEPTH "k32"
#define BY_ROWS ", 0, 0"
#endif
#define WORD_16 "%10"
#define WORD_32 "%18"
#define WORD_64 "%34"
#define WORD_128 "%66"
#define WORD_256 "%130"
#define DENSE_PRODUCT_(N, a, b)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N DEPTH ".f32." OPERANDS " {" SUM_##N "}, "   \
               A_AND_B_##N ", 1, 1, 1" BY_ROWS ";" : D_##N : "l"(a), "l"(b))
#define DENSE_PRODUCT(N, a, b) DENSE_PRODUCT_(N, a, b)
#define SPARSE_PRODUCT_(N, a, b, word)                                                            \
  asm volatile("wgmma.mma_async.sp.sync.aligned.m64n" #N SPARSE_DEPTH ".f32." OPERANDS " {"       \
               SUM_##N "}, " A_AND_B_##N ", " WORD_##N ", 0, 1, 1, 1" BY_ROWS ";"                 \
               : D_##N : "l"(a), "l"(b), "r"(word))
#define SPARSE_PRODUCT(N, a, b, word) SPARSE_PRODUCT_(N, a, b, word)

using Sums = float[TOKENS / 2];
constexpr int BYTES_32 = 32 >> 4, BYTES_64 = 64 >> 4;  // in a descriptor

__device__ __forceinline__ void multiply_sparse(Sums& d, u64 w, u64 x, const uint2& words) {
  wgmma_fence();
  SPARSE_PRODUCT(TOKENS, w, x, words.x);
  SPARSE_PRODUCT(TOKENS, w + BYTES_32, x + BYTES_64, words.y);
  wgmma_commit();
}
__device__ __forceinline__ void multiply_dense(Sums& d, u64 w, u64 x) {
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < 4; i++) DENSE_PRODUCT(TOKENS, w + i * BYTES_32, x + i * BYTES_32);
  wgmma_commit();
}

// The words of metadata that a thread gives to the two products of half a tile. Of 16 bits only the
// first two of four lanes give any (selector 0); the others read what their neighbours do.
__device__ __forceinline__ uint2 words_of(u32 tile, int half) {
  const int thread = threadIdx.x % 128;
  const int place = FP8 ? thread : thread / 4 * 2 + thread % 2;
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y) : "r"(tile + VALUE_BYTES + 16 * place + 8 * half) : "memory");
  return v;
}
__device__ __forceinline__ void keep(const uint2& v) {  // in its registers, up to here
  asm volatile("" :: "r"(v.x), "r"(v.y));
}

// ---- consumers ----

struct Held { int x, w; };  // slots that products in flight read; -1 for none

// A warpgroup's word that it is done with a box, to every CTA that sends a part of it; each warp's
// that it is done with a tile.
__device__ __forceinline__ void release(const XRing& x, const WRing& w, Held held) {
  const int thread = threadIdx.x % 128;
  if (held.x >= 0) {
    if (CLUSTER == 1 && thread == 0) mbarrier_arrive(x.freed(held.x));
    if (CLUSTER > 1 && thread < CLUSTER) mbarrier_arrive_cluster(x.freed(held.x), thread);
  }
  if (held.w >= 0 && thread % 32 == 0) mbarrier_arrive(w.freed(held.w));
}

// The first half's words are replaced while those of the second are in use, and the other way round.
__device__ __forceinline__ void add_sparse(Sums& d, XRing& x, WRing& w, int tiles) {
  Held held{-1, -1};
  uint2 words[2]{};
  for (int i = 0; i < tiles; i++) {
    w.wait_filled();
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      words[half] = words_of(w.at(), half);
      x.wait_filled();
      multiply_sparse(d, smem_descriptor(w.at()) + half * BYTES_64, smem_descriptor(x.at()),
                      words[half]);
      wgmma_wait<1>();
      keep(words[1 - half]);
      release(x, w, held);
      held = Held{x.slot, half ? w.slot : -1};
      x.advance();
    }
    w.advance();
  }
  wgmma_wait<0>();
  keep(words[1]);
  release(x, w, held);
}

__device__ __forceinline__ void add_dense(Sums& d, XRing& x, WRing& w, int halves) {
  Held held{-1, -1};
  for (int i = 0; i < halves; i++) {
    w.wait_filled();
    x.wait_filled();
    multiply_dense(d, smem_descriptor(w.at()), smem_descriptor(x.at()));
    wgmma_wait<1>();
    release(x, w, held);
    held = Held{x.slot, w.slot};
    x.advance();
    w.advance();
  }
  wgmma_wait<0>();
  release(x, w, held);
}

// ---- scales ----

// Sums of 64 features from `feature` on, and of 8 tokens a PIECE from `token` on.
template <int PIECES>
__device__ __forceinline__ void scale(float* d, const Scales& by, int feature, int token) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int low = feature + 16 * warp + lane / 4, even = token + lane % 4 * 2;
  if (by.features) {
    const float of_low = low < by.n ? by.features[low] : 0.f;
    const float of_high = low + 8 < by.n ? by.features[low + 8] : 0.f;
    #pragma unroll
    for (int i = 0; i < 4 * PIECES; i += 4)
      d[i] *= of_low, d[i + 1] *= of_low, d[i + 2] *= of_high, d[i + 3] *= of_high;
  }
  if (by.tokens) {
    #pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int at = even + 8 * i;
      const float of_even = at < by.m ? by.tokens[at] : 0.f;
      const float of_odd = at + 1 < by.m ? by.tokens[at + 1] : 0.f;
      d[4 * i] *= of_even, d[4 * i + 1] *= of_odd, d[4 * i + 2] *= of_even, d[4 * i + 3] *= of_odd;
    }
  }
}

// ---- hidden units ----
//
//   A warp's 16 rows of W are 8 units of gate and the same of up. Lane 4 u + q has, of 8 tokens,
//
//      gate's unit u, tokens 2 q, 2 q + 1:   s[0] s[1]       H[2 q][u]     = act(s[0]) * s[2]
//      up's                                  s[2] s[3]       H[2 q + 1][u] = act(s[1]) * s[3]
//
//   A warpgroup writes 32 units of 16 tokens, in rows of 64 bytes (16 bits) or 32 (e4m3) that TMA
//   reads in their swizzle: stmatrix.trans gives a warp's 8 units to a row; bytes go one by one.

__device__ __forceinline__ float act(float g) {
  if (ACTIVATION == 1) return __fdividef(g, 1 + __expf(-g));  // 0 below -87, where it is -1e-36
  if (ACTIVATION == 4) {  // (1 + tanh(z / 2)) / 2 is 1 / (1 + exp(-z))
    const float z = 1.5957691216057308f * (g + 0.044715f * g * g * g);  // 2 sqrt(2 / pi)
    return __fdividef(g, 1 + __expf(-z));
  }
  const float on = g <= 0 ? 0.f : g;  // NaN stays
  return ACTIVATION == 3 ? on * on : on;
}
__device__ __forceinline__ void store_byte(u32 at, u32 value) {
  asm volatile("st.shared.u8 [%0], %1;" :: "r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u32 e4m3_pair_of(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
// Two pieces of 8 x 8, to the rows whose addresses lanes 0 to 15 give.
__device__ __forceinline__ void store_transposed(u32 row, u32 first, u32 second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               :: "r"(row), "r"(first), "r"(second) : "memory");
}

__device__ __forceinline__ u32 place_of_hidden(u32 tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  if (FP8) {
    const int unit = 8 * warp + lane / 4, row = lane % 4 * 2;
    return tile + row * OUT_BYTES + (unit ^ (row / 4 % 2) << 4);
  }
  const int row = lane % 16;
  return tile + row * OUT_BYTES + ((warp ^ row / 2 % 4) << 4);
}
__device__ __forceinline__ void put_hidden(u32 place, const float* s) {  // sums of 16 tokens
  const float a = act(s[0]) * s[2], b = act(s[1]) * s[3];
  const float c = act(s[4]) * s[6], d = act(s[5]) * s[7];
  if (FP8) {
    const u32 first = e4m3_pair_of(a, b), second = e4m3_pair_of(c, d);
    store_byte(place, first), store_byte(place + OUT_BYTES, first >> 8);
    store_byte(place + 8 * OUT_BYTES, second), store_byte(place + 9 * OUT_BYTES, second >> 8);
  } else {
    store_transposed(place, pack_pair(a, b), pack_pair(c, d));
  }
}

// ---- sums, 16 tokens at a time, to what is stored ----

constexpr int GRANULE = 16, GRANULES = TOKENS / GRANULE, GRANULE_BYTES = GRANULE * OUT_BYTES;

__device__ __forceinline__ u32 place_in(u32 tile) {
  return GATED ? place_of_hidden(tile) : stmatrix_address(tile);
}
__device__ __forceinline__ void put(u32 place, const float* sums) {
  if (GATED) put_hidden(place, sums);
  else stmatrix_x4_trans(place, sums);
}
#if !PACKED
__device__ __forceinline__ void store_granule(const Out* out, u32 from, int feature, int token) {
  tma_store(out, from, feature / (ROW_BYTES / OUT_BYTES), token);  // the map counts in 16 bits
}
#endif

// ---- who is on ----
//
//   A unit of a token is on unless its gate, once rounded, is <= 0: NaN is on.
//
//      bits    [m / 8, n] bytes    of a unit and eight tokens: bit t is token t's
//      values  [m, n]              32 bytes of a token, 16 units, are written if one of them is on,
//                                  and else left as they are: nothing but what is on may be read
//
//   Any number of them is right, and each has one place. Sums go through shared memory as Y's do,
//   16 tokens x 64 units to a granule, of which a thread reads eight units of a token:
//
//      warp 0    tokens 0 to 7, lane % 8; units 0 to 31, 8 of lane / 8       warp 1    32 to 63
//      warp 2    tokens 8 to 15                                              warp 3
//
//   Eight lanes have 8 x 8 bits, which they transpose; those of four granules are one word.

#if PACKED
__device__ __forceinline__ uint4 read(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
// Of one byte in each of eight lanes, bit i of lane j becomes bit j of lane i; four bytes at once.
__device__ __forceinline__ u32 transposed(u32 bits) {
  #pragma unroll
  for (int by = 1; by < 8; by *= 2) {  // down from 4 it would not be unrolled
    const u32 low = by == 4 ? 0x0f0f0f0f : by == 2 ? 0x33333333 : 0x55555555;
    const u32 got = __shfl_xor_sync(~0u, bits, by);
    bits = threadIdx.x & by ? bits & ~low | got >> by & low : bits & low | (got & low) << by;
  }
  return bits;
}
// Of `count` granules, at most GROUP, of units from `feature` on and tokens from `token` on.
template <int GROUP>
__device__ __forceinline__ void put_on(const Out& to, u32 tile, int feature, int token, int count) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, n = to.n;
  const int row = warp / 2 * 8 + lane % 8, piece = warp % 2 * 4 + lane / 8;
  const int unit = feature + 8 * piece, left = to.m - token - row;
  const int there = max(min(count, left + GRANULE - 1 >> 4), 0);
  uint4 v[GROUP];
  u32 halves[2] = {};  // even units in the low ones, odd ones in the high: a byte of each granule
  #pragma unroll
  for (int i = 0; i < GROUP; i++) {
    v[i] = read(tile + i * GRANULE_BYTES + row * OUT_BYTES + ((piece ^ row % 8) << 4));
    const int by = 8 * (i % 2);
    halves[i / 2] |=
        positive_mask(v[i].x) & 0x20001u << by | positive_mask(v[i].y) & 0x80004u << by |
        positive_mask(v[i].z) & 0x200010u << by | positive_mask(v[i].w) & 0x800040u << by;
  }
  u32 bits = __byte_perm(halves[0], halves[1], 0x5410) | __byte_perm(halves[0], halves[1], 0x7632);
  if (there < 4) bits &= (1u << 8 * there) - 1;  // no token is beyond m
  const u32 either = bits | __shfl_xor_sync(~0u, bits, 8);  // of 16 units
  bits = transposed(bits);
  if (unit >= n) return;
  unsigned short* at = to.values + ((u64)(token + row) * n + unit);
  unsigned char* eight = to.bits + ((u64)((u32)token / 8 + warp / 2) * n + unit + lane % 8);
  #pragma unroll
  for (int i = 0; i < GROUP; i++, at += (u64)GRANULE * n, eight += 2 * (u64)n) {
    if (either >> 8 * i & 0xff) *(uint4*)at = v[i];
    if (i < count && left + lane % 8 > i * GRANULE) *eight = bits >> 8 * i;
  }
}
#endif

// ---- sums of parts of an item ----

constexpr int OF_A_PART = SHARES * GRANULES * 2 * 128;  // four sums

// Where thread 0 of a share's warpgroup has its first four sums of the item's first part.
__device__ __forceinline__ float4* sums_of(float4* partial, const Join& join, int share) {
  return partial + (u64)join.place * OF_A_PART + share * GRANULES * 2 * 128 + threadIdx.x % 128;
}

// What the warpgroup wrote is seen by those that have seen the count.
__device__ __forceinline__ void count_one(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(counter) : "memory");
}

// Write the sums of a part, and say that they are there.
__device__ __forceinline__ void put_part(const Sums& d, const Join& join, float4* partial,
                                         int* counters, int share, int half) {
  float4* to = sums_of(partial, join, share) + (u64)join.part * OF_A_PART;
  #pragma unroll
  for (int i = 0; i < TOKENS / 8; i++)
    to[i * 128] = float4{d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
  warpgroup_sync(half + 1);
  if (threadIdx.x % 128 == 0) count_one(counters + join.counter * SHARES + share);
}

__device__ __forceinline__ int seen(const int* counter) {
  int count;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}
__device__ __forceinline__ void wait_for(const int* counter, int parts) {
  for (int tries = 0; seen(counter) < parts; tries++) {
#ifdef WATCHDOG
    if (tries == 1 << 18) __assertfail("all parts", __FILE__, __LINE__, "wait_for", 1);
#endif
  }
}

// Granules from `granule` to `end`, GROUP at a time: add up all parts and store what they give. Of
// UNROLL parts sums are read at a time: 20 parts of few items take 0.5 to 0.9 us less than by six.
template <int GROUP, int UNROLL>
__device__ __forceinline__ void add_parts(const float4* from, int parts, int granule, int end,
                                          const Scales& scales, const Out* to, u32 out,
                                          int feature, int token, int half) {
  const bool leader = threadIdx.x % 128 == 0;
  const u32 at = place_in(out);
  for (; granule < end; granule += GROUP) {
    float d[8 * GROUP] = {};
    #pragma unroll UNROLL
    for (int i = 0; i < parts; i++) {
      const float4* v = from + (u64)i * OF_A_PART + granule * 2 * 128;
      #pragma unroll
      for (int j = 0; j < 2 * GROUP; j++)
        if (granule + j / 2 < end) {
          const float4 four = __ldcg(v + j * 128);
          d[4 * j] += four.x, d[4 * j + 1] += four.y, d[4 * j + 2] += four.z, d[4 * j + 3] += four.w;
        }
    }
    if (FP8) scale<2 * GROUP>(d, scales, feature, token + granule * GRANULE);
    if (!PACKED && leader) tma_store_wait_read<0>();
    warpgroup_sync(half + 1);
    #pragma unroll
    for (int j = 0; j < GROUP; j++) put(at + j * GRANULE_BYTES, d + 8 * j);
#if PACKED
    warpgroup_sync(half + 1);
    put_on<GROUP>(*to, out, feature, token + granule * GRANULE, end - granule);
#else
    fence_proxy_async();
    warpgroup_sync(half + 1);
    if (leader) {
      for (int j = 0; j < GROUP && granule + j < end; j++)
        store_granule(to, out + j * GRANULE_BYTES, feature, token + (granule + j) * GRANULE);
      tma_store_commit();
    }
#endif
  }
}

// Each part adds up its share of the granules of all parts. The counter is then as it was.
__device__ __forceinline__ void join_parts(const Item& item, const float4* from, int* counter,
                                           const Scales& scales, const Out* to, u32 out,
                                           int feature, int half) {
  const int part = item.join.part, parts = item.join.parts, token = item.work.token;
  const int each = (GRANULES + parts - 1) / parts, adding = (GRANULES + each - 1) / each;
  if (part >= adding) return;
  const bool leader = threadIdx.x % 128 == 0;
  if (leader) wait_for(counter, parts);
  warpgroup_sync(half + 1);
  const int granule = part * each, end = min(granule + each, GRANULES);
  if (each == 1) add_parts<1, 10>(from, parts, granule, end, scales, to, out, feature, token, half);
  else
    add_parts<CHUNK / GRANULE, 3>(from, parts, granule, end, scales, to, out, feature, token, half);
  if (leader && atomicAdd(counter, 1) == parts + adding - 1) *counter = 0;
}

__device__ __forceinline__ void put_out(const Sums& d, const Out* to, u32 out, int feature,
                                        int token, int half) {
  const bool leader = threadIdx.x % 128 == 0;
  const u32 at = place_in(out);
  #pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int buffer = c % BUFFERS * CHUNK_BYTES;
    if (!PACKED && leader) tma_store_wait_read<BUFFERS - 1>();
    // Threads that read one buffer are in step, below, before the other is read: two need no more.
    if (!PACKED || BUFFERS == 1) warpgroup_sync(half + 1);
    #pragma unroll
    for (int i = 0; i < CHUNK / 16; i++)
      put(at + buffer + i * GRANULE_BYTES, d + 8 * (c * (CHUNK / 16) + i));
#if PACKED
    warpgroup_sync(half + 1);
    put_on<CHUNK / GRANULE>(*to, out + buffer, feature, token + c * CHUNK, CHUNK / GRANULE);
#else
    fence_proxy_async();
    warpgroup_sync(half + 1);
    if (leader) {
      #pragma unroll
      for (int i = 0; i < CHUNK / GRANULE; i++)
        store_granule(to, out + buffer + i * GRANULE_BYTES, feature,
                      token + c * CHUNK + i * GRANULE);
      tma_store_commit();
    }
#endif
  }
}

// ---- the kernel: as many workers as the GPU has room for, each with its own list of items ----

extern "C" __global__ void __launch_bounds__(384, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
multiply_tiles(const __grid_constant__ Maps maps, const __grid_constant__ Weights w,
               const __grid_constant__ First first, const __grid_constant__ Scales scales,
               const Item* items, float4* partial, int* counters) {
  extern __shared__ char shared[];
  const u32 tiles = (smem_address(shared) + 1023) & ~1023u;  // where a swizzled tile may start
  if (threadIdx.x == 0) {
    XRing{tiles}.init_barriers(2 * CLUSTER);  // two warpgroups in each CTA
    for (int half = 0; half < 2; half++)
      WRing{tiles + XRing::END + half * WRing::END}.init_barriers(4);  // a warpgroup's warps
    asm volatile("fence.mbarrier_init.release.cluster;");  // by all threads it takes 2 us
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
  const int rank = blockIdx.x % CLUSTER, worker = blockIdx.x / CLUSTER;
  const int begin = first.starts[worker], end = first.starts[worker + 1];
  const int half = group == 2 ? warp == 2 : group;  // whose tiles of W it brings or multiplies
  const int share = 2 * rank + half;
  // Producers start a parity ahead: slots are free before the first round.
  XRing x{tiles, group == 2, 0};
  WRing w_ring{tiles + XRing::END + half * WRing::END, group == 2, 0};
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x % 32 == 0) {
      if (warp == 0) produce_x(maps.x, first.items[worker], items, begin, end, x, rank);
      else if (warp < 3) produce_w(w, first.items[worker], items, begin, end, w_ring, share);
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const u32 out = tiles + XRing::END + 2 * WRing::END + half * BUFFERS * CHUNK_BYTES;
    Sums d;
    for (int i = begin; i < end; i++) {
      const Item& item = items[i];  // read where it is used: registers are sums
      const int row = row_of(w, item.work, share);
      // What products depend on is the same in a warp, and ptxas is to know: else it waits for each.
      const int sparse = __shfl_sync(~0u, sparse_steps(w, item.work, row), 0);
      const int dense = __shfl_sync(~0u, item.work.count, 0) - sparse;
      #pragma unroll
      for (int j = 0; j < TOKENS / 2; j++) d[j] = 0.f;
      add_sparse(d, x, w_ring, sparse);
      add_dense(d, x, w_ring, 2 * dense);
      if (item.join.parts > 1) {
        put_part(d, item.join, partial, counters, share, half);
      } else {
        if (FP8) scale<TOKENS / 8>(d, scales, row * ROWS, item.work.token);
        put_out(d, &maps.out, out, row * ROWS, item.work.token, half);
      }
    }
    for (int i = begin; i < end; i++) {
      const Item& item = items[i];
      if (item.join.parts > 1)
        join_parts(item, sums_of(partial, item.join, share),
                   counters + item.join.counter * SHARES + share, scales, &maps.out, out,
                   row_of(w, item.work, share) * ROWS, half);
    }
    if (threadIdx.x % 128 == 0) tma_store_wait();
  }
  if (CLUSTER > 1) cluster_sync();  // the other CTA may still send boxes and words to this one
}
