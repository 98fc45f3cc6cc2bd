// Scales of fp8 products: one for each of n features and one for each of m tokens; null for none.
// They are applied to the sums of wgmma [64 features x tokens], in registers, before they are
// rounded. Used by spense_wgmma.cu and bsr_wgmma.cu.

#pragma once

struct Scales { const float *features, *tokens; int n, m; };

// Scale the accumulators of 64 features, from `feature` on, and of 8 FRAGMENTS tokens from `token`.
template <int FRAGMENTS>
__device__ __forceinline__ void apply_scales(float* d, const Scales& scales, int feature,
                                             int token) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int low = feature + 16 * warp + lane / 4, even = token + lane % 4 * 2;
  if (scales.features) {
    const float of_low = low < scales.n ? scales.features[low] : 0.f;
    const float of_high = low + 8 < scales.n ? scales.features[low + 8] : 0.f;
    #pragma unroll
    for (int i = 0; i < 4 * FRAGMENTS; i += 4)
      d[i] *= of_low, d[i + 1] *= of_low, d[i + 2] *= of_high, d[i + 3] *= of_high;
  }
  if (scales.tokens) {
    #pragma unroll
    for (int i = 0; i < FRAGMENTS; i++) {
      const int at = even + 8 * i;
      const float of_even = at < scales.m ? scales.tokens[at] : 0.f;
      const float of_odd = at + 1 < scales.m ? scales.tokens[at + 1] : 0.f;
      d[4 * i] *= of_even, d[4 * i + 1] *= of_odd, d[4 * i + 2] *= of_even, d[4 * i + 3] *= of_odd;
    }
  }
}
