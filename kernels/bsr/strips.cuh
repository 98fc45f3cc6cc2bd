// Shared by bsr_small.cu and bsr_strips.cu: the steps that the host lists (_small_steps.py), the
// ring of stages with their notes, and the loop of the consumers. A block is a tile in
// bsr_strips.cu.
//
//   stage   | strip 0 | strip 1 | .. | blocks, in the order of the products |   and a note
//
// Each kernel has its own producer loop: if it is shared, ptxas orders its moves differently.
//
// Macros: WARPGROUPS, STRIPS, RING_BYTES, WORKERS, LAST, END.

#pragma once
#include "ring.cuh"
#include "wgmma.cuh"

// A share: the blocks that one warpgroup multiplies in a step.
struct alignas(16) Share {
  u32 counts;  // blocks of each row, 4 bits each
  int first;   // the share's first block in the chunk (8 bits), and the flags LAST and END
  u64 places;  // of each block, 3 bits each
};
struct alignas(16) Step {
  int blocks, token, group, first;  // `blocks` of the packed W from `first` on are the chunk
  u64 strips, unused;               // four numbers of strips, 16 bits each
  Share shares[WARPGROUPS];
};
struct Starts { int at[WORKERS]; };  // of each worker's steps

__device__ __forceinline__ void st_shared(u32 to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Branches depend on these values. The shuffles tell ptxas that all lanes of a warp have the same
// value. Otherwise it serialises wgmma: it waits for each product.
__device__ __forceinline__ uint4 ld_shared(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return uint4{__shfl_sync(~0u, v.x, 0), __shfl_sync(~0u, v.y, 0), __shfl_sync(~0u, v.z, 0),
               __shfl_sync(~0u, v.w, 0)};
}

// Keep an address in a register. Otherwise ptxas recomputes it from the CTA's number at every step.
__device__ __forceinline__ u32 opaque(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}

__device__ constexpr int stages_of(int bytes) { return RING_BYTES / bytes < 8 ? RING_BYTES / bytes : 8; }

// The addresses of the ring in shared memory.
struct Buffers { u32 tiles, notes; };

// The ring: a stage has STRIPS strips, and W_BYTES for blocks.
template <int STRIP_BYTES, int W_BYTES>
struct Strips : Buffers, Ring<stages_of(STRIPS * STRIP_BYTES + W_BYTES)> {
  static constexpr int STAGE_BYTES = STRIPS * STRIP_BYTES + W_BYTES;
  __device__ __forceinline__ u32 x() const { return tiles + this->stage * STAGE_BYTES; }
  __device__ __forceinline__ u32 w() const { return x() + STRIPS * STRIP_BYTES; }
  __device__ __forceinline__ u32 note() const {
    return notes + (1 + WARPGROUPS) * 16 * this->stage;
  }
  __device__ __forceinline__ u32 share(int i) const { return note() + 16 * (1 + i); }
};

// ---- producers ----

template <class Pipeline>
__device__ __forceinline__ void write_note(const Pipeline& pipe, const Step& step) {
  st_shared(pipe.note(), *(const uint4*)&step);
  #pragma unroll
  for (int i = 0; i < WARPGROUPS; i++) st_shared(pipe.share(i), *(const uint4*)&step.shares[i]);
  mbarrier_arrive(pipe.full_barrier());
}

// ---- consumers ----

// The destination of a work item's sums. Lane j holds the number of seat j, a row or unit; -1:
// none.
struct Item { int token, seat_of_lane; bool last; };

template <class Pipeline>
__device__ __forceinline__ void consumer_release(const Pipeline& pipe, int stage) {  // by each warp
  if (threadIdx.x % 32 == 0) mbarrier_arrive(pipe.empty_barrier(stage));
}

// Add up the products of the next work item in the list; return the destination of its sums.
// multiply(strips, blocks, share) starts the products of a step as one group, which stays in
// flight.
template <int SEATS, class Sums, class Pipeline, class Multiply>
__device__ __forceinline__ Item mainloop(Sums& sums, Pipeline& pipe, int warpgroup,
                                         const int* seats, const Multiply& multiply) {
  const int lane = threadIdx.x % 32;
  #pragma unroll
  for (int i = 0; i < sizeof(Sums) / 4; i++) (&sums[0][0][0])[i] = 0.f;
  pipe.consumer_wait();
  const uint4 note = ld_shared(pipe.note());
  Item item{(int)note.y, 0, false};
  if (lane < SEATS) item.seat_of_lane = seats[(note.z * WARPGROUPS + warpgroup) * SEATS + lane];
  int in_use = -1;  // the stage that products in flight read
  for (;;) {
    pipe.consumer_wait();
    const uint4 share = ld_shared(pipe.share(warpgroup));
    multiply(pipe.x(), pipe.w(), share);
    wgmma_wait<1>();
    if (in_use >= 0) consumer_release(pipe, in_use);
    in_use = pipe.stage;
    pipe.advance();
    if (share.y & LAST) {
      wgmma_wait<0>();
      consumer_release(pipe, in_use);
      item.last = share.y & END;
      return item;
    }
  }
}
