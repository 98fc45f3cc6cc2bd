// Y[m, n] = X[m, k] @ W[n, k].T, where part of W is 2:4 sparse and the rest is dense
// (formats/spense.py).
// One launch on the tensor cores (mma and mma.sp) of any GPU of compute capability 8.0 or newer.
//
//   A work item is TILE_ROWS x 64 features x TOKENS tokens of Y. A box is half a tile of W: 64
//   columns of k. With TILE_ROWS = 2:
//
//      W, two rows of tiles               X.T                     Y.T
//      +--------+--------+--------+     +------+                +--------+--------+
//      | sparse | sparse | dense  |     | box  |                | warp 0 | warp 1 |  64 features
//      |        |        |        |     +------+      =         |        |        |
//      +--------+--------+--------+  x  | box  |                +--------+--------+
//      | sparse | sparse | dense  |     +------+                | warp 2 | warp 3 |  64
//      |        |        |        |     | ...  |                |        |        |
//      +--------+--------+--------+     +------+                +--------+--------+
//
// (With 32 and 16 tokens each warp has all tokens of 32 features.)
//
// W is operand A, because only A may be sparse. Tokens are the columns of B. An instruction does 16
// features x 8 tokens, over 32 columns of k if W is 2:4 and over 16 if it is dense. Both kinds
// add to the same accumulators, in fp32. Lane 4 g + q of a warp holds, with two values per word:
//
//     A   rows g and g + 8 of W      columns 2 q, 2 q + 1, and 8 further; if W is 2:4, these count
//                                    the stored values, two of every four columns
//     B   token g of X               columns 2 q, 2 q + 1, and 8 (16 and 24) further
//     D   rows g and g + 8 of Y.T    tokens 2 q, 2 q + 1
//
// and, for mma.sp, a word of metadata. The word has eight codes of 4 bits: 16 columns of row g (low
// half) and of row g + 8. A code says which two of four columns are stored. The tensor core takes
// the values of B at these columns. The instruction reads the words of two of every four lanes:
// q = 0 and 1, or q = 2 and 3, by its selector. A box is two instructions deep, one for each
// selector. So one word per lane holds all metadata of a box.
//
//              q = 0            q = 1                 q = 2             q = 3
//        columns 0 to 15     16 to 31           columns 32 to 47     48 to 63
//        of the first mma.sp: selector 0        of the second: selector 1
//
// The pipeline: STAGES stages in shared memory, filled by cp.async. A stage is X, TOKENS x 128
// bytes, and half a tile of each row of W. Rows are swizzled, so that ldmatrix reads eight of them
// without a bank conflict. There are two main loops:
//
//     AHEAD = 0     for each box, all threads
//                    wait until it has arrived and all threads have read the previous one
//                    load the box STAGES - 1 further on into the stage of the previous one
//                    multiply
//
//     AHEAD = 1     box i      | multiply, all but the last slots of B | barrier | the last slots |
//                   ldmatrix   | slots of B, A of the next chunk       |         | box i + 1      |
//                   cp.async   |                                       |         | box i + STAGES |
//
//   With AHEAD, registers always hold the next operands, and copies are issued between products.
//   The first boxes of the next item are loaded while the last ones of this item are multiplied.
//
//   Half the columns of a sparse tile are half of each row. Without AHEAD they keep their place in
//   the row, and the rest of the row is empty. With AHEAD a row has 64 bytes in the stage, so a row
//   of tiles takes 4.6 KB of a stage, or the 8 KB of a dense one if W has any (DENSE).
//
// If there are few work items, several CTAs share the k tiles of one (stream-K, _stream_k.py). Each
// writes its partial sums to memory. The last CTA to arrive reduces all of them (the fixup), always
// in the same order, so equal inputs give equal bits.
//
// Clocks of an SM for one box of 128 features x 128 tokens (shared memory: 128 bytes a clock), and
// for half a box of 256 x 128:
//
//                     tensor cores: A100, H200    shared memory: read, written    L2: H200
//    half a sparse tile             512    413              384      200, 136     670, 460
//    half a dense tile             1024    826              512      256, 192     860, 640
//
// with 64 x 64 accumulators per warp; 64 x 32 would read 1.5 times as much. On Hopper mma has about
// 0.62 of wgmma's rate. A tile of half the tokens reads W twice as often, and L2 is the limit.
//
// Macros from spense_mma.py: TOKENS=128|64|32|16, TILE_ROWS=2|4, FP16=0|1 (0 is bf16), AHEAD=0|1,
// DENSE=0|1, CTAS (of an SM), W_BYTES (of a stage, each row of tiles), and the constants that both
// files share: THREADS, STAGES, ROWS, ROW_BYTES, VALUE_BYTES.
// Source: PTX ISA 9.0, mma.sp.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int SPARSE_BYTES = VALUE_BYTES + 1024, DENSE_BYTES = 2 * VALUE_BYTES;  // of a tile
constexpr int BOX_COLUMNS = 64;
constexpr int X_BYTES = TOKENS * ROW_BYTES;
constexpr int STAGE_BYTES = X_BYTES + TILE_ROWS * W_BYTES;
constexpr int WARPS = THREADS / 32;
constexpr int TOKEN_WARPS = TOKENS < 64 ? 1 : 2, FEATURE_WARPS = WARPS / TOKEN_WARPS;
constexpr int WARP_FEATURES = TILE_ROWS * ROWS / FEATURE_WARPS, WARP_TOKENS = TOKENS / TOKEN_WARPS;
constexpr int MMAS_M = WARP_FEATURES / 16, MMAS_N = WARP_TOKENS / 8;  // instructions of a warp
using Accumulators = float[MMAS_M][MMAS_N][4];

