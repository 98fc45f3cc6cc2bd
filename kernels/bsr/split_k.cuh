// Partial sums of work items that are cut between workers (split-K). Used by bsr_wgrad.cu and
// bsr_wgrad_small.cu.
//
// A piece of an item is every second, third, ... of its steps. The sums of a piece go to `partials`
// in fp32, in register order:
//
//       worker 0    [ item 0, steps 0, 2, 4, ... ]   then  adds up units 0 to 3 of item 0
//       worker 1    [ item 0, steps 1, 3, 5, ... ]   then  adds up units 4 to 7 of item 0
//
// After its last piece, a worker adds up its share of each item of which it has a piece. It takes
// one unit, 64 rows x 32 columns, at a time and always adds in the order of the pieces: every
// launch gives equal bits. The wait for other workers cannot deadlock: all run at the same time,
// one per SM, and none waits before its partial sums are written. Each half of an item (the part
// that a warpgroup sums) has a counter. The first piece adds 2^31 minus the number of the other
// pieces, and each of these adds 1. So the highest bit flips when all have arrived, and the other
// bits are zero again: the next launch needs no reset.
//
// A partial sum of 128 KB written and read takes an SM about 6 us.

#pragma once
#include "hopper.cuh"

constexpr int GROUP = 128;  // threads of a warpgroup
constexpr int UNIT = 16;    // sums of a thread in a unit
constexpr u32 DONE = 1u << 31;

struct Part {
  int first, share, of;  // the item's first partial sum; this is piece `share` of `of`
  u32 adds;              // what the piece adds to the item's counter
};

// Return the address of a thread's partial sum p: SUMS / 4 times 16 bytes, coalesced over threads.
template <int SUMS>
__device__ __forceinline__ float* partial_address(float* partials, int p, int half) {
  return partials + (2LL * p + half) * SUMS * GROUP + threadIdx.x % GROUP * 4;
}

// Write the first `units` of a partial sum and count it. Thread 0 returns the counter's previous
// value.
template <int SUMS>
__device__ __forceinline__ u32 store_partial(const float (&d)[SUMS], int units, float* partials,
                                             u32* counters, const Part& part, int half) {
  float* to = partial_address<SUMS>(partials, part.first + part.share, half);
  #pragma unroll
  for (int i = 0; i < SUMS; i += 4)
    if (i / UNIT < units)
      asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                   :: "l"(to + i * GROUP), "f"(d[i]), "f"(d[i + 1]), "f"(d[i + 2]),
                      "f"(d[i + 3]) : "memory");
  warpgroup_sync(half + 1);
  u32 before = 0;
  if (threadIdx.x % GROUP == 0)
    asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counters + 2 * part.first + half), "r"(part.adds)
                 : "memory");
  return before;
}

__device__ __forceinline__ void wait_for_partials(const u32* counter, u32 before) {
  for (u32 tries = 0, now = before; !((now ^ before) & DONE); tries++) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
#ifdef WATCHDOG
    if (tries == 1 << 20)
      __assertfail("all partial sums", __FILE__, __LINE__, "wait_for_partials", 1);
#endif
  }
}

// Add up this piece's share of its item's units and call store(sums, unit). `before` is the
// previous value of any counter of this launch: between launches, the highest bits of all counters
// are equal.
template <int SUMS, class Store>
__device__ __forceinline__ void reduce_partials(float* partials, const u32* counters, u32 before,
                                                const Part& part, int units, int half,
                                                Store store) {
  const int first = part.first, share = part.share, of = part.of;
  if (threadIdx.x % GROUP == 0) wait_for_partials(counters + 2 * first + half, before);
  warpgroup_sync(half + 1);
  for (int unit = units * share / of; unit < units * (share + 1) / of; unit++) {
    float total[UNIT] = {};
    #pragma unroll 4
    for (int p = 0; p < of; p++) {
      const float* from = partial_address<SUMS>(partials, first + p, half) + unit * UNIT * GROUP;
      #pragma unroll
      for (int i = 0; i < UNIT; i += 4) {
        float s[4];
        asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(s[0]), "=f"(s[1]), "=f"(s[2]), "=f"(s[3]) : "l"(from + i * GROUP)
                     : "memory");
        #pragma unroll
        for (int j = 0; j < 4; j++) total[i + j] += s[j];
      }
    }
    store(total, unit);
  }
}
