// Y[m, n] = X[m, k] @ W[n, k].T for W in blocks of 64 and more, by wgmma and TMA (Hopper). With
// TRANSPOSED: dX[m, k] = dY[m, n] @ W[n, k] over the same blocks.
//
//   work item: 128 features x TOKENS tokens of Y      step: ROW_BYTES of k
//
//      W, two slices of 64 rows          X.T                        Y.T
//        k0   k1   k2                  +---------+                +---------+
//      +----+----+                     | k0      |      half 0 -> | 64      |
//      | w0 | w0 |                     | TOKENS  |                | TOKENS  |
//      +----+----+----+           x    +---------+       =        +---------+
//           | w1 | w1 |                | k1      |      half 1 -> | 64      |
//           +----+----+                +---------+                | TOKENS  |
//                                      | k2      |                +---------+
//      steps: k0 (half 0 alone),       +---------+
//      k1 (both), k2 (half 1)
//
// The two slices are the halves of a block 128 high, or two block rows 64 high. They share the X
// tile of each step. A half without a block there skips the step, so a NaN in a column that a row
// does not touch does not reach that row. W is the left operand A because wgmma's M is 64.
// Therefore the sums are features x tokens, and the epilogue transposes them.
//
// The pipeline: 12 warps, and one CTA per SM for the whole launch.
//
//    warp 8    X tile, note ---+     +---------+---------+-- --+     +--> warpgroup 0, warps 0 to 3
//                              +---> | stage 0 | stage 1 | ... | ----+    rows of half 0
//    warp 9    W tiles --------+     +---------+---------+-- --+     +--> warpgroup 1, warps 4 to 7
//                 ^                                                  |    rows of half 1
//                 |               full: the bytes have landed -------+         |
//                 +-------------- empty: both warpgroups have released it <----+
//
//   A stage holds an X tile, two W tiles, and a note that says which halves multiply, whether this
//   is the item's last step, and where its sums go. A warpgroup keeps the products of one step in
//   flight. It releases a stage when the products of the next step are issued. After the last step
//   it stores its half, 64 tokens at a time: stmatrix.trans writes the sums to shared memory as
//   rows of tokens, and TMA copies them to Y. Two buffers alternate, and the producers run ahead
//   meanwhile.
//
// Tiles of W and X have rows of ROW_BYTES and the swizzle of that width (hopper.cuh), so there are no
// bank conflicts. TMA reads zeros outside a matrix and does not write there. In 16 bits ROW_BYTES is
// 128, or 64 of k. The next 16 of k are 32 bytes further in a row (K-major). With TRANSPOSED, the
// tile [64 of n x 64 of k] is MN-major (imm-trans-a), and the next 16 of n are 16 rows, or 2048
// bytes, further. SBO is 1024 bytes in both cases.
//
// With FP8, operands are e4m3, which wgmma reads K-major only, and Y is bf16. An instruction still
// takes 32 bytes of k. ROW_BYTES is 128 if blocks are a multiple of 128 columns wide, else 64: a row
// of TMA then takes half as long. Tensor cores sum e4m3 in fewer bits than fp32, like cuBLAS with
// use_fast_accum. The epilogue multiplies by a scale for each feature and each token, if there are
// any.
//
// Cost of a step, TOKENS = 256:
//    products  2 x 64 x 256 x 64 multiply-adds, 4.2 MFLOP: 700 ns of an SM at the 790 TFLOP/s that
//              cuBLAS reaches on an H200
//    loads     48 KB (X 32, W 16): 740 ns of an SM at 8.8 TB/s, the rate of TMA from L2 to the
//              shared memory of all SMs, by boxes or bulk copies
// So loads are the bottleneck. Half the tokens would need 32 KB for half the products. With CLUSTER
// = 2 each CTA loads half of each W tile and multicasts it to both: 40 KB. Measured at n = k = m =
// 4096, bf16, 50 % of blocks of 128: 102 us (dense, cuBLAS: 168). Without the loads it takes 84.7
// us, without the products 93.8, without both 39.
//
// The decisions with the largest effect:
//  - The branch around the products depends on a value from memory. The value goes through
//    __shfl_sync, so that ptxas knows that it is the same in the whole warp. Otherwise ptxas
//    serialises wgmma (warning C7518): it waits for each product.
//  - In each of two producer warps, every lane loads the steps that it read. One warp that passed
//    steps on by shuffles took 380 clocks per step, twice as long; a TMA alone takes 170.
//  - The arrival on another CTA's barrier has no .release.cluster, which cost 45 %.
//  - The kernel starts before the previous one has ended, and waits before its first copy: W is the
//    caller's memory, which any kernel may have written. Saves 1.2 us in a chain of layers.
//  - Items are assigned by length (_wgmma_lists.py). A fixed order, in which CTA 0 always got
//    the longest, cost 12 %.
//
// Macros: TOKENS=256|128|64 CLUSTER=1|2 TRANSPOSED=0|1 FP8=0|1 ROW_BYTES=128|64, the other constants
// of bsr_wgmma.constants_of, and hopper.cuh's. Source: PTX ISA 9.0, wgmma, mbarrier,
// cp.async.bulk.tensor.

