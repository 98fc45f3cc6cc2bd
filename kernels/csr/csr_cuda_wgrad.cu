// The values of dW = dY[m, n].T @ X[m, k] where W has non-zeros, on CUDA cores (SDDMM).
//
//   CTA: a part of the tokens x a range of items, all in one chunk of columns
//   item: up to 8 non-zeros of a row of W in a chunk: the row, and 8 places in the panel of X
//
//       panel of dY, rows         panel of X, columns       sums of a lane       after the exchange
//     row 0  | t0 t1 .. |       column 0  | t0 t1 .. |      its tokens,          lane i of a way:
//     row 1  |          |   .   column 1  |          |  =   8 non-zeros    ->    non-zero i,
//      ..                        ..                                              all TOKENS
//
//   A way (8 lanes) multiplies an item: each lane reads its tokens of the row once, and those of the
//   8 columns. Then the lanes exchange halves of their sums, and lane i has the sum of non-zero i.
//
// If there is one tile of tokens, these sums are the values. Otherwise the CTA adds up the tiles of
// its part in `sums`, and a second kernel adds up the parts, always in this order.
//
// Macros: THREADS, CTAS (of an SM), and those of panel.cuh, with LANES = 8.

#include "panel.cuh"

constexpr int COUNT = VECTORS * VECTOR;  // tokens of a lane
constexpr int WARPS = THREADS / 32;
static_assert(LANES == 8, "an item has as many non-zeros as a way has lanes");

struct Range { int item, items, row, rows, column; };  // of a CTA: first item, row and column
struct alignas(8) Head { int first; u16 row, count; };  // of an item: its first non-zero of W

__device__ __forceinline__ float exchanged(float f, int by) {
  return __uint_as_float(__shfl_xor_sync(~0u, __float_as_uint(f), by));
}

// A lane keeps one of two sums, gives the other to its partner, and adds what it receives.
__device__ __forceinline__ float halved(float low, float high, int lane, int by) {
  const bool upper = lane & by;
  return (upper ? high : low) + exchanged(upper ? low : high, by);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
sum_products(const Element* dy, long long dy_stride, int n, const Element* x, long long x_stride,
             int k, int m, const Range* ranges, int count, const uint4* places,
             const Head* heads, int chunk, int tiles, int stored, float* sums, Element* values) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = lane % 8 * 16;
  const Range range = ranges[blockIdx.x % count];
  const int part = blockIdx.x / count, end = min((part + 1) * tiles * TOKENS, m);
  const char *of_x = shared + own, *of_dy = shared + chunk * COLUMN_BYTES + own;
  for (int token = part * tiles * TOKENS, first = token; token < end; token += TOKENS) {
    if (token > first) __syncthreads();
    load_panel(shared, x, x_stride, token, m, range.column, min(chunk, k - range.column), k,
               [&] {
                 if (token > first) return;  // while the first columns are loaded:
                 prefetch(places + range.item, places + range.item + range.items);
                 prefetch(heads + range.item, heads + range.item + range.items);
               });
    load_panel(shared + chunk * COLUMN_BYTES, dy, dy_stride, token, m, range.row, range.rows, n,
               [] {});
    __syncthreads();
    // Every way takes an item; a warp's items are neighbours. The list has a few more at the end.
    #pragma unroll 1
    for (int at = warp * WAYS; at < range.items; at += WARPS * WAYS) {
      const int item = range.item + at + lane / 8;
      const uint4 eight = __ldg(places + item);  // over 16, 16 bits each
      const u32 two[4] = {eight.x, eight.y, eight.z, eight.w};
      const Head head = heads[item];
      float g[COUNT];
      read(g, of_dy + head.row * COLUMN_BYTES);
      const auto product = [&](int i) {
        float v[COUNT];
        read(v, of_x + (two[i / 2] >> i % 2 * 16 & 0xffff) * 16);
        float sum = g[0] * v[0];
        #pragma unroll
        for (int j = 1; j < COUNT; j++) sum += g[j] * v[j];
        return sum;
      };
      const auto four = [&](int i) { return halved(product(i), product(i + 4), lane, 4); };
      const auto pair = [&](int i) { return halved(four(i), four(i + 2), lane, 2); };
      const float sum = halved(pair(0), pair(1), lane, 1);
      if (at + lane / 8 >= range.items || lane % 8 >= head.count) continue;
      const int out = head.first + lane % 8;
      if (values) {
        values[out] = narrow(sum);
      } else {
        float* to = sums + (long long)part * stored + out;
        *to = token > first ? *to + sum : sum;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
add_parts(const float* sums, int parts, int stored, Element* values) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= stored) return;
  float sum = 0;
  #pragma unroll 8
  for (int part = 0; part < parts; part++) sum += sums[(long long)part * stored + i];
  values[i] = narrow(sum);
}
