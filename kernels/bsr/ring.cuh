// A ring of stages in shared memory, between the warps that copy and those that multiply. Used by
// bsr_small.cu, bsr_strips.cu, bsr_wgrad.cu and bsr_wgrad_small.cu.
//
//                      +---------+---------+-- --+
//      producers ----> | stage 0 | stage 1 | ... | ----> consumer warpgroups
//          ^           +---------+---------+-- --+            |
//          |             full: the bytes have landed          |
//          +------------ empty: all consumers have released it
//
// Every thread has a position in the ring: a stage and the parity of its barriers' phase.

#pragma once
#include "hopper.cuh"

template <int STAGES_> struct Ring {
  static constexpr int STAGES = STAGES_;
  u32 full, empty;  // shared memory: an mbarrier for each stage
  int stage;
  u32 phase;        // starts at 0 in a consumer and at 1 in a producer: all stages are free
  __device__ __forceinline__ u32 full_barrier() const { return full + 8 * stage; }
  __device__ __forceinline__ u32 empty_barrier() const { return empty + 8 * stage; }
  __device__ __forceinline__ void consumer_wait() const {
    mbarrier_wait(full_barrier(), phase, "a full stage");
  }
  __device__ __forceinline__ void producer_acquire() const {
    mbarrier_wait(empty_barrier(), phase, "a free stage");
  }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
};
