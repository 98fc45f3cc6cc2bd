// A probe, never run: the main loop of a 2:4 product for compute capability 10.0, as
// kernels/spense/NOTES.md plans it. test_blackwell.py compiles it and reads its machine code.
//
//   A work item is 128 features x 224 tokens of Y.T = W X.T, a step 256 bytes of each row of X.
//
//     warp 0   | W: 2 tiles, 16 KB | X: 224 tokens, 2 boxes of 128 bytes | metadata | scales |
//                  bulk copies         TMA, or gather4: four tokens each      bulk copies
//                        |                        |                              |
//     warp 1   tcgen05.mma.sp: A and B from shared memory,  metadata and scales by tcgen05.cp
//                        |
//           tensor memory | 0: D, 224 columns | 224: the next item's D | 448: metadata | scales |
//                        |
//     warps 4 to 7  tcgen05.ld: lane = feature, column = token
//
// Macros: MX=0 (bf16) | 1 (e4m3 with a scale for every 32 columns of k); GATHER=0|1; STAGES.
// Source: PTX ISA 9.0, tcgen05.mma.sp, tcgen05.cp, tcgen05.ld, cp.async.bulk.tensor (gather4).

#define FP16 0
#include "hopper.cuh"

constexpr int TOKENS = 224, FEATURES = 128, TILE = 8192, BOX = TOKENS * 128;
constexpr int META_BYTES = MX ? 4096 : 2048, SCALE_A = MX ? 1024 : 0, SCALE_B = MX ? 2048 : 0;
constexpr int SCALE_BYTES = SCALE_A + SCALE_B;
constexpr int X_AT = 2 * TILE, META_AT = X_AT + 2 * BOX, SCALES_AT = META_AT + META_BYTES;
constexpr int STAGE = (SCALES_AT + SCALE_BYTES + 1023) / 1024 * 1024;
constexpr int COLUMNS = 512, META_COLUMN = 2 * TOKENS, META_COLUMNS = META_BYTES / 512;
constexpr int SCALE_COLUMN = META_COLUMN + META_COLUMNS;  // four columns for 512 bytes of scales
static_assert(SCALE_COLUMN + SCALE_BYTES / 128 <= COLUMNS && STAGES * STAGE <= 227 * 1024);
constexpr int PRODUCTS = 4;  // of a step: 32 columns of k in 16 bits, 64 in 8

// Bits of the instruction descriptor: sparse; D in fp32; types of A and B; N / 8; M / 16 or 128.
constexpr u32 INSTRUCTION = MX ? 1 << 2 | (TOKENS / 8) << 17 | 1 << 23 | (FEATURES / 128) << 27
                               : 1 << 2 | 1 << 4 | 1 << 7 | 1 << 10 | (TOKENS / 8) << 17 |
                                     (FEATURES / 16) << 24;

// Rows of 128 bytes, in the 128-byte swizzle, eight of them 1024 bytes.
__device__ __forceinline__ u64 swizzled_matrix(u32 at) {
  return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 46 | 2ull << 61;
}
__device__ __forceinline__ u64 plain_matrix(u32 at) {  // 8 x 16 bytes next to each other
  return (u64)(at >> 4 & 0x3fff) | 8ull << 16 | 8ull << 32 | 1ull << 46;
}
__device__ __forceinline__ void gather4(u32 to, const TensorMap* map, int column, int4 rows,
                                        u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx"
               "::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
               :: "r"(to), "l"(map), "r"(column), "r"(rows.x), "r"(rows.y), "r"(rows.z),
                  "r"(rows.w), "r"(barrier) : "memory");
}
__device__ __forceinline__ void mma_sp(u32 d, u64 a, u64 b, u32 metadata, u32 scales, bool add) {
#if MX
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %7, 0;\n"
               "tcgen05.mma.sp.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X "
               "[%0], %1, %2, [%3], %4, [%5], [%6], p;\n}"
               :: "r"(d), "l"(a), "l"(b), "r"(metadata), "r"(INSTRUCTION), "r"(scales),
                  "r"(scales + SCALE_A / 128), "r"((int)add) : "memory");
