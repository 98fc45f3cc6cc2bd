// wgmma, the products of Hopper's tensor cores, for every width N from 16 to 256.
//
//   Wgmma<N>::multiply(d, a, b)                 d[64 x N] += A[64 x K] B[K x N]
//   Wgmma<N>::multiply(d, a, b, keep)           d = keep * d + A B
//   Wgmma<N>::multiply_sparse(d, a, b, words)   d += A[64 x 2 K] B[2 K x N]; A is 2:4 sparse, with
//                                               its metadata in `words`
//
// The four warps of a warpgroup multiply together, asynchronously: fence, products, commit, wait. K
// is 32 bytes: 16 of f16 or bf16, or 32 of e4m3. a and b are descriptors of tiles in shared memory;
// instead of its descriptor, `a` may be A in registers. With Wgmma<N, 1, 0> A is transposed
// (MN-major, read by columns), with Wgmma<N, 0, 1> B is; e4m3 is K-major only.
//
// A thread holds N / 2 sums, and the instruction names each register. If A is in registers, lane
// 4 g + t of warp w has four words of it: row 16 w + g at columns 2 t and 2 t + 1, row + 8 there, and
// both rows 8 columns on. wgmma leaves its sums so: the pairs of d[8 i .. 8 i + 7], packed, are A for
// the sums' columns 16 i to 16 i + 15.
//
// Macros: FP16=0|1 (0 is bf16), FP8=1 (e4m3). Source: PTX ISA 9.0, wgmma.mma_async(.sp).

#pragma once
#include "hopper.cuh"

