// Y[m, n] = X[m, k] @ W[n, k].T, a part of W 2:4 sparse and the rest dense (formats/spense.py), in
// one launch on the tensor cores of any GPU of compute capability 8.0 or newer (mma, mma.sp).
//
//   an item: 128 features x TOKENS tokens of Y        a box: half a tile of W, 64 columns of k
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
// (for 32 and 16 tokens the warps are one below the other, 32 features each.)
//
// W is the left operand A, for it is the one that may be sparse; tokens are the columns of B. A
// product is 16 features x 8 tokens, of 32 columns of k where W is 2:4 and of 16 where it is dense,
// and both kinds add to the same sums, in fp32. Lane 4 g + q of a warp holds, two values a word:
//
//     A   rows g and g + 8 of W      columns 2 q, 2 q + 1, and 8 further: of the stored values, two
//                                    of every four columns, where W is 2:4
//     B   token g of X               columns 2 q, 2 q + 1, and 8 (16 and 24) further
//     D   rows g and g + 8 of Y.T    tokens 2 q, 2 q + 1
//
// and of mma.sp a word of metadata. Eight codes, 4 bits each, say which two of four columns are
// stored, and so which of B's the tensor core takes: of row g (low half) and g + 8, 16 columns.
// Only two of four lanes are asked, q = 0 and 1 or, by the instruction's selector, q = 2 and 3. The
// two products that a box is deep are given the two pairs of lanes: a word a lane holds both.
//
//              q = 0            q = 1                 q = 2             q = 3
//        columns 0 to 15     16 to 31           columns 32 to 47     48 to 63
//        of the first product: selector 0       of the second: selector 1
//
// The pipeline: a ring of STAGES slots in shared memory, filled by cp.async.
//
//     slot   | X, TOKENS x 128 bytes | half a tile of W, row 0 | of row 1 |
//
//     all threads, for each box:   wait until it is there, and everyone is done with the one before
//                                  bring the box STAGES - 1 further on into that one's slot
//                                  multiply
//
//   Rows of 128 bytes are swizzled as the format stores them: ldmatrix reads the same piece of
//   eight rows from all banks. Half the columns of a sparse tile are half of each row: they lie in
//   the slot where they lie in the tile, and the rest of the row stays empty. Boxes of the next
//   item are brought while the last of this one are multiplied.
//
// Where items are few, several CTAs have a part of an item's steps each (_stream_k.py). They write
// their sums to memory, and the last one to arrive adds up all parts, always in the same order:
// equal inputs give equal bits.
//
// Counts of a box, TOKENS = 128, in clocks of an SM (128 bytes of shared memory each):
//
//                     tensor cores: A100, H200    shared memory: read, written    L2: H200
//    half a sparse tile             512    413                    384      200         670
//    half a dense tile             1024    826                    512      256         860
//
// with 64 x 64 sums a warp; 64 x 32 would read half as much again. mma has about 0.62 of wgmma's
// rate on Hopper, and a tile that is half as large reads X and W more often: L2 is the limit there.
//
// Compiled with -DTOKENS=128|64|32|16 -DFP16=0|1 (0 is bf16). Source: PTX ISA 9.0, mma.sp.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int ROWS = 64, ROW_BYTES = 128, VALUE_BYTES = ROWS * ROW_BYTES;
constexpr int SPARSE_BYTES = VALUE_BYTES + 1024, DENSE_BYTES = 2 * VALUE_BYTES;  // of a tile
constexpr int SHARES = 2, BOX = 64;  // rows of tiles of an item, columns of a box
constexpr int X_BYTES = TOKENS * ROW_BYTES;
constexpr int W_BYTES = VALUE_BYTES + 512;  // half a tile, dense or sparse, and half the metadata
constexpr int STAGE_BYTES = X_BYTES + SHARES * W_BYTES;
constexpr int STAGES = 99 * 1024 / STAGE_BYTES;  // what a CTA may have at most on 8.6 and 8.9
constexpr int THREADS = 128, TOKEN_WARPS = TOKENS < 64 ? 1 : 2, FEATURE_WARPS = 4 / TOKEN_WARPS;
constexpr int HEIGHT = SHARES * ROWS / FEATURE_WARPS, WIDTH = TOKENS / TOKEN_WARPS;  // a warp's
constexpr int TALL = HEIGHT / 16, WIDE = WIDTH / 8;  // in products
using Sums = float[TALL][WIDE][4];

