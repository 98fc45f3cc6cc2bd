// Shared by bsr_wgrad.cu and bsr_wgrad_small.cu: the ring of stages, each with DEPTH tokens of
// boxes of dY and of X (tiles or strips), and the loop of the consumers.
//
//    warp 8    boxes 0, 4, 8 ... --+    +---------+---------+-- --+    +--> warpgroup 0: half 0
//    warp 9    boxes 1, 5 ...    --+--> | stage 0 | stage 1 | ... | ---+
//    warp 10   boxes 2, 6 ...    --+    +---------+---------+-- --+    +--> warpgroup 1: half 1
//    warp 11   boxes 3, 7 ...    --+
//
// Macros: DEPTH, RING_BYTES.

#pragma once
#include "ring.cuh"
#include "split_k.cuh"

constexpr int PRODUCERS = 4;

struct Maps { TensorMap dy, x; };

// The ring: stages of COUNT boxes, DEPTH rows of ROW_BYTES each.
struct Start { u32 boxes; };  // of the ring, in shared memory
template <int COUNT, int ROW_BYTES>
struct Tokens : Start, Ring<RING_BYTES / (COUNT * DEPTH * ROW_BYTES)> {
  static constexpr int BOX_BYTES = DEPTH * ROW_BYTES;
  __device__ __forceinline__ u32 box(int i) const {
    return boxes + this->stage * (COUNT * BOX_BYTES) + i * BOX_BYTES;
  }
};

template <class Pipeline>
__device__ __forceinline__ void consumer_release(const Pipeline& pipe, int stage) {
  if (threadIdx.x % GROUP == 0) mbarrier_arrive(pipe.empty + 8 * stage);
}

// Add up the products of one half of a piece. multiply() starts those of a step as one group, which
// stays in flight.
template <int SUMS, class Pipeline, class Multiply>
__device__ __forceinline__ void mainloop(float (&d)[SUMS], Pipeline& pipe, int count,
                                         const Multiply& multiply) {
  #pragma unroll
  for (int i = 0; i < SUMS; i++) d[i] = 0.f;
  int in_use = -1;  // the stage that products in flight read
  for (; count > 0; count--) {
    pipe.consumer_wait();
    multiply();
    wgmma_wait<1>();
    if (in_use >= 0) consumer_release(pipe, in_use);
    in_use = pipe.stage;
    pipe.advance();
  }
  wgmma_wait<0>();
  if (in_use >= 0) consumer_release(pipe, in_use);
}
