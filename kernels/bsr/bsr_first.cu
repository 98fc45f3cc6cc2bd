// Y[m, n] = X[m, k] @ W[n, k].T for blocks of 16 x 16: the shortest kernel here that uses the tensor
// cores. bsr_first.py packs W for it. Read this one first; the others add what makes them fast.
//
//   warp: a block row of W and TOKENS tokens      D [16 features x 8 tokens] += A B, for each block
//
//      W, a block row                X                       A   the block: 8 values a lane, 16 bytes
//     +----+----+----+----+        +----+----+----+----+         packed in the order of mma
//     | ## |    | ## |    |        |    |    |    |    |     B   16 columns of 8 tokens: two words a
//     +----+----+----+----+        +----+----+----+----+         lane, from X as it is
//      columns: 0, 2                 0         2             D   fp32, four sums a lane
//
// Nothing is loaded ahead, so each block waits for its index, and then for W and X. bsr_small.cu has
// what this lacks: TMA, a ring of buffers, and strips of X that several block rows share (NOTES.md).
//
// Macros: TOKENS=8|16|32 WARPS FP16=0|1. Source: PTX ISA 9.0, mma.m16n8k16.

using u32 = unsigned int;
#if FP16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
#include "mma.cuh"

__device__ __forceinline__ unsigned short rounded(float value) {
  unsigned short bits;
#if FP16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
  return bits;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) multiply_first(
    const unsigned short* x, long long stride, const int* offsets, const int* columns,
    const uint4* w, unsigned short* y, int m, int n, int k, int rows) {
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4 * 2;
  const int row = blockIdx.x % ((rows + WARPS - 1) / WARPS) * WARPS + threadIdx.x / 32;
  const long long token = (long long)(blockIdx.x / ((rows + WARPS - 1) / WARPS)) * TOKENS;
  if (row >= rows) return;

  float sums[TOKENS / 8][4] = {};
  for (int block = offsets[row]; block < offsets[row + 1]; block++) {
    const uint4 packed = w[block * 32ll + lane];
    const u32 a[4] = {packed.x, packed.y, packed.z, packed.w};
    const int column = columns[block] * 16 + pair;
    for (int tile = 0; tile < TOKENS / 8; tile++) {
      const long long at = token + tile * 8 + group;
      const unsigned short* from = x + at * stride + column;
      const u32 b0 = at < m && column < k ? *(const u32*)from : 0;
      const u32 b1 = at < m && column + 8 < k ? *(const u32*)(from + 8) : 0;
      mma_m16n8k16(sums[tile], a, b0, b1);
    }
  }
  for (int tile = 0; tile < TOKENS / 8; tile++)
    for (int i = 0; i < 4; i++) {  // features group and group + 8, tokens pair and pair + 1
      const long long at = token + tile * 8 + pair + i % 2;
      const int feature = row * 16 + group + i / 2 * 8;
      if (at < m && feature < n) y[at * n + feature] = rounded(sums[tile][i]);
    }
}