#include "ring.cuh"
#include "scales.cuh"
#include "wgmma.cuh"

constexpr int X_BYTES = TOKENS * ROW_BYTES, W_BYTES = SIDE * ROW_BYTES;
constexpr int STAGE_BYTES = X_BYTES + 2 * W_BYTES;
constexpr int Y_ROW_BYTES = 128;  // of a chunk: 64 features in 16 bits
constexpr int CHUNKS = TOKENS / SIDE, CHUNK_BYTES = SIDE * Y_ROW_BYTES, BUFFERS = CHUNKS > 1 ? 2 : 1;
constexpr unsigned short ALL = (1 << CLUSTER) - 1;  // mask of CTAs
enum { HALF_0 = 1, HALF_1 = 2, LAST = 4, END = 8 };  // flags of a note

// TMA takes longer for a row beyond X than for one that it reads. So the last tile of tokens has
// boxes of its own, `tail`, as high as it has tokens.
struct Maps { TensorMap x, w, y, tail; };

// The host writes these: Groups.steps and WgmmaSchedule.items (_wgmma_lists.py). An int holds
// 16 bits for each half in `columns` (of the W tiles) and in `slices` (of Y).
struct alignas(16) Step { int x, w0, w1, columns; };
struct alignas(16) Item { int first, count, token, slices; };
// A kernel argument: read from global memory, it delayed the first TMA by 1.3 us.
struct First { Item items[WORKERS]; int starts[WORKERS]; };
struct alignas(16) Note { int flags, token, slices, unused; };
__device__ __forceinline__ int of_half(int pair, int half) { return pair >> 16 * half & 0xffff; }

__device__ __forceinline__ void st_shared(u32 to, Note note) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "r"(note.flags), "r"(note.token), "r"(note.slices), "r"(note.unused)
               : "memory");
}
__device__ __forceinline__ Note ld_shared(u32 from) {
  Note note;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(note.flags), "=r"(note.token), "=r"(note.slices), "=r"(note.unused)
               : "r"(from) : "memory");
  return note;
}

__device__ __forceinline__ void wgmma_tile(float (&d)[TOKENS / 2], u32 w, u32 x) {
  constexpr int A_STEP = (TRANSPOSED ? 16 * ROW_BYTES : 32) >> 4, B_STEP = 32 >> 4;
  const u64 a = smem_descriptor(w, ROW_BYTES), b = smem_descriptor(x, ROW_BYTES);
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < ROW_BYTES / 32; i++)
    Wgmma<TOKENS, TRANSPOSED>::multiply(d, a + i * A_STEP, b + i * B_STEP);
  wgmma_commit();
}

// ---- the ring of stages ----

