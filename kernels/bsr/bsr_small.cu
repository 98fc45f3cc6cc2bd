// Y[m, n] = X[m, k] @ W[n, k].T for W in blocks of 16 or 32, by wgmma and TMA (Hopper). With
// TRANSPOSED: dX[m, k] = dY[m, n] @ W[n, k] over the same blocks.
//
//   work item: TOKENS tokens x FEATURES of Y      step: up to four strips, 32 of k each
//
//        X, strips                 W, the blocks of these rows           sums, in registers
//      +--------+--------+ ..    row 0      [ ]                          row 0  row 1  ...
//      | 64     |        |       row 1    [ ]  [ ]                      +------+------+ ..
//      | tokens |        |   x     ...                        +=        | 64 x |      |
//      +--------+--------+ ..    last row      [ ]                      | BLOCK|      |
//      | 64     |        |       place    0  1  2  3 ..                 +------+------+ ..
//      +--------+--------+ ..                                           | 64 x |      |
//                                                                       +------+------+ ..
//
// Blocks are not padded: for every 64 tokens, a block of 16 is one wgmma and a block of 32 is two.
// Tokens are wgmma's M, which is always 64; features are its N, any multiple of 8. Loads of X are
// the bottleneck: with blocks this small, some row touches nearly every strip. So as many rows as
// the registers hold (256 features) share the strips. Each warpgroup multiplies some of the rows
// with all tokens, so it reads the list of a step once for several products.
//
// The pipeline: one producer warpgroup, WARPGROUPS consumer warpgroups, and one CTA per SM.
//
//    warp 0    strips 0, 1 --+
//    warp 1    strips 2, 3 --+     +---------+---------+-- --+     +--> warpgroup 0: rows 0, 1, ...
//    warp 2    W chunk ------+---> | stage 0 | stage 1 | ... | ----+
//    warp 3    note ---------+     +---------+---------+-- --+     +--> warpgroup 1: the next rows
//
//   A stage holds the strips, the chunk and a note. The note has the number of blocks of each row
//   (4 bits) and the place of each block (3 bits), in the order of the chunk. The host packs W so
//   that a chunk is contiguous: blocks in this order, swizzled as TMA would (hopper.cuh). A
//   warpgroup keeps the products of one step in flight. Its warps release a stage when the products
//   of the next step are issued. After an item's last step they store the sums from registers: four
//   lanes transpose their sums and write 64 bytes of a token together (a unit of 32 features).
//
// The kernel is launched before the previous one in the stream has ended, and lets the next one
// start as early (griddepcontrol). A CTA whose SM is free initialises the barriers, reads its list
// and requests blocks of W. The warps that load X first wait until the previous kernel has ended
// and its writes are visible. Therefore
//    X          may be the output of that kernel
//    Y          may be its input: no CTA stores before a stage is full, which needs X
//    W, lists   belong to this launch; kernels and copies of torch write them (plan and bind).
//               Those do not call launch_dependents, so no kernel starts before they have ended and
//               their writes are visible, and no wait is needed. Our kernels that do call it do not
//               write another kernel's W
//    freed      memory may be written by the next kernel: an ordinary one starts when this one has
//               ended, and one like this writes after its wait
// Every CTA waits. So when a kernel has ended, all kernels before it have ended too.
//
// With one tile of tokens (ONCE), every CTA reads X, and only one reads a block of W: the L2 cache
// evicts W first and X last. A box of X then has as many rows as there are tokens. The rows below
// it are multiplied too, but their results are not stored.
//
// A strip is 32 wide, so a row has 64 bytes. TMA takes 0.95 ns per row on one SM, for 32 bytes as
// for 64; 64 bytes per row are 8.8 TB/s over all SMs, which is the rate of L2. Loads and stores
// take at least 90 % of the time from 80 % sparsity in blocks of 32, and from 90 % in blocks of 16
// (NOTES.md).
//
// Source: PTX ISA 9.0, griddepcontrol, createpolicy.
// Macros: BLOCK=16|32 TOKENS=64|128 FEATURES=256|128|64|32 WARPGROUPS=1|2|4 ROOM=24|12|5 (KB of
// blocks in a step) TRANSPOSED=0|1 ONCE=0|1, the rest of bsr_small.constants_of, and hopper.cuh's.

#include "strips.cuh"