struct Activations {
  const char* x;
  u64 stride;  // bytes of a row
  int m, k;
};

// Tile (row, column) of W is sparse where row < sparse_rows and column < sparse_columns, and then
// lies at [row, column] of the sparse tiles; else at [row - dense_row, column - dense_column] of
// the dense ones, which have dense_columns in a row.
struct Weights {
  const char *sparse, *dense;
  int rows, sparse_rows, sparse_columns, dense_row, dense_column, dense_columns;
};

// Steps first to first + count of a group of SHARES rows of tiles and TOKENS tokens (_stream_k.py).
// Of `parts` items that share these features and tokens this one is number `part`; their sums are
// in `parts` places from `place` on, and `counter` counts them.
struct alignas(16) Item { int group, token, first, count, part, parts, place, counter; };

// Both rows of tiles: a sparse part of the rows is a multiple of 128 of them, or all there are.
__device__ __forceinline__ bool is_sparse(const Weights& w, int group, int column) {
  return group * SHARES < w.sparse_rows && column < w.sparse_columns;
}
__device__ __forceinline__ int place_of(int row, int piece) {  // 16 bytes, swizzled
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
// Zeros where there is nothing to copy.
__device__ __forceinline__ void copy_16(u32 to, const char* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_8(u32 to, const char* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ u32 word_at(u32 address) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ u32 pack_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// 32 columns of k: the 16 x 16 values of A stand for 16 x 32. Ordered: of a group's two positions
// the lower is first, as the format has them. Without that word, sm_100 and sm_120 call a function
// before each product (nvcc 13.0).
template <int SELECTOR>
__device__ __forceinline__ void multiply_sparse(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4],
                                                u32 word) {
  asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]),
                 "r"(b[3]), "r"(word), "n"(SELECTOR));
}

// ---- copies ----

__device__ __forceinline__ void bring_x(u32 to, const Activations& x, int token, int column) {
  const int first = threadIdx.x / 8, piece = threadIdx.x % 8, from = column + 8 * piece;
  const char* row = x.x + (token + first) * x.stride + 2 * (u64)from;
  #pragma unroll
  for (int i = 0; i < TOKENS; i += THREADS / 8)
    copy_16(to + place_of(first + i, piece), row + i * x.stride,
            from < x.k && token + first + i < x.m);
}

__device__ __forceinline__ void bring_sparse(u32 to, const char* tile, int half) {
  const int first = threadIdx.x / 4, piece = 4 * half + threadIdx.x % 4;
  #pragma unroll
  for (int i = 0; i < ROWS; i += THREADS / 4) {
    const int place = place_of(first + i, piece);
    copy_16(to + place, tile + place, true);
  }
  if (threadIdx.x < 64)  // of the four words of each two are the half's
    copy_8(to + VALUE_BYTES + 8 * threadIdx.x, tile + VALUE_BYTES + 16 * threadIdx.x + 8 * half);
}
__device__ __forceinline__ void bring_dense(u32 to, const char* half) {
  const int own = 16 * threadIdx.x;
  #pragma unroll
  for (int i = 0; i < VALUE_BYTES; i += 16 * THREADS) copy_16(to + own + i, half + own + i, true);
}

__device__ __forceinline__ void bring_w(u32 to, const Weights& w, int group, int column, int half) {
  const bool sparse = is_sparse(w, group, column);
  #pragma unroll
  for (int share = 0; share < SHARES; share++, to += W_BYTES) {
    const int row = min(group * SHARES + share, w.rows - 1);  // of a last one that is missing
    const u64 of_sparse = (u64)row * w.sparse_columns + column;
    const u64 of_dense = (u64)(row - w.dense_row) * w.dense_columns + column - w.dense_column;
    if (sparse) bring_sparse(to, w.sparse + of_sparse * SPARSE_BYTES, half);
    else bring_dense(to, w.dense + of_dense * DENSE_BYTES + half * VALUE_BYTES);
  }
}