struct Buffers { u32 tiles, notes; };  // in shared memory
struct Pipeline : Buffers, Ring<RING_BYTES / STAGE_BYTES> {  // 4 to 16 stages
  __device__ __forceinline__ u32 x() const { return tiles + stage * STAGE_BYTES; }
  __device__ __forceinline__ u32 w(int half) const { return x() + X_BYTES + half * W_BYTES; }
  __device__ __forceinline__ u32 note() const { return notes + 16 * stage; }
};

// ---- producers ----

__device__ __forceinline__ void load_x(const Maps& maps, const Pipeline& pipe, Step step,
                                       int token, int slices, bool last, int m) {
  const int flags = (step.w0 >= 0 ? HALF_0 : 0) | (step.w1 >= 0 ? HALF_1 : 0) | (last ? LAST : 0);
  st_shared(pipe.note(), Note{flags, token, slices, 0});
  // The step of an empty block row has no tiles.
  const int rows = step.x >= 0 ? min(max(m - token, 0), TOKENS) : 0;
  mbarrier_arrive_expect_tx(pipe.full_barrier(), rows * ROW_BYTES);
  const TensorMap* x = rows == TOKENS ? &maps.x : &maps.tail;
  if (rows) tma_load(pipe.x(), x, step.x, token, pipe.full_barrier());
}

__device__ __forceinline__ void load_w(const Maps& maps, const Pipeline& pipe, Step step,
                                       int rank) {
  const int first = rank * (SIDE / CLUSTER);  // of the rows that this CTA loads
  mbarrier_arrive_expect_tx(pipe.full_barrier(),
                            (step.w0 >= 0 ? W_BYTES : 0) + (step.w1 >= 0 ? W_BYTES : 0));
  #pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = half ? step.w1 : step.w0, column = of_half(step.columns, half);
    const u32 to = pipe.w(half) + first * ROW_BYTES;
    if (row < 0) continue;
    if (CLUSTER == 1) tma_load(to, &maps.w, column, row, pipe.full_barrier());
    else tma_load_multicast(ALL, to, &maps.w, column, row + first, pipe.full_barrier());
  }
}

// Lane j of either warp loads steps j, j + 32, ... of an item. It reads the next steps and items
// meanwhile.
__device__ __forceinline__ void producer(const Maps& maps, const First& first, const Step* steps,
                                         const Item* items, Pipeline pipe, bool loads_x, int m) {
  const int lane = threadIdx.x % 32, worker = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  int at = first.starts[worker];
  const int end = first.starts[worker + 1];
  Item item = first.items[worker], next = items[at + 1];
  Step mine = steps[item.first + lane];
  wait_on_dependent_grids();
  for (; at < end; at++) {
    const Item after = items[at + 2];
    const int token = item.token + rank * TOKENS;
    for (int base = 0; base < item.count; base += 32) {
      const int later = base + 32 < item.count ? item.first + base + 32 : next.first;
      const int count = min(32, item.count - base);
      const Step ahead = steps[later + lane];
      for (int i = 0; i < count; i++) {
        if (lane == i) {
          pipe.producer_acquire();
          if (loads_x)
            load_x(maps, pipe, mine, token, item.slices, base + i + 1 == item.count, m);
          else load_w(maps, pipe, mine, rank);
        }
        __syncwarp();
        pipe.advance();
      }
      mine = ahead;
    }
    item = next;
    next = after;
  }
  if (lane == 0) {
    pipe.producer_acquire();
    if (loads_x) st_shared(pipe.note(), Note{LAST | END, 0, 0, 0});
    mbarrier_arrive_expect_tx(pipe.full_barrier(), 0);
  }
  __syncwarp();
}

// ---- consumers ----

