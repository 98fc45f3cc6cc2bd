// Device functions of the attention kernels beyond hopper.cuh, mma.cuh and wgmma.cuh: one PTX
// instruction each, with its name, and the sums of a warpgroup [64 x HEAD_DIM].

#pragma once
#include "wgmma.cuh"

// Sums that wgmma has written: no use of them moves before this.
template <int COUNT> __device__ __forceinline__ void hold(float (&d)[COUNT]) {
  #pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ void st_shared(u32 to, int v) {
  asm volatile("st.shared.b32 [%0], %1;" :: "r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ int ld_shared(u32 from) {
  int v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ float2 ld_shared_pair(u32 from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint4 ld_shared_quad(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
// Four words to memory, which no one reads soon: the L2 cache evicts them first.
__device__ __forceinline__ void st_streaming(void* to, const u32* v) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
// wgmma synchronises the four warps, so one thread releases what their products have read.
__device__ __forceinline__ void release(u32 barrier) {
  if (threadIdx.x % 128 == 0) mbarrier_arrive(barrier);
}
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
// Load a box of a matrix [planes, rows, columns]. Outside of its plane a box reads zeros.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, int column, int row,
                                         int plane, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5}], [%2];"
               :: "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(plane) : "memory");
}

// Copy 16 bytes, or write zeros.
__device__ __forceinline__ void cp_async_16(u32 to, const char* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Store a warpgroup's sums [64 x WIDTH] in 16 bits, 64 contiguous bytes of a row at a time.
//   row_of   of 0 and 1 -> where this lane's two rows are, or null
//   factors  of these
template <int WIDTH, class RowOf>
__device__ __forceinline__ void store_rows(const float (&d)[WIDTH / 2], const float (&factors)[2],
                                           RowOf row_of) {
  #pragma unroll
  for (int r = 0; r < 2; r++)
    #pragma unroll
    for (int c = 0; c < WIDTH / 32; c++) {
      u32 words[4];
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* pair = d + 16 * c + 4 * i + 2 * r;
        words[i] = pack_pair(pair[0] * factors[r], pair[1] * factors[r]);
      }
      quad_transpose(words);
      if (char* const row = row_of(r))
        *(uint4*)(row + (32 * c + threadIdx.x % 4 * 8) * 2) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// The same for rows that follow each other.
//   row  this lane's first row; the other is 8 further. Rows from `rows` on are left out
template <int WIDTH>
__device__ __forceinline__ void store_rows(const float (&d)[WIDTH / 2], const float (&factors)[2],
                                           char* to, int row, int rows, long long row_bytes) {
  store_rows<WIDTH>(d, factors, [&](int r) {
    return row + 8 * r < rows ? to + (row + 8 * r) * row_bytes : nullptr;
  });
}

// d[64 x HEAD_DIM] = keep * d + A[64 x N] B[N x HEAD_DIM], of a tile of ROWS rows of B.
template <int ROWS, int N = ROWS>
__device__ __forceinline__ void add_rows(float (&d)[HEAD_DIM / 2], const u32 (&a)[ROWS / 4],
                                         u32 tile, int keep = 1) {
  const u64 b = smem_descriptor(tile, 128, ROWS * 128);
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < N / 16; i++)
    Wgmma<HEAD_DIM, 0, 1>::multiply(d, a + 4 * i, b + (i * 16 * 128 >> 4), i > 0 || keep);
  wgmma_commit();
}