// Return the shared memory descriptor of a swizzled tile with rows of 128, 64 or 32 bytes. Its
// fields count in 16 bytes. SBO, the stride to the next 8 rows, is 8 * row_bytes.
//   K-major   (K along a row)    the next 16 of K are 32 bytes on; LBO is not used
//   MN-major  (K down the rows)  the next 16 of K are 16 rows on; LBO is `next_columns`, the stride
//                                to the next columns, for products wider than a row
__device__ __forceinline__ u64 smem_descriptor(u32 tile, int row_bytes = 128,
                                               int next_columns = 16) {
  const u64 swizzle = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
  return (u64)(tile >> 4) | (u64)(next_columns >> 4) << 16 | (u64)(row_bytes * 8 >> 4) << 32 |
         swizzle << 62;
}
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {  // ends a group
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT> __device__ __forceinline__ void wgmma_wait() {  // LEFT groups stay in flight
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}

#if FP8
#define DENSE_TYPES "k32.f32.e4m3.e4m3 "
#define SPARSE_TYPES "k64.f32.e4m3.e4m3 "
#define TRANSPOSES(a, b)
#else
#define DENSE_TYPES "k16.f32." TYPE "." TYPE " "
#define SPARSE_TYPES "k32.f32." TYPE "." TYPE " "
#define TRANSPOSES(a, b) ", %" #a ", %" #b
#endif

// W64(F, I) is F(the numbers of four sums) for all sums but the first four, then I(the numbers of
// what follows the sums).
#define NONE(...)
#define W16(F, I) F(4, 5, 6, 7) I(8, 9, 10, 11, 12, 13, 14)
#define W24(F, I) W16(F, NONE) F(8, 9, 10, 11) I(12, 13, 14, 15, 16, 17, 18)
#define W32(F, I) W24(F, NONE) F(12, 13, 14, 15) I(16, 17, 18, 19, 20, 21, 22)
#define W40(F, I) W32(F, NONE) F(16, 17, 18, 19) I(20, 21, 22, 23, 24, 25, 26)
#define W48(F, I) W40(F, NONE) F(20, 21, 22, 23) I(24, 25, 26, 27, 28, 29, 30)
#define W56(F, I) W48(F, NONE) F(24, 25, 26, 27) I(28, 29, 30, 31, 32, 33, 34)
#define W64(F, I) W56(F, NONE) F(28, 29, 30, 31) I(32, 33, 34, 35, 36, 37, 38)
#define W72(F, I) W64(F, NONE) F(32, 33, 34, 35) I(36, 37, 38, 39, 40, 41, 42)
#define W80(F, I) W72(F, NONE) F(36, 37, 38, 39) I(40, 41, 42, 43, 44, 45, 46)
#define W88(F, I) W80(F, NONE) F(40, 41, 42, 43) I(44, 45, 46, 47, 48, 49, 50)
#define W96(F, I) W88(F, NONE) F(44, 45, 46, 47) I(48, 49, 50, 51, 52, 53, 54)
#define W104(F, I) W96(F, NONE) F(48, 49, 50, 51) I(52, 53, 54, 55, 56, 57, 58)
#define W112(F, I) W104(F, NONE) F(52, 53, 54, 55) I(56, 57, 58, 59, 60, 61, 62)
#define W120(F, I) W112(F, NONE) F(56, 57, 58, 59) I(60, 61, 62, 63, 64, 65, 66)
#define W128(F, I) W120(F, NONE) F(60, 61, 62, 63) I(64, 65, 66, 67, 68, 69, 70)
#define W136(F, I) W128(F, NONE) F(64, 65, 66, 67) I(68, 69, 70, 71, 72, 73, 74)
#define W144(F, I) W136(F, NONE) F(68, 69, 70, 71) I(72, 73, 74, 75, 76, 77, 78)
#define W152(F, I) W144(F, NONE) F(72, 73, 74, 75) I(76, 77, 78, 79, 80, 81, 82)
#define W160(F, I) W152(F, NONE) F(76, 77, 78, 79) I(80, 81, 82, 83, 84, 85, 86)
#define W168(F, I) W160(F, NONE) F(80, 81, 82, 83) I(84, 85, 86, 87, 88, 89, 90)
#define W176(F, I) W168(F, NONE) F(84, 85, 86, 87) I(88, 89, 90, 91, 92, 93, 94)
#define W184(F, I) W176(F, NONE) F(88, 89, 90, 91) I(92, 93, 94, 95, 96, 97, 98)
#define W192(F, I) W184(F, NONE) F(92, 93, 94, 95) I(96, 97, 98, 99, 100, 101, 102)
#define W200(F, I) W192(F, NONE) F(96, 97, 98, 99) I(100, 101, 102, 103, 104, 105, 106)
#define W208(F, I) W200(F, NONE) F(100, 101, 102, 103) I(104, 105, 106, 107, 108, 109, 110)
#define W216(F, I) W208(F, NONE) F(104, 105, 106, 107) I(108, 109, 110, 111, 112, 113, 114)
#define W224(F, I) W216(F, NONE) F(108, 109, 110, 111) I(112, 113, 114, 115, 116, 117, 118)
#define W232(F, I) W224(F, NONE) F(112, 113, 114, 115) I(116, 117, 118, 119, 120, 121, 122)
#define W240(F, I) W232(F, NONE) F(116, 117, 118, 119) I(120, 121, 122, 123, 124, 125, 126)
#define W248(F, I) W240(F, NONE) F(120, 121, 122, 123) I(124, 125, 126, 127, 128, 129, 130)
#define W256(F, I) W248(F, NONE) F(124, 125, 126, 127) I(128, 129, 130, 131, 132, 133, 134)
#define NAMES(i, j, k, l) ", %" #i ", %" #j ", %" #k ", %" #l
#define OPERANDS(i, j, k, l) , "+f"(d[i]), "+f"(d[j]), "+f"(d[k]), "+f"(d[l])
#define ADD(a, b, at, bt, ...) "}, %" #a ", %" #b ", 1, 1, 1" TRANSPOSES(at, bt)
#define KEEP(a, b, at, bt, ...) "}, %" #a ", %" #b ", keep, 1, 1" TRANSPOSES(at, bt)
#define KEEP_RS(a, b, c, d, tile, bt, ...) \
  "}, {%" #a ", %" #b ", %" #c ", %" #d "}, %" #tile ", keep, 1, 1, %" #bt
#define SPARSE(a, b, at, bt, words, ...) \
  "}, %" #a ", %" #b ", %" #words ", 0, 1, 1, 1" TRANSPOSES(at, bt)
#define TEST(a, b, at, bt, keep, ...) ".reg .pred keep;\nsetp.ne.b32 keep, %" #keep ", 0;\n"
#define TEST_RS(a, b, c, d, tile, bt, keep) TEST(a, b, c, d, keep)

template <int N, int A_TRANS = 0, int B_TRANS = 0> struct Wgmma;
#define WGMMA(N, WHICH, TYPES, INPUTS) \
  "wgmma.mma_async" WHICH ".sync.aligned.m64n" #N TYPES "{%0, %1, %2, %3" W##N(NAMES, INPUTS) ";"
#define SUMS_OF(N) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) W##N(OPERANDS, NONE)
#define DEFINE(N)                                                                               \
  template <int A_TRANS, int B_TRANS> struct Wgmma<N, A_TRANS, B_TRANS> {                       \
    static __device__ __forceinline__ void multiply(float* d, u64 a, u64 b) {                   \
      asm volatile(WGMMA(N, "", DENSE_TYPES, ADD)                                               \
                   : SUMS_OF(N) : "l"(a), "l"(b), "n"(A_TRANS), "n"(B_TRANS));                  \
    }                                                                                           \
    static __device__ __forceinline__ void multiply(float* d, u64 a, u64 b, int keep) {         \
      asm volatile("{\n" W##N(NONE, TEST) WGMMA(N, "", DENSE_TYPES, KEEP) "\n}"                 \
                   : SUMS_OF(N) : "l"(a), "l"(b), "n"(A_TRANS), "n"(B_TRANS), "r"(keep));       \
    }                                                                                           \
    static __device__ __forceinline__ void multiply(float* d, const u32* a, u64 b, int keep) {  \
      asm volatile("{\n" W##N(NONE, TEST_RS) WGMMA(N, "", DENSE_TYPES, KEEP_RS) "\n}"           \
                   : SUMS_OF(N) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),           \
                                  "n"(B_TRANS), "r"(keep));                                     \
    }                                                                                           \
    static __device__ __forceinline__ void multiply_sparse(float* d, u64 a, u64 b, u32 words) { \
      asm volatile(WGMMA(N, ".sp", SPARSE_TYPES, SPARSE)                                        \
                   : SUMS_OF(N) : "l"(a), "l"(b), "n"(A_TRANS), "n"(B_TRANS), "r"(words));      \
    }                                                                                           \
  };
DEFINE(16) DEFINE(24) DEFINE(32) DEFINE(40) DEFINE(48) DEFINE(56) DEFINE(64) DEFINE(72)
DEFINE(80) DEFINE(88) DEFINE(96) DEFINE(104) DEFINE(112) DEFINE(120) DEFINE(128) DEFINE(136)
DEFINE(144) DEFINE(152) DEFINE(160) DEFINE(168) DEFINE(176) DEFINE(184) DEFINE(192) DEFINE(200)
DEFINE(208) DEFINE(216) DEFINE(224) DEFINE(232) DEFINE(240) DEFINE(248) DEFINE(256)
