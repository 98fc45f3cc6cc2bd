// What runs before and after attention_wgmma_backward.cu if dQ is a sum in memory; that file
// describes the sums.
// Macros: HEAD_DIM=64|128, and hopper.cuh's.

#include "hopper.cuh"
#include "mma.cuh"
#include "warpgroup.cuh"

constexpr int ROWS = 64;
#define INF __int_as_float(0x7f800000)

struct Sizes { int queries, keys, heads, kv_heads, padded; float scale, log_scale; };

// LSE for exp2 and delta, infinite and 0 where there is no query, and zeros for dQ's sums: a warp
// for each of the padded queries of each head.
extern "C" __global__ void __launch_bounds__(256)
prepare_queries(const char* o, const char* d_o, const float* lse, float* lse_2, float* delta,
                float* sums, const __grid_constant__ Sizes sizes, int heads) {
  const int lane = threadIdx.x % 32;
  const long long warp = (long long)blockIdx.x * 8 + threadIdx.x / 32;
  const int head = warp / sizes.padded, query = warp % sizes.padded;
  if (head >= heads) return;
  float sum = 0.f, log_sum = -INF;
  if (query < sizes.queries) {
    const long long token = (long long)(head / sizes.heads) * sizes.queries + query;
    const long long place = (token * sizes.heads + head % sizes.heads) * HEAD_DIM * 2;
    for (int i = lane; i < HEAD_DIM / 2; i += 32) {
      const u32 a = ((const u32*)(o + place))[i], b = ((const u32*)(d_o + place))[i];
      sum += to_float(a & 0xffff) * to_float(b & 0xffff) + to_float(a >> 16) * to_float(b >> 16);
    }
    for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    log_sum = lse[(long long)head * sizes.queries + query];
  }
  if (lane == 0) {
    lse_2[warp] = log_sum == -INF ? INF : log_sum * 1.44269504f;
    delta[warp] = sum;
  }
  if (lane < HEAD_DIM / 4)
    ((float4*)(sums + warp * HEAD_DIM))[lane] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// dQ from its sums: a CTA for each 64 queries of each head.
extern "C" __global__ void __launch_bounds__(128)
finish_queries(const float* sums, char* dq, const __grid_constant__ Sizes sizes) {
  const int tiles = sizes.padded / ROWS, head = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int query = tile * ROWS + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const float4* tile_sums = (const float4*)(sums + (long long)blockIdx.x * ROWS * HEAD_DIM);
  float d[HEAD_DIM / 2];
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 8; i++) {
    const float4 v = tile_sums[i * 128 + threadIdx.x];
    d[4 * i] = v.x;
    d[4 * i + 1] = v.y;
    d[4 * i + 2] = v.z;
    d[4 * i + 3] = v.w;
  }
  const long long row_bytes = (long long)sizes.heads * HEAD_DIM * 2;
  const float scales[2] = {sizes.scale, sizes.scale};
  char* to = dq + head / sizes.heads * sizes.queries * row_bytes +
             head % sizes.heads * HEAD_DIM * 2;
  store_rows<HEAD_DIM>(d, scales, to, query, sizes.queries, row_bytes);
}
