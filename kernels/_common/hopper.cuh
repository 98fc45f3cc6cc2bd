// What the kernels for Hopper (compute capability 9.0) share: barriers, copies, tensor cores.
// Each function is one instruction of PTX, under the name of what it does.
//
//   mbarrier    counts arrivals and bytes; a phase is over when both are complete. Whoever waits
//               gives the parity of the phase: 0, 1, 0, ...
//   load        TMA: a box of a matrix, as its tensor map says, into shared memory; complete when
//               its bytes have been counted by an mbarrier
//   bring       so many bytes into shared memory, counted likewise
//   store       TMA: a box out of shared memory, in groups that one waits for
//   wgmma       d[64 x N] += A[64 x 16] B[16 x N] by the four warps of a warpgroup, A and B in
//               shared memory; asynchronous, in groups that one waits for
//
// Tiles that wgmma reads are swizzled, as TMA writes them. With rows of 128 bytes, 16-byte piece p
// of row r lies at piece p ^ r % 8; of 64 bytes, at p ^ r / 2 % 4; of 32 bytes, at p ^ r / 4 % 2:
// eight rows that a tensor core reads at once are in different banks. A tile starts at a multiple
// of 1024 bytes (512, 256), where this pattern starts anew.
//
// Compiled with -DFP16=0|1 (0 is bf16), and for a look at a kernel that hangs with -DWATCHDOG=1.
// Source: PTX ISA 9.0, mbarrier, cp.async.bulk.tensor, wgmma.

#pragma once
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap { u64 words[16]; };  // made by the host, a kernel's own argument

__device__ __forceinline__ u32 address_of(const void* p) {  // in shared memory
  return (u32)__cvta_generic_to_shared(p);
}

// ---- mbarriers ----

__device__ __forceinline__ void init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void arrive_expecting(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// On the barrier of a CTA of the cluster. With .release.cluster, which is not needed for a word
// that a slot is free, bsr_wgmma took 45 % longer.
__device__ __forceinline__ void arrive_in(u32 barrier, int cta) {
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
               :: "r"(barrier), "r"(cta) : "memory");
}
__device__ __forceinline__ bool try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
               "selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
#ifdef WATCHDOG
// What assert() calls: prints block, thread and what was expected, and ends the kernel.
extern "C" __device__ void __assertfail(const char* what, const char* file, unsigned line,
                                        const char* function, size_t size);
__device__ __forceinline__ void wait(u32 barrier, u32 parity, const char* what) {
  for (int tries = 0; !try_wait(barrier, parity); tries++)
    if (tries == 1 << 18) __assertfail(what, __FILE__, __LINE__, "wait", 1);
}
#else
__device__ __forceinline__ void wait(u32 barrier, u32 parity, const char*) {
  while (!try_wait(barrier, parity)) {}
}
#endif

// ---- copies ----

__device__ __forceinline__ void load(u32 to, const TensorMap* map, int column, int row,
                                     u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4}], [%2];"
               :: "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
