// Device functions of the kernels that use mma (compute capability 8.0 and newer): one PTX
// instruction each, with its name. Define TYPE, "f16" or "bf16", first. Macro: FP16=0|1.
// Source: PTX ISA 9.0, mma.m16n8k16, mma.m16n8k8, ldmatrix, movmatrix, cp.async.

#pragma once

__device__ __forceinline__ void cp_async_commit() {  // ends a group
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Wait until at most LEFT groups are in flight.
template <int LEFT> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}
// Load four matrices of 8 rows x 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8,
// and gets word l % 4 of row l / 4 of each matrix.
__device__ __forceinline__ void ldmatrix_x4(u32 (&v)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
}
// The same, transposed: lane l gets column l / 4 of rows 2 (l % 4) and the next of each matrix.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&v)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ u32 movmatrix_trans(u32 v) {  // 8 x 8, as ldmatrix lays it out
  u32 t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
  return t;
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}
__device__ __forceinline__ float to_float(unsigned short value) {
  float f;
#if FP16
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(value));
#else
  f = __uint_as_float((u32)value << 16);
#endif
  return f;
}
