// Device functions of the kernels for Hopper (compute capability 9.0): one PTX instruction each.
// Names follow PTX and CUTLASS.
//
//   mbarrier    counts arrivals and bytes (expect_tx). A phase completes when none is missing.
//               A wait names the parity of the phase: 0, 1, 0, ...
//   tma_load    copies a box of a matrix, described by a tensor map, into shared memory. An
//               mbarrier counts its bytes.
//   bulk_load   copies contiguous bytes into shared memory, counted in the same way.
//   tma_store   copies a box from shared memory to a matrix. commit ends a group of stores, wait
//               waits for groups.
//
// Tiles for wgmma (wgmma.cuh) are swizzled, as TMA writes them. Row r has its 16-byte piece p
//   at piece p ^ r % 8        in rows of 128 bytes,
//   at piece p ^ r / 2 % 4    in rows of 64 bytes,
//   at piece p ^ r / 4 % 2    in rows of 32 bytes.
// So the eight rows that a tensor core reads at once lie in different banks. A tile starts at a
// multiple of 1024, 512 or 256 bytes, where the pattern repeats.
//
// Macros: FP16=0|1 (0 is bf16). WATCHDOG=1 ends a kernel that hangs, and prints where it waited.
// Source: PTX ISA 9.0, mbarrier, cp.async.bulk.tensor; CUTLASS 4, include/cute/arch.

#pragma once
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap { u64 words[16]; };  // made by the host; a __grid_constant__ argument

__device__ __forceinline__ u32 smem_address(const void* p) {  // in shared memory
  return (u32)__cvta_generic_to_shared(p);
}

// ---- mbarriers ----

__device__ __forceinline__ void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals));
}
// After mbarrier_init, by the same thread: other CTAs of the cluster, and TMA, see the barriers. If
// all threads execute it, it takes 2 us.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// Arrive on the same barrier of another CTA of the cluster. The arrival frees a stage and publishes
// no data, so it needs no .release.cluster, with which bsr_wgmma took 45 % longer.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier, int cta) {
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
               :: "r"(barrier), "r"(cta) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
               "selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
#ifdef WATCHDOG
// assert() calls this: it prints block, thread and `what`, and ends the kernel.
extern "C" __device__ void __assertfail(const char* what, const char* file, unsigned line,
                                        const char* function, size_t size);
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity, const char* what) {
  for (int tries = 0; !mbarrier_try_wait(barrier, parity); tries++)
    if (tries == 1 << 18) __assertfail(what, __FILE__, __LINE__, "wait", 1);
}
#else
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity, const char*) {
  while (!mbarrier_try_wait(barrier, parity)) {}
}
#endif

// ---- copies ----

__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, int column, int row,
                                     u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4}], [%2];"
               :: "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
// With an L2 policy, which says what is evicted first or last.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, int column, int row,
                                         u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
               :: "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy) : "memory");
}
// Addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void bulk_load(u32 to, const void* from, int bytes, u32 barrier,
                                          u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
#define POLICY(name)                                                                      \
  __device__ __forceinline__ u64 name() {                                                 \
    u64 policy;                                                                           \
    asm volatile("createpolicy.fractional.L2::" #name ".b64 %0;" : "=l"(policy));         \
    return policy;                                                                        \
  }
POLICY(evict_first)
POLICY(evict_last)
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
}
// Load into every CTA of the mask `ctas`, at the same address, counted by each CTA's barrier.
__device__ __forceinline__ void tma_load_multicast(unsigned short ctas, u32 to,
                                                   const TensorMap* map, int column, int row,
                                                   u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
               :: "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(ctas) : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap* map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
               :: "l"(map), "r"(from), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void tma_store_commit() {  // ends a group
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Wait until all groups but LEFT have read their boxes, which may then be written again.
template <int LEFT> __device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(LEFT) : "memory");
}
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Make what threads wrote to shared memory visible to wgmma and TMA, which read it next.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- programmatic dependent launch ----
// A kernel that is launched early (Loaded.early) starts when its predecessor in the stream
// calls launch_dependent_grids, or ends. It reads and writes memory that other kernels use only
// after wait_on_dependent_grids.

__device__ __forceinline__ void wait_on_dependent_grids() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void launch_dependent_grids() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- barriers of threads: warpgroup, cluster ----

__device__ __forceinline__ void warpgroup_sync(int barrier) {  // named barrier 1 to 15
  asm volatile("bar.sync %0, 128;" :: "r"(barrier) : "memory");
}
// Registers of a thread, in all four warps of a warpgroup: producers give some to consumers.
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
// All threads of a cluster arrive, then wait. An arrival with release waits for the thread's own
// reads and until its writes are visible to the cluster; relaxed waits for nothing.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
__device__ __forceinline__ void cluster_sync_relaxed() {  // without writes to publish
  cluster_arrive_relaxed();
  cluster_wait();
}

// Return the address by which this CTA reaches the same shared memory of another in the cluster.
__device__ __forceinline__ u32 map_shared_rank(u32 address, int cta) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
  return there;
}
// Store 16 bytes to such an address. A barrier of that CTA counts them.
__device__ __forceinline__ void st_async(u32 to, float4 v, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[%0], {%2, %3, %4, %5}, [%1];"
               :: "r"(to), "r"(barrier), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// In four neighbouring lanes, word t of lane q goes to word q of lane t. wgmma gives a lane two of
// each eight columns; after the transpose a lane has eight columns of one row, 16 bytes to store.
__device__ __forceinline__ void quad_transpose(u32 (&words)[4]) {
  #pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int low = bit == 1 ? 2 * i : i, high = low + bit;
      const u32 got = __shfl_xor_sync(~0u, upper ? words[low] : words[high], bit);
      words[low] = upper ? got : words[low];
      words[high] = upper ? words[high] : got;
    }
  }
}

// ---- pairs of f16 or bf16 ----

#if FP16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

__device__ __forceinline__ u32 pack_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Return 0xffff in each half that is greater than zero or NaN.
__device__ __forceinline__ u32 positive_mask(u32 pair) {
  u32 mask;
  asm("set.gtu.u32." TYPE "x2 %0, %1, %2;" : "=r"(mask) : "r"(pair), "r"(0));
  return mask;
}

// ---- sums [features x tokens] to shared memory, as swizzled rows of 64 features ----
// A warp holds 16 of the 64 features. Its 16 x 16 sums are four matrices of 8 x 8; of each, a lane
// holds two neighbouring tokens of one feature. stmatrix.trans stores them as 16 rows, one a token.
// Lane l gives the address of row l % 8 of matrix l / 8.

__device__ __forceinline__ u32 stmatrix_address(u32 tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = lane % 8 + lane / 16 * 8, piece = 2 * warp + lane / 8 % 2;
  return tile + row * 128 + ((piece ^ (row & 7)) << 4);
}
__device__ __forceinline__ void stmatrix_x4_trans(u32 place, const float* s) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(place), "r"(pack_pair(s[0], s[1])), "r"(pack_pair(s[2], s[3])),
                  "r"(pack_pair(s[4], s[5])), "r"(pack_pair(s[6], s[7]))
               : "memory");
}