// As it lies in memory: a multiple of 16 bytes from and to addresses of such a multiple.
__device__ __forceinline__ void bring(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// To the same place in each CTA of the mask, and counted by each one's barrier.
__device__ __forceinline__ void load_for(unsigned short ctas, u32 to, const TensorMap* map,
                                         int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
               :: "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(ctas) : "memory");
}
__device__ __forceinline__ void store(const TensorMap* map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
               :: "l"(map), "r"(from), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void end_of_stores() {  // of a group
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int LEFT> __device__ __forceinline__ void stores_have_read() {  // all but LEFT groups
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(LEFT) : "memory");
}
__device__ __forceinline__ void stores_are_done() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// What threads wrote to shared memory, before wgmma or TMA reads it.
__device__ __forceinline__ void show_to_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- kernels in step ----
// A kernel that is launched early (Loaded.early) starts when that before it in the stream lets it, or
// has ended, and may touch what others write after `wait_for_stream` alone.

__device__ __forceinline__ void wait_for_stream() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- threads in step ----

__device__ __forceinline__ void warpgroup_in_step(int barrier) {  // 1 to 15
  asm volatile("bar.sync %0, 128;" :: "r"(barrier) : "memory");
}
// All threads of a cluster come, and wait. With something to show a thread waits, before it comes,
// until all that it wrote is in memory, and for its own reads.
__device__ __forceinline__ void come_to_cluster(bool to_show) {
  if (to_show) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  else asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_in_step() {
  come_to_cluster(true);
  wait_for_cluster();
}
__device__ __forceinline__ void cluster_has_read() {  // and has nothing to show
  come_to_cluster(false);
  wait_for_cluster();
}

// The address, for this CTA, of what another of the cluster has at the same place.
__device__ __forceinline__ u32 of_cta(u32 address, int cta) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
  return there;
}
// 16 bytes to such an address, counted by a barrier of that CTA.
__device__ __forceinline__ void push(u32 to, float4 v, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[%0], {%2, %3, %4, %5}, [%1];"
               :: "r"(to), "r"(barrier), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// In four neighbouring lanes, word t of lane q goes to word q of lane t: of sums in wgmma's order,
// two columns of each eight to a lane, a lane then has eight columns of one row.
__device__ __forceinline__ void exchange(u32 (&words)[4]) {
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

// ---- wgmma ----
// A thread holds N / 2 of the sums, and the instruction wants each register spelled out:
// WGMMA(64, a, b, 0, 0) adds to `float d[32]`. The last two say which of A and B is read by columns.

#if FP16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define FIVE(t, a, b, c, d, e) "%" #t #a ", %" #t #b ", %" #t #c ", %" #t #d ", %" #t #e ", "
#define TEN(t) FIVE(t, 0, 1, 2, 3, 4) FIVE(t, 5, 6, 7, 8, 9)
#define TENS_TO_29 TEN() TEN(1) TEN(2)
#define TENS_TO_59 TENS_TO_29 TEN(3) TEN(4) TEN(5)
#define TENS_TO_119 TENS_TO_59 TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11)
#define SUM_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUM_32 TEN() "%10, %11, %12, %13, %14, %15"
#define SUM_64 TENS_TO_29 "%30, %31"
#define SUM_128 TENS_TO_59 "%60, %61, %62, %63"
#define SUM_256 TENS_TO_119 "%120, %121, %122, %123, %124, %125, %126, %127"
#define A_AND_B_16 "%8, %9"
#define A_AND_B_32 "%16, %17"
#define A_AND_B_64 "%32, %33"
#define A_AND_B_128 "%64, %65"
#define A_AND_B_256 "%128, %129"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D_16 D4(0), D4(4)
#define D_32 D16(0)
#define D_64 D16(0), D16(16)
#define D_128 D_64, D16(32), D16(48)
#define D_256 D_128, D16(64), D16(80), D16(96), D16(112)
#define WGMMA_(N, a, b, a_by_columns, b_by_columns)                                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" SUM_##N "}, " \
               A_AND_B_##N ", 1, 1, 1, " TEXT(a_by_columns) ", " TEXT(b_by_columns) ";"           \
               : D_##N : "l"(a), "l"(b))
#define WGMMA(N, a, b, a_by_columns, b_by_columns) WGMMA_(N, a, b, a_by_columns, b_by_columns)

// Describe a tile with rows of 128, 64 or 32 bytes, so swizzled, to wgmma. Units are 16 bytes.
//   read by rows     (K along them)  +32 bytes is the next 16 of K; every 8 rows
//                    are 8 * row bytes on (SBO); LBO is not used
//   read by columns  (K across them) +16 rows is the next 16 of K; 8 rows of K are 8 * row bytes on
//                    (SBO); LBO is the distance to the next columns, where one row holds too few
__device__ __forceinline__ u64 descriptor(u32 tile, int row_bytes = 128, int next_columns = 16) {
  const u64 swizzle = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
  return (u64)(tile >> 4) | (u64)(next_columns >> 4) << 16 | (u64)(row_bytes * 8 >> 4) << 32 |
         swizzle << 62;
}
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_of_products() {  // of a group
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT> __device__ __forceinline__ void products_left() {  // groups
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}
__device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 pair;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// 0xffff in each half that is greater than zero or NaN.
__device__ __forceinline__ u32 on(u32 pair) {
  u32 mask;
  asm("set.gtu.u32." TYPE "x2 %0, %1, %2;" : "=r"(mask) : "r"(pair), "r"(0));
  return mask;
}

// ---- sums of features x tokens, into swizzled rows of 64 features ----
// Of 64 features a warp has 16. Its 16 x 16 sums are four pieces of 8 x 8, of each of which a lane
// holds two neighbouring tokens of a feature. stmatrix.trans stores them as 16 rows of tokens; lane
// l gives the address of row l % 8 of piece l / 8.

__device__ __forceinline__ u32 place_of_lane(u32 tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = lane % 8 + lane / 16 * 8, piece = 2 * warp + lane / 8 % 2;
  return tile + row * 128 + ((piece ^ (row & 7)) << 4);
}
__device__ __forceinline__ void put_transposed(u32 place, const float* s) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(place), "r"(pair_of(s[0], s[1])), "r"(pair_of(s[2], s[3])),
                  "r"(pair_of(s[4], s[5])), "r"(pair_of(s[6], s[7]))
               : "memory");
}
