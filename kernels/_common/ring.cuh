// A ring of stages in shared memory, between the warps that copy and those that multiply.
//
//                      +---------+---------+-- --+
//      producers ----> | stage 0 | stage 1 | ... | ----> consumer warpgroups
//          ^           +---------+---------+-- --+            |
//          |             full: the bytes have landed          |
//          +------------ empty: all consumers have released it
//
// Every thread has a position in the ring: a stage and the parity of its barriers' phase. A kernel
// derives its ring from this one and adds where a stage has its tiles.

#pragma once
#include "hopper.cuh"

// A thread's position, and where the mbarriers of a stage are in shared memory: in two arrays, or
// behind OFFSET bytes of stages. `phase` starts at 0 in a consumer, and at 1 in a producer, because
// all stages are free at first. ptxas takes other registers if the members are in another order.
struct InArrays {
  u32 full, empty;
  int stage;
  u32 phase;
  __device__ __forceinline__ u32 full_barrier(int of) const { return full + 8 * of; }
  __device__ __forceinline__ u32 empty_barrier(int of) const { return empty + 8 * of; }
};
template <int STAGES, int OFFSET> struct BehindStages {
  u32 base, phase;
  int stage;
  __device__ __forceinline__ u32 full_barrier(int of) const { return base + OFFSET + 8 * of; }
  __device__ __forceinline__ u32 empty_barrier(int of) const {
    return base + OFFSET + 8 * (STAGES + of);
  }
};

template <int STAGES_, class Position = InArrays> struct Ring : Position {
  static constexpr int STAGES = STAGES_;
  using Position::empty_barrier, Position::full_barrier, Position::phase, Position::stage;
  __device__ __forceinline__ u32 full_barrier() const { return full_barrier(stage); }
  __device__ __forceinline__ u32 empty_barrier() const { return empty_barrier(stage); }
  __device__ __forceinline__ void consumer_wait() const {
    mbarrier_wait(full_barrier(), phase, "a full stage");
  }
  __device__ __forceinline__ void producer_acquire() const {
    mbarrier_wait(empty_barrier(), phase, "a free stage");
  }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
  // One thread calls it. `filling` arrivals fill a stage, and `releasing` arrivals free it.
  __device__ __forceinline__ void init_barriers(int filling, int releasing) const {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(full_barrier(i), filling);
      mbarrier_init(empty_barrier(i), releasing);
    }
  }
  // A warpgroup releases a stage to every CTA that loads tiles into it, if there is one to release.
  // wgmma synchronises the four warps, so one thread does it for all.
  template <int LOADERS = 1>
  __device__ __forceinline__ void warpgroup_release(int of, bool there = true) const {
    const int thread = threadIdx.x % 128;
    if (!there) return;
    if (LOADERS == 1 && thread == 0) mbarrier_arrive(empty_barrier(of));
    if (LOADERS > 1 && thread < LOADERS) mbarrier_arrive_cluster(empty_barrier(of), thread);
  }
};