constexpr int ROWS = FEATURES / BLOCK / WARPGROUPS;  // of a warpgroup
constexpr int UNITS = FEATURES / 32 / WARPGROUPS, TILES = TOKENS / 64;
constexpr int STRIP_BYTES = TOKENS * 64, BLOCK_BYTES = BLOCK * BLOCK * 2;
constexpr int MOST_BYTES = STRIPS * 32 * FEATURES * 2;
constexpr int W_BYTES = MOST_BYTES < ROOM * 1024 ? MOST_BYTES : ROOM * 1024;
using Pipeline = Strips<STRIP_BYTES, W_BYTES>;

// The first copies, as an argument: read from memory, they would start 0.6 to 1 us later.
struct First { u64 strips; u32 tile_and_blocks; int first; };  // tile of tokens: upper 24 bits
struct Firsts { First of[WORKERS]; };
// TMA takes longer for a row beyond X than for one that it reads. So the last tile of tokens has
// boxes of its own, `tail`, as high as it has tokens. With ONCE all boxes are.
struct Maps { TensorMap x, tail; };

// ---- producers ----

__device__ __forceinline__ void load_w(const char* w, const Pipeline& pipe, const Step& step) {
  const int bytes = step.blocks * BLOCK_BYTES;
  mbarrier_arrive_expect_tx(pipe.full_barrier(), bytes);
  const char* from = w + (u64)step.first * BLOCK_BYTES;
  if (!bytes) return;
  if constexpr (ONCE) bulk_load(pipe.w(), from, bytes, pipe.full_barrier(), evict_first());
  else bulk_load(pipe.w(), from, bytes, pipe.full_barrier());
}

__device__ __forceinline__ void load_x(const Maps& maps, const Pipeline& pipe, const Step& step,
                                       int first, int m) {
  const int rows = ONCE ? m : min(max(m - step.token, 0), TOKENS);
  const TensorMap& x = ONCE || rows == TOKENS ? maps.x : maps.tail;
  const u32 both = step.strips >> 16 * first;
  const int one = rows ? both & 0xffff : NO_STRIP, other = rows ? both >> 16 : NO_STRIP;
  const u32 to = pipe.x() + first * STRIP_BYTES, bar = pipe.full_barrier();
  mbarrier_arrive_expect_tx(bar, rows * 64 * ((one != NO_STRIP) + (other != NO_STRIP)));
  if constexpr (ONCE) {
    if (one != NO_STRIP) tma_load(to, &x, one * 32, step.token, bar, evict_last());
    if (other != NO_STRIP)
      tma_load(to + STRIP_BYTES, &x, other * 32, step.token, bar, evict_last());
  } else {
    if (one != NO_STRIP) tma_load(to, &x, one * 32, step.token, bar);
    if (other != NO_STRIP) tma_load(to + STRIP_BYTES, &x, other * 32, step.token, bar);
  }
}

// Lane j of each warp loads steps j, j + 32, ... It reads step j + 32 of the list meanwhile.
__device__ __forceinline__ void producer(const Maps& x, const char* w, const Step* steps,
                                         const First& first, Step mine, int at, int end,
                                         Pipeline pipe, int warp, int m) {
  const int lane = threadIdx.x % 32;
  if (warp < 2) wait_on_dependent_grids();
  if (lane == 0) {  // the first step: these copies do not wait for `mine`
    Step step;
    step.blocks = first.tile_and_blocks & 0xff;
    step.token = (first.tile_and_blocks >> 8) * TOKENS;
    step.first = first.first;
    step.strips = first.strips;
    if (warp < 2) load_x(x, pipe, step, 2 * warp, m);
    else if (warp == 2) load_w(w, pipe, step);
    else write_note(pipe, mine);
  }
  __syncwarp();
  pipe.advance();
  for (int i = 1; at < end; at += 32, i = 0) {
    const Step ahead = steps[at + 32 + lane];
    const int count = min(32, end - at);
    for (; i < count; i++) {
      if (lane == i) {
        pipe.producer_acquire();
        if (warp < 2) load_x(x, pipe, mine, 2 * warp, m);
        else if (warp == 2) load_w(w, pipe, mine);
        else write_note(pipe, mine);
      }
      __syncwarp();
      pipe.advance();
    }
    mine = ahead;
  }
}

// ---- consumers ----

using Sums = float[ROWS][TILES][BLOCK / 2];

