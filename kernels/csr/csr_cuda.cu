// Y[m, n] = X[m, k] @ W[n, k].T for W in CSR, on CUDA cores, with a panel of X in shared memory.
//
//   CTA: TOKENS tokens x a group of rows of W, over the columns of W in chunks, one by one
//
//       X                          panel: a chunk of columns, transposed        sums
//     +----+-----------+----+      column 0    | t0 t1 t2 ..  TOKENS |        row  t0 t1 t2 ..
//     |    | chunk     |    |      column 1    |                     |         0  |
//     |    | x TOKENS  |    |  ->    ...                                +=     1  |
//     +----+-----------+----+      zeros       | 0  0  0  ..         |         .. |
//
//   A team of WAYS rows, or pieces of long rows, goes to the ways of a warp. The LANES lanes of a way
//   have all tokens of a non-zero, 16 bytes per lane. The pieces of a team have equally many steps:
//
//       step     way 0     way 1     way 2     way 3        a lane's load is two non-zeros of its
//        0      nz 0, 1   nz 0, 1   nz 0, 1   nz 0, 1       piece: (place in the panel, value)
//        1      nz 2, 3   ...
//
//   After its last step a way adds its sums to those of the piece. At the end the CTA adds up the
//   pieces of each row, and writes the tokens with the rows of W contiguous.
//
// The host (_panels.py) packs the non-zeros in the order of the steps. Padding points at a column of
// zeros. Teams are made and dealt by length.
// The limit is shared memory: SIZE bytes for each non-zero and token (NOTES.md).
//
// Macros: THREADS, CTAS (of an SM), and those of panel.cuh.

#include "panel.cuh"

constexpr int COUNT = VECTORS * VECTOR;  // sums of a lane
constexpr int STRIDE = TOKENS + 4;       // of the sums: 16 bytes of 8 rows are in other banks
constexpr int WARPS = THREADS / 32;
constexpr int UNROLL = FP32 || VECTORS == 1 ? 2 : 1;  // steps that 64 registers have room for

#if FP32
using Pair = uint4;  // place, value, place, value
#else
using Pair = uint2;  // value << 16 | place / 16, twice
#endif
struct Start { int team, step; };  // of a warp in a chunk

// ---- products ----

__device__ __forceinline__ void multiply(float (&sums)[COUNT], const char* panel, u32 place,
                                         float w) {
  float x[COUNT];
  read(x, panel + place);
  #pragma unroll
  for (int i = 0; i < COUNT; i++) sums[i] += w * x[i];
}

__device__ __forceinline__ void multiply(float (&sums)[COUNT], const char* panel, Pair two) {
#if FP32
  multiply(sums, panel, two.x, __uint_as_float(two.y));
  multiply(sums, panel, two.z, __uint_as_float(two.w));
#else
  multiply(sums, panel, (two.x & 0xffff) * 16, to_float(two.x >> 16));
  multiply(sums, panel, (two.y & 0xffff) * 16, to_float(two.y >> 16));
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
multiply_rows(const Element* x, long long x_stride, int m, int k, const Pair* packed,
              const u32* teams, const Start* starts, const int* pieces, const int* bounds,
              int groups, int chunks, int chunk, int sums_bytes, Element* y, int n) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, way = lane / LANES;
  const int group = blockIdx.x % groups, token = blockIdx.x / groups * TOKENS;
  float* all_sums = (float*)(shared + (chunk + 1) * COLUMN_BYTES);
  const char* panel = shared + lane % LANES * 16;

  for (int c = 0; c < chunks; c++) {
    const Start* start = starts + (group * chunks + c) * WARPS;
    if (c) __syncthreads();
    load_panel(shared, x, x_stride, token, m, c * chunk, min(chunk, k - c * chunk), k, [&] {
      if (c) return;  // while the first columns are loaded:
      const Start first = start[0], end = start[chunks * WARPS];
      const int row = bounds[group], next_row = bounds[group + 1];
      for (int i = threadIdx.x; i < sums_bytes / 16; i += THREADS)
        *(uint4*)(shared + chunk * COLUMN_BYTES + i * 16) = uint4{};  // zeros, and all sums
      prefetch(packed + (long long)first.step * WAYS, packed + (long long)end.step * WAYS);
      prefetch(teams + first.team * WAYS, teams + end.team * WAYS);
      prefetch(pieces + row, pieces + next_row + 1);
    });
    int t = start[warp].team * WAYS + way;
    const int end = start[warp + 1].team * WAYS;
    const Pair* from = packed + (long long)start[warp].step * WAYS + way;
    Pair now = __ldg(from), next = __ldg(from + WAYS);
    u32 team = __ldg(teams + t);
    from += 2 * WAYS;
    __syncthreads();
    while (t < end) {
      float* to = all_sums + (team & 0xffff) * STRIDE + lane % LANES * VECTOR;
      const u32 steps = team >> 16;
      float sums[COUNT] = {};
      team = __ldg(teams + (t += WAYS));
      #pragma unroll UNROLL
      for (u32 i = 0; i < steps; i++) {
        const Pair later = __ldg(from);
        from += WAYS;
        multiply(sums, panel, now);
        now = next, next = later;
      }
      #pragma unroll
      for (int i = 0; i < COUNT; i += 4) {
        float4* four = (float4*)(to + i / VECTOR * LANES * VECTOR + i % VECTOR);
        float4 sum = *four;
        sum.x += sums[i], sum.y += sums[i + 1], sum.z += sums[i + 2], sum.w += sums[i + 3];
        *four = sum;
      }
    }
  }
  __syncthreads();
  const int first_row = bounds[group], rows = bounds[group + 1] - first_row;
  pieces += first_row;
  for (int unit = warp; unit < (rows + 31) / 32 * (TOKENS / 4); unit += WARPS) {
    const int row = unit / (TOKENS / 4) * 32 + lane, first = unit % (TOKENS / 4) * 4;
    if (row >= rows) continue;
    float4 sum = {};
    #pragma unroll 1
    for (int i = pieces[row]; i < pieces[row + 1]; i++) {
      const float4 own = *(const float4*)(all_sums + (i - pieces[0]) * STRIDE + first);
      sum.x += own.x, sum.y += own.y, sum.z += own.z, sum.w += own.w;
    }
    const float each[4] = {sum.x, sum.y, sum.z, sum.w};
    Element* to = y + (long long)(token + first) * n + first_row + row;
    #pragma unroll
    for (int i = 0; i < 4; i++)
      if (token + first + i < m) to[(long long)i * n] = narrow(each[i]);
  }
}