// The boxes of a worker's items, one after the other.
struct Feed {
  const Item *item, *end;
  int group, token, box, last;  // boxes from `box` on of k, before `last`
  __device__ __forceinline__ Feed(const Item* item, const Item* end)
      : item(item), end(end), group(0), token(0), box(0), last(0) {
    open();
  }
  __device__ __forceinline__ void open() {
    if (item < end) group = item->group, token = item->token, box = 2 * item->first,
                    last = box + 2 * item->count;
  }
  __device__ __forceinline__ void bring(u32 to, const Activations& x, const Weights& w) {
    if (box < last) {
      bring_x(to, x, token, box * BOX);
      bring_w(to + X_BYTES, w, group, box >> 1, box & 1);
      if (++box == last) item++, open();
    }
    cp_async_commit();
  }
};

// ---- products ----

__device__ __forceinline__ int token_of_warp() { return threadIdx.x / 32 % TOKEN_WARPS * WIDTH; }
__device__ __forceinline__ int feature_of_warp() { return threadIdx.x / 32 / TOKEN_WARPS * HEIGHT; }

// 16 rows and two pieces of A; eight tokens and four pieces of B.
__device__ __forceinline__ u32 place_of_a(int piece) {
  return place_of(threadIdx.x % 16, piece + threadIdx.x % 32 / 16);
}
__device__ __forceinline__ u32 place_of_b(int piece) {
  return place_of(threadIdx.x % 8, piece + threadIdx.x % 32 / 8);
}

__device__ __forceinline__ void add_sparse(Sums& d, u32 x, u32 values, u32 words, int half) {
  const int lane = threadIdx.x % 32;
  u32 word[TALL];
  #pragma unroll
  for (int i = 0; i < TALL; i++)
    word[i] = word_at(words + 128 * i + 8 * (lane / 4 * 2 + lane % 2) + 4 * (lane / 2 % 2));
  #pragma unroll
  for (int step = 0; step < 2; step++) {
    u32 a[TALL][4], b[4];
    #pragma unroll
    for (int i = 0; i < TALL; i++)
      ldmatrix_x4(a[i], values + 16 * i * ROW_BYTES + place_of_a(4 * half + 2 * step));
    #pragma unroll
    for (int j = 0; j < WIDE; j++) {
      ldmatrix_x4(b, x + 8 * j * ROW_BYTES + place_of_b(4 * step));
      #pragma unroll
      for (int i = 0; i < TALL; i++)
        if (step == 0) multiply_sparse<0>(d[i][j], a[i], b, word[i]);
        else multiply_sparse<1>(d[i][j], a[i], b, word[i]);
    }
  }
}

__device__ __forceinline__ void add_dense(Sums& d, u32 x, u32 values) {
  #pragma unroll
  for (int step = 0; step < 2; step++) {
    u32 a[4], b[WIDE][4];
    #pragma unroll
    for (int j = 0; j < WIDE; j++) ldmatrix_x4(b[j], x + 8 * j * ROW_BYTES + place_of_b(4 * step));
    #pragma unroll
    for (int deep = 0; deep < 2; deep++)  // two products where 2:4 has one
      #pragma unroll
      for (int i = 0; i < TALL; i++) {
        ldmatrix_x4(a, values + 16 * i * ROW_BYTES + place_of_a(4 * step + 2 * deep));
        #pragma unroll
        for (int j = 0; j < WIDE; j++)
          mma_m16n8k16(d[i][j], a, b[j][2 * deep], b[j][2 * deep + 1]);
      }
  }
}