struct Activations {
  const char* x;
  u64 stride;  // bytes of a row
  int m, k;
};

// Tile (row, column) of W is sparse if row < sparse_rows and column < sparse_columns. It is then
// [row, column] of the sparse tiles; else [row - dense_row, column - dense_column] of the dense
// tiles, which have dense_columns in a row.
struct Weights {
  const char *sparse, *dense;
  int rows, sparse_rows, sparse_columns, dense_row, dense_column, dense_columns;
};

// `k_tiles` k tiles from `k_tile` on, for group `group` of TILE_ROWS rows of tiles and for TOKENS
// tokens from `token` on (_stream_k.py). This is part `part` of `parts` that share these features
// and tokens. Their partial sums are in `parts` slots of the workspace, from `slot` on. `counter`
// counts the parts that have arrived.
struct alignas(16) WorkItem { int group, token, k_tile, k_tiles, part, parts, slot, counter; };

// All rows of tiles of a group are of one kind: the sparse rows are a multiple of 128, or all.
__device__ __forceinline__ bool is_sparse(const Weights& w, int group, int column) {
  return group * TILE_ROWS < w.sparse_rows && column < w.sparse_columns;
}
__device__ __forceinline__ int swizzled(int row, int piece) {  // offset of a piece of 16 bytes
  return row * ROW_BYTES + ((piece ^ row % 8) << 4);
}

// ---- PTX ----

#if FP16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

#include "mma.cuh"

__device__ __forceinline__ u32 smem_address(const void* p) {  // in shared memory
  return (u32)__cvta_generic_to_shared(p);
}
// Writes zeros if not `valid`.
__device__ __forceinline__ void copy_16(u32 to, const char* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_8(u32 to, const char* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(to), "l"(from) : "memory");
}
// Hide a value from the compiler, so that it is not computed again.
template <class T> __device__ __forceinline__ T opaque(T value) {
  if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(value));
  else asm volatile("" : "+r"(value));
  return value;
}
// Copies nothing if not `there`.
__device__ __forceinline__ void copy_16_if(u32 to, const char* from, bool there) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n"
               "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n}"
               :: "r"(to), "l"(from), "r"((int)there) : "memory");
}
__device__ __forceinline__ void copy_8_if(u32 to, const char* from, bool there) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n"
               "@p cp.async.ca.shared.global [%0], [%1], 8;\n}"
               :: "r"(to), "l"(from), "r"((int)there) : "memory");
}
__device__ __forceinline__ u32 ld_shared_u32(u32 address) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ u32 pack_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// 32 columns of k: the 16 x 16 values of A stand for 16 x 32. ::ordered_metadata promises that the
// lower of two positions comes first, as the format has it. Without it sm_100 and sm_120 call a
// function before each mma.sp (nvcc 13.0).
template <int SELECTOR>
__device__ __forceinline__ void mma_sp(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4],
                                       u32 metadata) {
  asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]),
                 "r"(b[3]), "r"(metadata), "n"(SELECTOR));
}