__device__ __forceinline__ void wgmma_tile(float (&sums)[TILES][BLOCK / 2], u64 x, u64 w) {
  constexpr int W_STEP = (TRANSPOSED ? 16 * BLOCK * 2 : 32) >> 4;
  #pragma unroll
  for (int i = 0; i < BLOCK / 16; i++)
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      Wgmma<BLOCK, 0, TRANSPOSED>::multiply(sums[t], x + t * (64 * 64 >> 4) + i * (32 >> 4),
                                            w + i * W_STEP);
}

// Return the offset of a place in the strips, in units of 16 bytes. 16 of k are 32 bytes of a row.
__device__ __forceinline__ u32 strip_offset(u32 place) {
  constexpr int STRIP = STRIP_BYTES >> 4;
  return BLOCK == 32 ? place * STRIP : (place >> 1) * STRIP + (place & 1) * (32 >> 4);
}

__device__ __forceinline__ void wgmma_step(Sums& sums, u32 x_tile, u32 w_tile, uint4 share) {
  const u64 x = smem_descriptor(x_tile, 64);
  u64 w = smem_descriptor(w_tile + (share.y & 0xff) * BLOCK_BYTES, BLOCK * 2);
  u64 places = share.z | (u64)share.w << 32;
  wgmma_fence();
  #pragma unroll
  for (int j = 0; j < ROWS; j++) {
    #pragma unroll 1
    for (u32 count = share.x >> 4 * j & 15; count; count--) {
      wgmma_tile(sums[j], x + strip_offset(places & 7), w);
      places >>= 3;
      w += BLOCK_BYTES >> 4;
    }
  }
  wgmma_commit();
}

// Store the sums. A warp has 16 of each 64 tokens. A lane holds two neighbouring features of a
// token, and eight after the transpose.
__device__ __forceinline__ void epilogue(const Sums& sums, char* y, int m, int width,
                                         const Item& item) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  #pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int unit = __shfl_sync(~0u, item.seat_of_lane, u), feature = unit * 32 + lane % 4 * 8;
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      #pragma unroll
      for (int below = 0; below < 2; below++) {  // eight tokens below
        u32 words[4];
        #pragma unroll
        for (int p = 0; p < 4; p++) {  // eight features each
          const float* s = BLOCK == 32 ? sums[u][t] + 4 * p : sums[2 * u + p / 2][t] + 4 * (p % 2);
          words[p] = pack_pair(s[2 * below], s[2 * below + 1]);
        }
        quad_transpose(words);
        const int token = item.token + 64 * t + 16 * warp + 8 * below + lane / 4;
        if (unit >= 0 && feature < width && token < m)
          *(uint4*)(y + 2 * ((u64)token * width + feature)) =
              uint4{words[0], words[1], words[2], words[3]};
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
multiply_blocks(const __grid_constant__ Maps x, const __grid_constant__ Starts starts,
                const __grid_constant__ Firsts firsts, const char* w, const Step* steps,
                const int* units, char* y, int m, int width) {
  extern __shared__ char shared[];
  __shared__ uint4 notes[Pipeline::STAGES * (1 + WARPGROUPS)];
  __shared__ u64 full[Pipeline::STAGES], empty[Pipeline::STAGES];
  launch_dependent_grids();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
  const int at = starts.at[blockIdx.x], end = starts.at[blockIdx.x + 1];
  Step mine;  // requested while the barriers are initialised
  if (warpgroup == WARPGROUPS) {
    mine = steps[at + threadIdx.x % 32];
    if (warp < 2) prefetch_map(&x.x);
  }
  const u32 tiles = (smem_address(shared) + 1023) & ~1023u;  // alignment for the swizzle
  Pipeline pipe{{opaque(tiles), opaque(smem_address(notes))},
                {opaque(smem_address(full)), opaque(smem_address(empty))}};
  if (threadIdx.x == 0) {
    pipe.init_barriers(4, 4 * WARPGROUPS);  // producer warps; consumer warps
    fence_mbarrier_init();
  }
  __syncthreads();
  if (warpgroup == WARPGROUPS) {
    pipe.phase = 1;  // at first, all stages are free
    producer(x, w, steps, firsts.of[blockIdx.x], mine, at, end, pipe, warp, m);
  } else {
    Sums sums;
    for (;;) {
      const Item item = mainloop<UNITS>(
          sums, pipe, warpgroup, units,
          [&](u32 x, u32 w, uint4 share) { wgmma_step(sums, x, w, share); });
      epilogue(sums, y, m, width, item);
      if (item.last) break;
    }
  }
}