__device__ __forceinline__ void add_box(Sums& d, u32 slot, bool sparse, int half) {
  const int feature = feature_of_warp(), row = feature % ROWS;
  const u32 x = slot + token_of_warp() * ROW_BYTES;
  const u32 w = slot + X_BYTES + feature / ROWS * W_BYTES, values = w + row * ROW_BYTES;
  if (sparse) add_sparse(d, x, values, w + VALUE_BYTES + 8 * row, half);
  else add_dense(d, x, values);
}

// ---- sums ----

// Write the sums of a part of an item. Of its parts the last one to come gets the sums of all and
// true; the counter is then as it was.
__device__ __forceinline__ bool combine(Sums& d, const Item& item, float4* partial, int* counters) {
  constexpr int STEP = SHARES * ROWS * TOKENS / 4;  // of a part
  const int part = item.part, parts = item.parts;
  float4* own = partial + (u64)item.place * STEP + threadIdx.x;
  #pragma unroll
  for (int i = 0; i < TALL * WIDE; i++) {
    const float* s = d[i / WIDE][i % WIDE];
    own[(u64)part * STEP + i * THREADS] = float4{s[0], s[1], s[2], s[3]};
  }
  __threadfence();
  __syncthreads();
  int* counter = counters + item.counter;
  const bool last = threadIdx.x == 0 && atomicAdd(counter, 1) + 1 == parts;
  if (!__syncthreads_or(last)) return false;
  __threadfence();
  if (threadIdx.x == 0) *counter = 0;
  #pragma unroll
  for (int i = 0; i < TALL * WIDE; i++) {
    float* s = d[i / WIDE][i % WIDE];
    s[0] = s[1] = s[2] = s[3] = 0.f;
  }
  for (int p = 0; p < parts; p++)
    #pragma unroll
    for (int i = 0; i < TALL * WIDE; i++) {
      const float4 v = __ldcg(own + (u64)p * STEP + i * THREADS);
      float* s = d[i / WIDE][i % WIDE];
      s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
    }
  return true;
}

// Eight features of eight tokens at a time; a lane then has two features of a token.
__device__ __forceinline__ void put_out(const Sums& d, u16* y, const Item& item, int m, int n) {
  const int lane = threadIdx.x % 32;
  const int token = item.token + token_of_warp() + lane / 4;
  const int feature = item.group * SHARES * ROWS + feature_of_warp() + lane % 4 * 2;
  #pragma unroll
  for (int i = 0; i < TALL; i++)
    #pragma unroll
    for (int j = 0; j < WIDE; j++)
      #pragma unroll
      for (int below = 0; below < 2; below++) {
        const u32 pair = movmatrix_trans(pack_pair(d[i][j][2 * below], d[i][j][2 * below + 1]));
        const int t = token + 8 * j, f = feature + 16 * i + 8 * below;
        if (t < m && f < n) *(u32*)(y + (u64)t * n + f) = pair;
      }
}

// ---- the kernel: as many workers as the GPU has room for, each with its own list of items ----

extern "C" __global__ void __launch_bounds__(THREADS, 2)
multiply_tiles(const __grid_constant__ Activations x, const __grid_constant__ Weights w, u16* y,
               const Item* items, const int* starts, float4* partial, int* counters, int n) {
  extern __shared__ __align__(128) char shared[];
  const u32 slots = smem_address(shared);
  const Item *item = items + starts[blockIdx.x], *end = items + starts[blockIdx.x + 1];
  Feed feed(item, end);
  for (int i = 0; i < STAGES - 1; i++) feed.bring(slots + i * STAGE_BYTES, x, w);
  u32 slot = slots, before = slots + (STAGES - 1) * STAGE_BYTES;
  for (; item < end; item++) {
    const int group = item->group, last = 2 * (item->first + item->count);
    Sums d{};
    for (int box = 2 * item->first; box < last; box++) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      feed.bring(before, x, w);
      add_box(d, slot, is_sparse(w, group, box >> 1), box & 1);
      before = slot;
      slot = slot == slots + (STAGES - 1) * STAGE_BYTES ? slots : slot + STAGE_BYTES;
    }
    if (item->parts == 1 || combine(d, *item, partial, counters)) put_out(d, y, *item, x.m, n);
  }
}