#else
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
               "tcgen05.mma.sp.cta_group::1.kind::f16 [%0], %1, %2, [%3], %4, p;\n}"
               :: "r"(d), "l"(a), "l"(b), "r"(metadata), "r"(INSTRUCTION), "r"((int)add)
               : "memory");
#endif
}
__device__ __forceinline__ void commit(u32 barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
               :: "r"(barrier) : "memory");
}

extern "C" __global__ void __launch_bounds__(256, 1)
main_loop(const __grid_constant__ TensorMap x, const char* w, const char* metadata,
          const char* scales, const int4* rows, float* y, int steps) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES + 1];
  __shared__ u32 tensor_memory;
  const u32 stages = smem_address(shared), full = smem_address(barriers), empty = full + 8 * STAGES;
  const u32 done = empty + 8 * STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 1)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
                 :: "r"(smem_address(&tensor_memory)), "n"(COLUMNS) : "memory");
  if (threadIdx.x < 2 * STAGES + 1) mbarrier_init(full + 8 * threadIdx.x, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  const u32 d = tensor_memory;

  if (warp == 0) {
    for (int i = 0; i < steps; i++) {
      const u32 stage = stages + i % STAGES * STAGE, barrier = full + 8 * (i % STAGES);
      if (i >= STAGES) mbarrier_wait(empty + 8 * (i % STAGES), (i / STAGES - 1) & 1, "empty");
      if (lane == 0) {
        mbarrier_arrive_expect_tx(barrier, SCALES_AT + SCALE_BYTES);
        bulk_load(stage, w + (u64)i * X_AT, X_AT, barrier);
        bulk_load(stage + META_AT, metadata + (u64)i * META_BYTES, META_BYTES, barrier);
        if (MX)
          bulk_load(stage + SCALES_AT, scales + (u64)i * SCALE_BYTES, SCALE_BYTES, barrier);
      }
      __syncwarp();
      for (int box = 0; box < 2; box++) {
        const int column = (2 * i + box) * (MX ? 128 : 64);
        const u32 to = stage + X_AT + box * BOX;
        if (GATHER)
          for (int four = lane; four < TOKENS / 4; four += 32)
            gather4(to + 512 * four, &x, column, rows[four], barrier);
        else if (lane == 0) tma_load(to, &x, column, 0, barrier);
      }
    }
  } else if (warp == 1 && lane == 0) {
    for (int i = 0; i < steps; i++) {
      const u32 stage = stages + i % STAGES * STAGE;
      mbarrier_wait(full + 8 * (i % STAGES), i / STAGES & 1, "full");
      asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
      for (int c = 0; c < META_COLUMNS; c += 4)
        asm volatile("tcgen05.cp.cta_group::1.128x128b [%0], %1;"
                     :: "r"(d + META_COLUMN + c), "l"(plain_matrix(stage + META_AT + 512 * c))
                     : "memory");
      for (int c = 0; c < SCALE_BYTES / 512; c++)
        asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;"
                     :: "r"(d + SCALE_COLUMN + 4 * c),
                        "l"(plain_matrix(stage + SCALES_AT + 512 * c)) : "memory");
      #pragma unroll
      for (int p = 0; p < PRODUCTS; p++) {
        const u64 a = swizzled_matrix(stage + 32 * p);
        const u64 b = swizzled_matrix(stage + X_AT + p / 2 * BOX + p % 2 * 64);
        mma_sp(d, a, b, d + META_COLUMN + p * META_COLUMNS / PRODUCTS, d + SCALE_COLUMN, i + p > 0);
      }
      commit(empty + 8 * (i % STAGES));
    }
    commit(done);
  } else if (warp >= 4) {
    mbarrier_wait(done, 0, "done");
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    for (int token = 0; token < TOKENS; token += 8) {
      u32 v[8];
      asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                   : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]),
                     "=r"(v[6]), "=r"(v[7]) : "r"(d + ((warp % 4 * 32) << 16) + token));
      asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
      #pragma unroll
      for (int t = 0; t < 8; t++)
        y[(u64)(token + t) * FEATURES + threadIdx.x % 128] = __uint_as_float(v[t]);
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  }
  __syncthreads();
  if (warp == 1)
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" :: "r"(d), "n"(COLUMNS));
}