// ---- a warp's part of an item ----

__device__ __forceinline__ int warp_token() { return threadIdx.x / 32 % TOKEN_WARPS * WARP_TOKENS; }
__device__ __forceinline__ int warp_feature() {
  return threadIdx.x / 32 / TOKEN_WARPS * WARP_FEATURES;
}
// Load the metadata of all lanes: 128 bytes for each 16 features.
__device__ __forceinline__ void load_metadata(u32 (&metadata)[MMAS_M], u32 words) {
  const int lane = threadIdx.x % 32;
  #pragma unroll
  for (int i = 0; i < MMAS_M; i++)
    metadata[i] = ld_shared_u32(words + 128 * i + 8 * (lane / 4 * 2 + lane % 2) +
                                4 * (lane / 2 % 2));
}

// ---- stream-K: partial sums and their reduction ----

// Write the partial sums of a part of an item. For the last part to arrive, return true with the
// sums of all parts, and reset the counter to 0 for the next launch.
__device__ __forceinline__ bool fixup(Accumulators& d, const WorkItem& item, float4* workspace,
                                      int* counters) {
  constexpr int PARTIAL_FLOAT4S = TILE_ROWS * ROWS * TOKENS / 4;  // of a part
  const int part = item.part, parts = item.parts;
  float4* own = workspace + (u64)item.slot * PARTIAL_FLOAT4S + threadIdx.x;
  #pragma unroll
  for (int i = 0; i < MMAS_M * MMAS_N; i++) {
    const float* s = d[i / MMAS_N][i % MMAS_N];
    own[(u64)part * PARTIAL_FLOAT4S + i * THREADS] = float4{s[0], s[1], s[2], s[3]};
  }
  __threadfence();
  __syncthreads();
  int* counter = counters + item.counter;
  const bool last = threadIdx.x == 0 && atomicAdd(counter, 1) + 1 == parts;
  if (!__syncthreads_or(last)) return false;
  __threadfence();
  if (threadIdx.x == 0) *counter = 0;
  #pragma unroll
  for (int i = 0; i < MMAS_M * MMAS_N; i++) {
    float* s = d[i / MMAS_N][i % MMAS_N];
    s[0] = s[1] = s[2] = s[3] = 0.f;
  }
  for (int p = 0; p < parts; p++)
    #pragma unroll
    for (int i = 0; i < MMAS_M * MMAS_N; i++) {
      const float4 v = __ldcg(own + (u64)p * PARTIAL_FLOAT4S + i * THREADS);
      float* s = d[i / MMAS_N][i % MMAS_N];
      s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
    }
  return true;
}

// ---- epilogue ----

// Transpose 8 features x 8 tokens at a time, so that a lane writes two features of one token.
__device__ __forceinline__ void epilogue(const Accumulators& d, u16* y, const WorkItem& item, int m,
                                         int n) {
  const int lane = threadIdx.x % 32;
  const int token = item.token + warp_token() + lane / 4;
  const int feature = item.group * TILE_ROWS * ROWS + warp_feature() + lane % 4 * 2;
  #pragma unroll
  for (int i = 0; i < MMAS_M; i++)
    #pragma unroll
    for (int j = 0; j < MMAS_N; j++)
      #pragma unroll
      for (int below = 0; below < 2; below++) {
        const u32 pair = movmatrix_trans(pack_pair(d[i][j][2 * below], d[i][j][2 * below + 1]));
        const int t = token + 8 * j, f = feature + 16 * i + 8 * below;
        if (t < m && f < n) *(u32*)(y + (u64)t * n + f) = pair;
      }
}

#if AHEAD

// ---- copies, ahead ----