// Add up the products of one half of an item; return the note of its last step.
__device__ __forceinline__ Note mainloop(float (&d)[TOKENS / 2], Pipeline& pipe, int half) {
  #pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) d[i] = 0.f;
  int in_use = -1;  // the stage that products in flight read
  for (;;) {
    pipe.consumer_wait();
    const Note note = ld_shared(pipe.note());
    const int flags = __shfl_sync(~0u, note.flags, 0);
    if (flags >> half & 1) {
      wgmma_tile(d, pipe.w(half), pipe.x());
      wgmma_wait<1>();
      if (in_use >= 0) pipe.warpgroup_release<CLUSTER>(in_use);
      in_use = pipe.stage;
    } else {
      wgmma_wait<0>();
      if (in_use >= 0) pipe.warpgroup_release<CLUSTER>(in_use);
      in_use = -1;
      // wgmma synchronises the four warps; without it, a warp may not have read the note yet.
      warpgroup_sync(half + 1);
      pipe.warpgroup_release<CLUSTER>(pipe.stage);
    }
    pipe.advance();
    if (flags & LAST) {
      wgmma_wait<0>();
      if (in_use >= 0) pipe.warpgroup_release<CLUSTER>(in_use);
      return Note{flags, note.token, note.slices, 0};
    }
  }
}

// Store one half of an item to Y.
__device__ __forceinline__ void epilogue(const float (&d)[TOKENS / 2], const TensorMap* y, u32 out,
                                         Note note, int half) {
  const bool leader = threadIdx.x % 128 == 0;
  const int slice = of_half(note.slices, half);
  const u32 at = stmatrix_address(out);
  #pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int buffer = c % BUFFERS * CHUNK_BYTES;
    if (leader) tma_store_wait_read<BUFFERS - 1>();
    warpgroup_sync(half + 1);
    #pragma unroll
    for (int i = 0; i < SIDE / 16; i++)
      stmatrix_x4_trans(at + buffer + i * 16 * Y_ROW_BYTES, d + 8 * (c * (SIDE / 16) + i));
    fence_proxy_async();
    warpgroup_sync(half + 1);
    if (leader) {
      if (slice != NO_SLICE) tma_store(y, out + buffer, slice * SIDE, note.token + c * SIDE);
      tma_store_commit();
    }
  }
}

// ---- the kernel: 132 / CLUSTER workers, each with a list of items ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
multiply_blocks(const __grid_constant__ Maps maps, const __grid_constant__ First first,
                const Step* steps, const Item* items, int m
#if FP8
                , const __grid_constant__ Scales scales
#endif
) {
  launch_dependent_grids();
  extern __shared__ char shared[];
  __shared__ Note notes[Pipeline::STAGES];
  __shared__ u64 full[Pipeline::STAGES], empty[Pipeline::STAGES];
  const u32 tiles = (smem_address(shared) + 1023) & ~1023u;  // alignment for the swizzle
  Pipeline pipe{{tiles, smem_address(notes)}, {smem_address(full), smem_address(empty)}};
  if (threadIdx.x == 0) {
    pipe.init_barriers(2, 2 * CLUSTER);  // producer warps; consumer warpgroups of all CTAs
    fence_mbarrier_init();
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
  if (group == 2) {
    setmaxnreg_dec<56>();
    pipe.phase = 1;  // at first, all stages are free
    if (warp < 2) producer(maps, first, steps, items, pipe, warp == 0, m);
  } else {
    setmaxnreg_inc<224>();
    const u32 out = tiles + Pipeline::STAGES * STAGE_BYTES + group * BUFFERS * CHUNK_BYTES;
    float d[TOKENS / 2];
    for (;;) {
      const Note note = mainloop(d, pipe, group);
      if (note.flags & END) break;
#if FP8
      apply_scales<TOKENS / 8>(d, scales, of_half(note.slices, group) * SIDE, note.token);
#endif
      epilogue(d, &maps.y, out, note, group);
    }
    if (threadIdx.x % 128 == 0) tma_store_wait();
  }
  if (CLUSTER > 1) cluster_sync();  // the other CTA may still arrive on this CTA's barriers
}
