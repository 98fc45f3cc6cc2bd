// Instructions that ffn_few.cu and ffn_sparse.cu use beyond those of hopper.cuh and mma.cuh.
// Each function is one PTX instruction; tests on a CPU replace this file with grid_on_cpu.h.
// Source: PTX ISA 9.0, cp.async, createpolicy, mbarrier, bar, ld, st, red.

#pragma once
#include "ring.cuh"
#include "mma.cuh"

// ---- L2 policies: how long L2 keeps a line ----

__device__ __forceinline__ u64 evict_last_policy() {  // for weights, which other CTAs also read
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ u64 evict_first_policy() {  // for data that is read or written once
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ---- asynchronous copies of 16 bytes to shared memory; zeros if not `pred` ----

__device__ __forceinline__ void cp_async_16(u32 to, const char* from, bool pred) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(pred ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_16(u32 to, const char* from, bool pred, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               :: "r"(to), "l"(from), "r"(pred ? 16 : 0), "l"(policy) : "memory");
}
// Arrive on a barrier as soon as all earlier copies of this thread have landed.
__device__ __forceinline__ void cp_async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}

// ---- prefetches to L2 ----

__device__ __forceinline__ void prefetch_l2(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(line));
}
// Address and size must be multiples of 16 bytes.
__device__ __forceinline__ void bulk_prefetch_l2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}

// ---- loads and stores of data that is used once ----

// Volatile, so that the compiler issues all loads of a loop before it waits for the first.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from), "l"(evict_first_policy()));
  return v;
}
// Load only if the address is there, and else return zeros. A predicate does what a branch would, and
// several such loads are in flight together.
__device__ __forceinline__ uint4 load_once(const uint4* from, bool there) {
  uint4 v{};
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %6, 0;\n"
               "@p ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;\n}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(from), "l"(evict_first_policy()), "r"((u32)there));
  return v;
}
__device__ __forceinline__ uint2 load_once(const uint2* from) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(v.x), "=r"(v.y) : "l"(from), "l"(evict_first_policy()));
  return v;
}
__device__ __forceinline__ void store_once(uint4* to, uint4 v) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
               :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(evict_first_policy())
               : "memory");
}

// ---- barriers ----

__device__ __forceinline__ void expect_tx(u32 barrier, int bytes) {  // without an arrival
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}
// Wait at hardware barrier 0 to 15 of a CTA for `threads` threads, which are whole warps.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
template <int BARRIER, int THREADS> __device__ __forceinline__ void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" :: "n"(BARRIER), "n"(THREADS) : "memory");
}

// ---- a cluster: flags in shared memory, a byte each ----

__device__ __forceinline__ void store_flag(u32 to, u32 flag, int cta) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %2;\n"
               "st.relaxed.cluster.shared::cluster.u8 [there], %1;\n}"
               :: "r"(to), "r"(flag), "r"(cta) : "memory");
}
template <int FLAGS> __device__ __forceinline__ u32 load_flags(u32 at) {  // 1, 2 or 4 adjacent
  static_assert(FLAGS == 1 || FLAGS == 2 || FLAGS == 4, "one load");
  u32 v;
  if (FLAGS == 1)
    asm volatile("ld.relaxed.cluster.shared::cta.u8 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  else if (FLAGS == 2)
    asm volatile("ld.relaxed.cluster.shared::cta.u16 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  else
    asm volatile("ld.relaxed.cluster.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

// ---- words and counters in global memory, between CTAs ----

__device__ __forceinline__ void store_relaxed(u64* to, u64 word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ u64 load_relaxed(const u64* from) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
// A thread that reads the count with `load_acquire` also sees everything that these threads wrote
// before their last barrier.
__device__ __forceinline__ void add_release(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(counter) : "memory");
}
__device__ __forceinline__ int load_acquire(const int* counter) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}