constexpr int HALF = ROW_BYTES / 2;  // bytes of a sparse row in a stage
constexpr int WORDS = ROWS * HALF;   // where its metadata is
constexpr int X_PASS = THREADS / 8;  // rows of X that all threads copy together
constexpr int X_COPIES = TOKENS / X_PASS, COPIES = X_COPIES + (DENSE ? 8 : 4);

__device__ __forceinline__ int swizzled_half(int row, int piece) {  // of four pieces in a row
  return row * HALF + ((piece ^ row / 2 % 4) << 4);
}

// Load the boxes of a worker's items in order, each in COPIES steps. A thread copies the same piece
// of several rows of X, and its part of one row of tiles, which 64 threads share.
struct Loader {
  const Activations& x;
  const Weights& w;
  const WorkItem *item, *end;
  int box, last;  // of k: the next one, and the end of those of the item
  int rows, row;  // of X from this thread's first one on; its row of tiles
  const char* first_x;          // its first piece of X in box 0
  int own;                      // its index among the 64
  u32 to_x, to_sparse, slot;    // in a stage
  // The box that is being loaded:
  const char *from_x, *from_w;
  u32 stage;
  int limit;  // rows of X, from the first one on, that are not zeros
  bool there, sparse;

  __device__ __forceinline__ Loader(const Activations& x, const Weights& w, const WorkItem* item,
                                    const WorkItem* end)
      : x(x), w(w), item(item), end(end), box(0), last(0), rows(0), row(0), first_x(x.x) {
    own = threadIdx.x % 64, slot = X_BYTES + threadIdx.x / 64 * W_BYTES;
    to_x = swizzled(threadIdx.x / 8, threadIdx.x % 8);
    to_sparse = slot + swizzled_half(own / 4, own % 4);
    begin_item();
  }
  __device__ __forceinline__ void begin_item() {
    if (item == end) return;
    const int token = item->token + threadIdx.x / 8;
    box = 2 * item->k_tile, last = box + 2 * item->k_tiles, rows = x.m - token;
    row = min(item->group * TILE_ROWS + (int)threadIdx.x / 64, w.rows - 1);  // or the last row
    first_x = x.x + (u64)token * x.stride + threadIdx.x % 8 * 16;
  }
  __device__ __forceinline__ void begin_box(u32 to) {
    const int column = box >> 1, half = box & 1;
    stage = to, there = box < last;
    sparse = !DENSE || (row < w.sparse_rows && column < w.sparse_columns);
    const u64 of_sparse = (u64)row * w.sparse_columns + column;
    const u64 of_dense = (u64)(row - w.dense_row) * w.dense_columns + column - w.dense_column;
    const char* tile =
        sparse ? w.sparse + of_sparse * SPARSE_BYTES : w.dense + of_dense * DENSE_BYTES;
    limit = there && box * BOX_COLUMNS + (int)threadIdx.x % 8 * 8 < x.k ? rows : 0;
    from_x = opaque(first_x + (u64)box * ROW_BYTES);
    from_w = opaque(tile + (sparse ? swizzled(own / 4, own % 4) ^ 64 * half
                                   : VALUE_BYTES * half + 16 * own));
    // Two of every four words belong to this half.
    copy_8_if(to + slot + WORDS + 8 * own, tile + VALUE_BYTES + 16 * own + 8 * half,
              there && sparse);
    if (there && ++box == last) item++, begin_item();
  }
  __device__ __forceinline__ void copy(int i) {  // one after the other
    const int j = i - X_COPIES;
    if (i < X_COPIES) {
      copy_16(stage + to_x + i * X_PASS * ROW_BYTES, from_x, i * X_PASS < limit);
      from_x += X_PASS * x.stride;
    } else {
      copy_16_if(stage + (sparse ? to_sparse : slot + 16 * own) + 1024 * j,
                 from_w + (sparse ? 2048 : 1024) * j, there && (j < 4 || !sparse));
    }
  }
};

// ---- products, ahead ----
//
// A chunk is 32 columns of k where W is 2:4, and 16 where it is dense: two or four of a box. Its A
// is in registers while that of the next chunk is loaded. A chunk goes through the tokens in slots
// of 8 or 16, for which B has four registers, loaded up to four slots ahead.

