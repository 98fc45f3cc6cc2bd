// Shared by bsr_wgrad.cu, bsr_wgrad_small.cu and bsr_wgrad_mma.cu: the ring of stages, each with
// DEPTH tokens of boxes of dY and of X (tiles or strips), the producers, and the loop of wgmma.
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
#include "wgmma.cuh"

constexpr int PRODUCERS = 4;

struct Maps { TensorMap dy, x; };

// The ring: stages of COUNT boxes, DEPTH rows of ROW_BYTES each.
struct Start { u32 boxes; };  // of the ring, in shared memory
template <int COUNT, int ROW_BYTES>
struct Tokens : Start, Ring<RING_BYTES / (COUNT * DEPTH * ROW_BYTES)> {
  static constexpr int BOX_BYTES = DEPTH * ROW_BYTES, OF_STAGE = COUNT;  // boxes
  __device__ __forceinline__ u32 box(int i) const {
    return boxes + this->stage * (COUNT * BOX_BYTES) + i * BOX_BYTES;
  }
};

template <class Pipeline> struct Strip {  // an entry of Loads::boxes: first column * 2, + 1 if of dY
  static __device__ __forceinline__ int column(int box) { return box >> 1; }
  static __device__ __forceinline__ int bytes(int) { return Pipeline::BOX_BYTES; }
};

// Load the boxes of a worker's pieces. One thread in each of four warps: it takes about 170 clocks
// to issue a box. Box::column and Box::bytes read an entry of Loads::boxes; an odd one is of dY.
template <class Box, class Loads, class Pipeline>
__device__ __forceinline__ void producer(const Maps& maps, const Loads* loads, int at, int end,
                                         Pipeline pipe, int rank) {
  constexpr int EACH = (Pipeline::OF_STAGE + PRODUCERS - 1) / PRODUCERS;
  for (; at < end; at++) {
    int boxes[EACH], bytes = 0;
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int box = rank + PRODUCERS * i;
      const bool there = Pipeline::OF_STAGE % PRODUCERS == 0 || box < Pipeline::OF_STAGE;
      boxes[i] = there ? loads[at].boxes[box] : -1;
      bytes += boxes[i] >= 0 ? Box::bytes(boxes[i]) : 0;
    }
    int token = loads[at].step * DEPTH;
    const int stride = loads[at].stride * DEPTH;
    for (int left = loads[at].count; left > 0; left--) {
      pipe.producer_acquire();
      mbarrier_arrive_expect_tx(pipe.full_barrier(), bytes);
      #pragma unroll
      for (int i = 0; i < EACH; i++) {
        const TensorMap* map = boxes[i] & 1 ? &maps.dy : &maps.x;
        const u32 to = pipe.box(rank + PRODUCERS * i);
        if (boxes[i] >= 0) tma_load(to, map, Box::column(boxes[i]), token, pipe.full_barrier());
      }
      pipe.advance();
      token += stride;
    }
  }
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
    if (in_use >= 0) pipe.warpgroup_release(in_use);
    in_use = pipe.stage;
    pipe.advance();
  }
  wgmma_wait<0>();
  if (in_use >= 0) pipe.warpgroup_release(in_use);
}