struct Fragments { u32 a[2][MMAS_M][4], b[MMAS_N < 4 ? MMAS_N : 4][4], metadata[MMAS_M]; };

template <bool SPARSE> constexpr int CHUNKS = SPARSE ? 2 : 4;
template <bool SPARSE> constexpr int SLOTS = SPARSE ? MMAS_N : MMAS_N / 2;
template <bool SPARSE> constexpr int SLOTS_AHEAD = SLOTS<SPARSE> < 4 ? SLOTS<SPARSE> : 4;

// A lane's offsets of chunk 0 and slot 0 in a stage. An exclusive or gives those of other chunks.
struct Places {
  u32 a_sparse, a_dense, b_sparse, b_dense, words;
  __device__ __forceinline__ Places() {
    const int lane = threadIdx.x % 32, feature = warp_feature() % ROWS;
    const u32 w = X_BYTES + warp_feature() / ROWS * W_BYTES, x = warp_token() * ROW_BYTES;
    a_sparse = w + feature * HALF + swizzled_half(lane % 16, lane / 16);
    a_dense = w + feature * ROW_BYTES + swizzled(lane % 16, lane / 16);
    b_sparse = x + swizzled(lane % 8, lane / 8);
    b_dense = x + swizzled(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    words = w + WORDS + 8 * feature;
  }
};

template <bool SPARSE, int CHUNK>
__device__ __forceinline__ void load_a(Fragments& f, const Places& places, u32 stage) {
  constexpr int PITCH = SPARSE ? HALF : ROW_BYTES;
  const u32 first = stage + (SPARSE ? places.a_sparse : places.a_dense), from = first ^ 32 * CHUNK;
  #pragma unroll
  for (int i = 0; i < MMAS_M; i++) ldmatrix_x4(f.a[CHUNK % 2][i], from + 16 * i * PITCH);
}
template <bool SPARSE, int CHUNK>
__device__ __forceinline__ void load_b(Fragments& f, const Places& places, u32 stage, int slot) {
  constexpr int SLOT_BYTES = (SPARSE ? 8 : 16) * ROW_BYTES;
  const u32 first = stage + (SPARSE ? places.b_sparse : places.b_dense);
  const u32 from = first ^ (SPARSE ? 64 : 32) * CHUNK;
  ldmatrix_x4(f.b[slot % 4], from + slot * SLOT_BYTES);
}

// Issue the products of slots FIRST to END - 1, and call `after(slot)` after each.
template <bool SPARSE, int CHUNK, int FIRST, int END, class After>
__device__ __forceinline__ void multiply(Accumulators& d, Fragments& f, After after) {
  #pragma unroll
  for (int slot = FIRST; slot < END; slot++) {
    const u32(&a)[MMAS_M][4] = f.a[CHUNK % 2];
    const u32(&b)[4] = f.b[slot % 4];
    #pragma unroll
    for (int i = 0; i < MMAS_M; i++)
      if (SPARSE) {
        mma_sp<CHUNK % 2>(d[i][slot], a[i], b, f.metadata[i]);
      } else {
        mma_m16n8k16(d[i][2 * slot], a[i], b[0], b[1]);
        mma_m16n8k16(d[i][2 * slot + 1], a[i], b[2], b[3]);
      }
    after(slot);
  }
}

// Multiply a box from CHUNK on until all of it is in registers and SLOTS_AHEAD slots are left.
template <bool SPARSE, int CHUNK = 0>
__device__ __forceinline__ void multiply_first(Accumulators& d, Fragments& f, const Places& places,
                                               u32 stage) {
  constexpr int N = SLOTS<SPARSE>, FURTHER = SLOTS_AHEAD<SPARSE>;
  constexpr bool LAST = CHUNK + 1 == CHUNKS<SPARSE>;
  if constexpr (!LAST) load_a<SPARSE, CHUNK + 1>(f, places, stage);
  multiply<SPARSE, CHUNK, 0, LAST ? N - FURTHER : N>(d, f, [&](int slot) {
    if (slot + FURTHER < N) load_b<SPARSE, CHUNK>(f, places, stage, slot + FURTHER);
    else load_b<SPARSE, CHUNK + 1>(f, places, stage, slot + FURTHER - N);
  });
  if constexpr (!LAST) multiply_first<SPARSE, CHUNK + 1>(d, f, places, stage);
}

// Load the operands of chunk 0 of a box: A, metadata and a slot of B.
struct Next {
  u32 a, b, words;
  int a_step, b_step, slots;
  __device__ __forceinline__ Next(const Places& places, u32 stage, bool sparse) {
    a = stage + (sparse ? places.a_sparse : places.a_dense);
    a_step = 16 * (sparse ? HALF : ROW_BYTES);
    b = stage + (sparse ? places.b_sparse : places.b_dense);
    b_step = (sparse ? 8 : 16) * ROW_BYTES;
    words = stage + places.words;  // for a dense tile any bytes, which are not used
    slots = sparse ? SLOTS_AHEAD<true> : SLOTS_AHEAD<false>;
  }
  __device__ __forceinline__ void load_a(Fragments& f, u32 (&metadata)[MMAS_M]) const {
    #pragma unroll
    for (int i = 0; i < MMAS_M; i++) ldmatrix_x4(f.a[0][i], a + i * a_step);
    load_metadata(metadata, words);
  }
  __device__ __forceinline__ void load_b(Fragments& f, int slot) const {
    if (slot < SLOTS_AHEAD<false> || slot < slots) ldmatrix_x4(f.b[slot], b + slot * b_step);
  }
};

// Multiply the remaining slots, and meanwhile load the next box's first operands and copy.
template <bool SPARSE>
__device__ __forceinline__ void multiply_last(Accumulators& d, Fragments& f, const Next& next,
                                              Loader& loader) {
  constexpr int N = SLOTS<SPARSE>, LEFT = SLOTS_AHEAD<SPARSE>;
  multiply<SPARSE, CHUNKS<SPARSE> - 1, N - LEFT, N>(d, f, [&](int slot) {
    const int done = slot - (N - LEFT);
    next.load_b(f, done);
    if (slot == N - 1)
      #pragma unroll
      for (int more = LEFT; more < SLOTS_AHEAD<true>; more++) next.load_b(f, more);
    #pragma unroll
    for (int c = done * COPIES / LEFT; c < (done + 1) * COPIES / LEFT; c++) loader.copy(c);
  });
}

// The number of sparse boxes of k, which come first, in this warp's row of tiles.
__device__ __forceinline__ int sparse_boxes(const Weights& w, int group) {
  const int row = min(group * TILE_ROWS + warp_feature() / ROWS, w.rows - 1);
  return row < w.sparse_rows ? 2 * w.sparse_columns : 0;
}
__device__ __forceinline__ bool starts_sparse(const Weights& w, const WorkItem& item) {
  return 2 * item.k_tile < sparse_boxes(w, item.group);
}

#else  // without AHEAD

// ---- copies: global memory to a stage ----

__device__ __forceinline__ void load_x(u32 to, const Activations& x, int token, int column) {
  const int first = threadIdx.x / 8, piece = threadIdx.x % 8, from = column + 8 * piece;
  const char* row = x.x + (token + first) * x.stride + 2 * (u64)from;
  #pragma unroll
  for (int i = 0; i < TOKENS; i += THREADS / 8)
    copy_16(to + swizzled(first + i, piece), row + i * x.stride,
            from < x.k && token + first + i < x.m);
}

__device__ __forceinline__ void load_sparse(u32 to, const char* tile, int half) {
  const int first = threadIdx.x / 4, piece = 4 * half + threadIdx.x % 4;
  #pragma unroll
  for (int i = 0; i < ROWS; i += THREADS / 4) {
    const int offset = swizzled(first + i, piece);
    copy_16(to + offset, tile + offset, true);
  }
  if (threadIdx.x < 64)  // two of every four words belong to this half
    copy_8(to + VALUE_BYTES + 8 * threadIdx.x, tile + VALUE_BYTES + 16 * threadIdx.x + 8 * half);
}
__device__ __forceinline__ void load_dense(u32 to, const char* half) {
  const int own = 16 * threadIdx.x;
  #pragma unroll
  for (int i = 0; i < VALUE_BYTES; i += 16 * THREADS) copy_16(to + own + i, half + own + i, true);
}

__device__ __forceinline__ void load_w(u32 to, const Weights& w, int group, int column, int half) {
  const bool sparse = is_sparse(w, group, column);
  #pragma unroll
  for (int i = 0; i < TILE_ROWS; i++, to += W_BYTES) {
    const int row = min(group * TILE_ROWS + i, w.rows - 1);  // the last row if past the end
    const u64 of_sparse = (u64)row * w.sparse_columns + column;
    const u64 of_dense = (u64)(row - w.dense_row) * w.dense_columns + column - w.dense_column;
    if (sparse) load_sparse(to, w.sparse + of_sparse * SPARSE_BYTES, half);
    else load_dense(to, w.dense + of_dense * DENSE_BYTES + half * VALUE_BYTES);
  }
}

// Load the boxes of a worker's items in order.
struct Loader {
  const WorkItem *item, *end;
  int group, token, box, last;  // of k: the next box, and the end of the item's boxes
  __device__ __forceinline__ Loader(const WorkItem* item, const WorkItem* end)
      : item(item), end(end), group(0), token(0), box(0), last(0) {
    begin_item();
  }
  __device__ __forceinline__ void begin_item() {
    if (item < end) group = item->group, token = item->token, box = 2 * item->k_tile,
                    last = box + 2 * item->k_tiles;
  }
  __device__ __forceinline__ void load_stage(u32 to, const Activations& x, const Weights& w) {
    if (box < last) {
      load_x(to, x, token, box * BOX_COLUMNS);
      load_w(to + X_BYTES, w, group, box >> 1, box & 1);
      if (++box == last) item++, begin_item();
    }
    cp_async_commit();
  }
};

// ---- main loop: one box ----

// A lane's address for ldmatrix: 16 rows and two pieces of A; eight tokens and four pieces of B.
__device__ __forceinline__ u32 ldmatrix_offset_a(int piece) {
  return swizzled(threadIdx.x % 16, piece + threadIdx.x % 32 / 16);
}
__device__ __forceinline__ u32 ldmatrix_offset_b(int piece) {
  return swizzled(threadIdx.x % 8, piece + threadIdx.x % 32 / 8);
}

__device__ __forceinline__ void mma_sparse_box(Accumulators& d, u32 x, u32 values, u32 words,
                                               int half) {
  u32 metadata[MMAS_M];
  load_metadata(metadata, words);
  #pragma unroll
  for (int step = 0; step < 2; step++) {
    u32 a[MMAS_M][4], b[4];
    #pragma unroll
    for (int i = 0; i < MMAS_M; i++)
      ldmatrix_x4(a[i], values + 16 * i * ROW_BYTES + ldmatrix_offset_a(4 * half + 2 * step));
    #pragma unroll
    for (int j = 0; j < MMAS_N; j++) {
      ldmatrix_x4(b, x + 8 * j * ROW_BYTES + ldmatrix_offset_b(4 * step));
      #pragma unroll
      for (int i = 0; i < MMAS_M; i++)
        if (step == 0) mma_sp<0>(d[i][j], a[i], b, metadata[i]);
        else mma_sp<1>(d[i][j], a[i], b, metadata[i]);
    }
  }
}

__device__ __forceinline__ void mma_dense_box(Accumulators& d, u32 x, u32 values) {
  #pragma unroll
  for (int step = 0; step < 2; step++) {
    u32 a[4], b[MMAS_N][4];
    #pragma unroll
    for (int j = 0; j < MMAS_N; j++)
      ldmatrix_x4(b[j], x + 8 * j * ROW_BYTES + ldmatrix_offset_b(4 * step));
    #pragma unroll
    for (int deep = 0; deep < 2; deep++)  // two instructions, where 2:4 needs one
      #pragma unroll
      for (int i = 0; i < MMAS_M; i++) {
        ldmatrix_x4(a, values + 16 * i * ROW_BYTES + ldmatrix_offset_a(4 * step + 2 * deep));
        #pragma unroll
        for (int j = 0; j < MMAS_N; j++)
          mma_m16n8k16(d[i][j], a, b[j][2 * deep], b[j][2 * deep + 1]);
      }
  }
}

__device__ __forceinline__ void mma_box(Accumulators& d, u32 stage, bool sparse, int half) {
  const int feature = warp_feature(), row = feature % ROWS;
  const u32 x = stage + warp_token() * ROW_BYTES;
  const u32 w = stage + X_BYTES + feature / ROWS * W_BYTES, values = w + row * ROW_BYTES;
  if (sparse) mma_sparse_box(d, x, values, w + VALUE_BYTES + 8 * row, half);
  else mma_dense_box(d, x, values);
}

#endif

// ---- the kernel: as many workers (CTAs) as the GPU runs at a time ----

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
multiply_tiles(const __grid_constant__ Activations x, const __grid_constant__ Weights w, u16* y,
               const WorkItem* items, const int* starts, float4* workspace, int* counters, int n) {
  extern __shared__ __align__(128) char shared[];
#if AHEAD
  const u32 stages = opaque(smem_address(shared));
#else
  const u32 stages = smem_address(shared);
#endif
  const WorkItem *item = items + starts[blockIdx.x], *end = items + starts[blockIdx.x + 1];
#if AHEAD
  Loader loader(x, w, item, end);
  for (int i = 0; i < STAGES; i++) {
    loader.begin_box(stages + i * STAGE_BYTES);
    #pragma unroll
    for (int c = 0; c < COPIES; c++) loader.copy(c);
    cp_async_commit();
  }
  cp_async_wait<STAGES - 1>();
  __syncthreads();
  const Places places;
  Fragments f;
  u32 stage = stages;
  bool sparse = !DENSE || starts_sparse(w, *item);
  const Next box_0(places, stage, sparse);
  box_0.load_a(f, f.metadata);
  #pragma unroll
  for (int slot = 0; slot < SLOTS_AHEAD<true>; slot++) box_0.load_b(f, slot);
  for (; item < end; item++) {
    const int first = 2 * item->k_tile, last = first + 2 * item->k_tiles;
    const int upto = sparse_boxes(w, item->group);
    Accumulators d{};
    for (int box = first; box < last; box++) {
      const u32 now = stage;
      const bool now_sparse = sparse;
      if (now_sparse) multiply_first<true>(d, f, places, now);
      else multiply_first<false>(d, f, places, now);
      stage = now == stages + (STAGES - 1) * STAGE_BYTES ? stages : now + STAGE_BYTES;
      sparse = !DENSE || (box + 1 < last ? box + 1 < upto : starts_sparse(w, item[1]));
      // After the barrier the next box has arrived, and this one is in registers of all threads.
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      loader.begin_box(now);
      const Next next(places, stage, sparse);
      u32 metadata[MMAS_M];
      next.load_a(f, metadata);
      if (now_sparse) multiply_last<true>(d, f, next, loader);
      else multiply_last<false>(d, f, next, loader);
      cp_async_commit();
      #pragma unroll
      for (int i = 0; i < MMAS_M; i++) f.metadata[i] = metadata[i];
    }
    if (item->parts == 1 || fixup(d, *item, workspace, counters)) epilogue(d, y, *item, x.m, n);
  }
  cp_async_wait<0>();  // loads past the last box, which are zeros
#else
  Loader loader(item, end);
  for (int i = 0; i < STAGES - 1; i++) loader.load_stage(stages + i * STAGE_BYTES, x, w);
  u32 stage = stages, freed = stages + (STAGES - 1) * STAGE_BYTES;
  for (; item < end; item++) {
    const int group = item->group, last = 2 * (item->k_tile + item->k_tiles);
    Accumulators d{};
    for (int box = 2 * item->k_tile; box < last; box++) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      loader.load_stage(freed, x, w);
      mma_box(d, stage, is_sparse(w, group, box >> 1), box & 1);
      freed = stage;
      stage = stage == stages + (STAGES - 1) * STAGE_BYTES ? stages : stage + STAGE_BYTES;
    }
    if (item->parts == 1 || fixup(d, *item, workspace, counters)) epilogue(d, y, *item, x.m, n);
  }
#endif
}
