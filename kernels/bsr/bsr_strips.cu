// Y[m, n] = X[m, k] @ W[n, k].T for W in blocks whose sides are multiples of 8 (24, 40, 48, ...),
// by wgmma and TMA (Hopper). dX = dY @ W is the same product over the transposed pattern.
//
//   work item: TOKENS tokens x 2 x ROWS rows of tiles     step: up to STRIPS strips, DEPTH of k each
//
//        X, strips                W, the tiles of these rows there      sums, in registers
//       DEPTH    DEPTH            row 0      [ ]                          row 0    row 1  ...
//      +--------+--------+ ..     row 1    [ ]  [ ]                      +--------+--------+ ..
//      | 64     |        |         ...                                   | 64 x   |        |
//      | tokens |        |   x    row 5      [ ]              +=         | HEIGHT |        |
//      +--------+--------+ ..                                            +--------+--------+ ..
//      | 64     |        |        tile: HEIGHT features x DEPTH of k
//
// A tile is a block, or an equal part of a larger one (of 96 x 96, a tile is 96 x 48). Features are
// wgmma's N, which may be any multiple of 8, so no feature is padded.
//
// wgmma's K is 16, and TMA reads rows that start at a multiple of 32 bytes up to 2.5 times as fast.
// So if DEPTH is an odd multiple of 8, a strip is BOX = DEPTH + 8 columns that start at a multiple
// of 16. Blocks in odd columns start eight columns later. Before or after its tile, a product reads
// zeros of W from shared memory. (Therefore a NaN of X in the eight columns beside a block reaches
// the result.)
//
//      DEPTH = 24:     | strip 0: 0 to 31      |
//                      | tile 0: 0 to 23 |     |
//                              | strip 1: 16 to 47     |
//                              | zeros | tile 1: 24 .. |
//
// With ACROSS = 2, strips are 32 columns at multiples of 32, wherever blocks begin. Then a tile is
// 16 of k at a multiple of 16, with zeros where there is no block. No column is loaded twice, and a
// strip's rows of 64 bytes lie in one line of 128.
//
//      ACROSS = 2:     | strip 0: 0 to 31      | strip 1: 32 to 63     |
//      blocks of 24:   | block 0         | block 1         | ..
//      their tiles:    | 0: 16     | 0: 8, 1: 8| 1: 16     | ..          (in other rows: not united)
//
// Loads of X are the bottleneck (NOTES.md). So as many rows as the registers hold share the strips,
// and each of the two warpgroups multiplies half of these rows with all tokens.
//
//   X    rows of 64 or 128 bytes, swizzled by TMA
//   W    tiles as the host packs them, without swizzle: 8 x 8 elements are 128 contiguous bytes,
//        [DEPTH / 8][HEIGHT / 8][8 features][8 of k]
//   note the number of tiles of each row (4 bits) and the place of each tile (3 bits): its strip
//        times ACROSS, plus its position in the strip. If DEPTH is an odd multiple of 8: twice the
//        strip, plus 1 in an odd column
//
// The pipeline is that of bsr_small.cu (strips.cuh): warps 0 and 1 of the producers load strips,
// warp 2 tiles, warp 3 writes the note; a consumer keeps the products of one step in flight.
//
// Macros: HEIGHT=16..96 and DEPTH=16..64 (multiples of 8) or 80 ACROSS=1, or 2 where DEPTH is 16
// TOKENS=64|128|256 ROWS=1..8 WARPGROUPS=1|2 STRIPS=1|2|4 ROOM (KB of tiles in a step), the rest of
// bsr_strips.constants_of, and hopper.cuh's.

#include "strips.cuh"

constexpr bool SKEW = DEPTH % 16 != 0;
constexpr int READ = SKEW ? DEPTH + 8 : DEPTH;    // columns that a product of a tile reads
constexpr int BOX = ACROSS * READ;                // of a strip
constexpr int APART = ACROSS > 1 ? BOX : DEPTH;   // from strip to strip
// Columns of a strip's boxes, and the bytes between their rows. More than 64 columns take two
// boxes.
constexpr int FIRST = BOX > 64 ? (BOX + 31) / 32 * 16 : BOX, SECOND = BOX - FIRST;
constexpr int PITCH = FIRST > 32 ? 128 : FIRST > 16 ? 64 : 32;
constexpr int PITCH_2 = SECOND > 32 ? 128 : SECOND > 16 ? 64 : SECOND ? 32 : 0;
constexpr int TILES = TOKENS / 64, PIECES = HEIGHT / 8;     // of 64 tokens; of 8 features
constexpr int FIRST_BYTES = TOKENS * PITCH, STRIP_BYTES = FIRST_BYTES + TOKENS * PITCH_2;
constexpr int TILE_BYTES = HEIGHT * DEPTH * 2, STEP_BYTES = HEIGHT * 16;  // 8 of k
using Pipeline = Strips<STRIP_BYTES, ROOM * 1024>;
struct Boxes { TensorMap first, second; };  // of a strip
// TMA takes longer for a row beyond X than for one that it reads. So the last tile of tokens has
// boxes of its own, `tail`, as high as it has tokens.
struct Maps { Boxes whole, tail; };

// ---- producers ----

__device__ __forceinline__ void load_w(const char* w, const Pipeline& pipe, const Step& step) {
  const int bytes = step.blocks * TILE_BYTES;
  mbarrier_arrive_expect_tx(pipe.full_barrier(), bytes);
  if (bytes) bulk_load(pipe.w(), w + (u64)step.first * TILE_BYTES, bytes, pipe.full_barrier());
}

// Load every second strip, starting with `first`.
__device__ __forceinline__ void load_x(const Maps& maps, const Pipeline& pipe, const Step& step,
                                       int first, int m) {
  const int tokens = min(max(m - step.token, 0), TOKENS);
  const Boxes& x = tokens == TOKENS ? maps.whole : maps.tail;
  int strips[2], bytes = 0;
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const int at = first + 2 * i;
    strips[i] = at < STRIPS && tokens ? (int)(step.strips >> 16 * at & 0xffff) : NO_STRIP;
    bytes += strips[i] != NO_STRIP ? tokens * BOX * 2 : 0;
  }
  mbarrier_arrive_expect_tx(pipe.full_barrier(), bytes);
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    if (strips[i] == NO_STRIP) continue;
    const u32 to = pipe.x() + (first + 2 * i) * STRIP_BYTES, bar = pipe.full_barrier();
    const int column = strips[i] * APART & ~15;
    tma_load(to, &x.first, column, step.token, bar);
    if (SECOND) tma_load(to + FIRST_BYTES, &x.second, column + FIRST, step.token, bar);
  }
}

// Lane j of each warp loads steps j, j + 32, ... It reads step j + 32 of the list meanwhile.
__device__ __forceinline__ void producer(const Maps& x, const char* w, const Step* steps,
                                         int at, int end, Pipeline pipe, int warp, int m) {
  const int lane = threadIdx.x % 32;
  Step mine = steps[at + lane];
  for (; at < end; at += 32) {
    const Step ahead = steps[at + 32 + lane];
    const int count = min(32, end - at);
    for (int i = 0; i < count; i++) {
      if (lane == i) {
        pipe.producer_acquire();
        if (warp < 2) load_x(x, pipe, mine, warp, m);
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

using Sums = float[ROWS][TILES][HEIGHT / 2];

// Return the descriptor of 16 of k of a tile: the first eight at `at`, the others at `next`.
__device__ __forceinline__ u64 tile_descriptor(u32 at, u32 next) {
  return (u64)(at >> 4 | (next - at) >> 4 << 16) | (u64)(128 >> 4) << 32;
}

// Eight columns of zeros. A descriptor counts upwards from its first eight columns to the others,
// so there are zeros below all tiles and above them.
struct Zeros { u32 below, above; };

__device__ __forceinline__ void wgmma_tile(float (&sums)[TILES][HEIGHT / 2], u64 x, u64 x_2, u32 w,
                                           bool late, Zeros zeros) {
  if (SKEW && late) w -= STEP_BYTES;
  #pragma unroll
  for (int i = 0; i < READ; i += 16) {
    u32 at = w + i / 8 * STEP_BYTES, next = at + STEP_BYTES;
    if (SKEW && i == 0 && late) at = zeros.below;
    if (SKEW && i + 16 == READ && !late) next = zeros.above;
    const u64 b = tile_descriptor(at, next);
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      Wgmma<HEIGHT>::multiply(sums[t],
                              i < FIRST ? x + (t * 64 * PITCH + 2 * i >> 4)
                                        : x_2 + (t * 64 * PITCH_2 + 2 * (i - FIRST) >> 4), b);
  }
}

// Return the offset of a place in the strips, in units of 16 bytes. A tile beside another is 16 of
// k.
__device__ __forceinline__ u32 strip_offset(u32 place) {
  constexpr int STRIP = STRIP_BYTES >> 4;
  return ACROSS > 1 ? place / ACROSS * STRIP + place % ACROSS * (32 >> 4) : (place >> SKEW) * STRIP;
}

__device__ __forceinline__ void wgmma_step(Sums& sums, u32 x_tile, u32 w, Zeros zeros,
                                           uint4 share) {
  const u64 x = smem_descriptor(x_tile, PITCH);
  const u64 x_2 = smem_descriptor(x_tile + FIRST_BYTES, PITCH_2);
  w += (share.y & 0xff) * TILE_BYTES;
  u64 places = share.z | (u64)share.w << 32;
  wgmma_fence();
  #pragma unroll
  for (int j = 0; j < ROWS; j++) {
    #pragma unroll 1
    for (u32 count = share.x >> 4 * j & 15; count; count--) {
      const u32 place = places & 7, strip = strip_offset(place);
      wgmma_tile(sums[j], x + strip, x_2 + strip, w, place & 1, zeros);
      places >>= 3;
      w += TILE_BYTES;
    }
  }
  wgmma_commit();
}

// Store the sums. A warp has 16 of each 64 tokens. A lane holds two neighbouring features of a
// token, and eight after the transpose of four pieces.
__device__ __forceinline__ void epilogue(const Sums& sums, char* y, int m, int width,
                                         const Item& item) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  #pragma unroll
  for (int first = 0; first < ROWS * PIECES; first += 4) {
    const int mine = first + lane % 4;
    const int row = __shfl_sync(~0u, item.seat_of_lane, mine / PIECES);
    const int feature = row * HEIGHT + mine % PIECES * 8;
    const bool there = mine < ROWS * PIECES && row >= 0 && feature < width;
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      #pragma unroll
      for (int below = 0; below < 2; below++) {  // eight tokens below
        u32 words[4];
        #pragma unroll
        for (int p = 0; p < 4; p++) {
          const int piece = first + p < ROWS * PIECES ? first + p : first;
          const float* s = sums[piece / PIECES][t] + piece % PIECES * 4 + 2 * below;
          words[p] = pack_pair(s[0], s[1]);
        }
        quad_transpose(words);
        const int token = item.token + 64 * t + 16 * warp + 8 * below + lane / 4;
        if (there && token < m)
          *(uint4*)(y + 2 * ((u64)token * width + feature)) =
              uint4{words[0], words[1], words[2], words[3]};
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
multiply_tiles(const __grid_constant__ Maps x, const __grid_constant__ Starts starts,
               const char* w, const Step* steps, const int* rows, char* y, int m, int width) {
  extern __shared__ char shared[];
  __shared__ uint4 notes[Pipeline::STAGES * (1 + WARPGROUPS)];
  __shared__ u64 full[Pipeline::STAGES], empty[Pipeline::STAGES];
  const u32 below = (smem_address(shared) + 1023) & ~1023u, tiles = below + 2048;
  const u32 above = tiles + Pipeline::STAGES * Pipeline::STAGE_BYTES;
  Pipeline pipe{{opaque(tiles), opaque(smem_address(notes))},
                {opaque(smem_address(full)), opaque(smem_address(empty))}};
  if (threadIdx.x == 0) {
    pipe.init_barriers(4, 4 * WARPGROUPS);  // producer warps; consumer warps
    fence_mbarrier_init();
  }
  if (SKEW && threadIdx.x < STEP_BYTES / 16) {
    st_shared(below + 16 * threadIdx.x, uint4{0, 0, 0, 0});
    st_shared(above + 16 * threadIdx.x, uint4{0, 0, 0, 0});
    fence_proxy_async();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
  if (warpgroup == WARPGROUPS) {
    if (WARPGROUPS == 2) setmaxnreg_dec<56>();
    pipe.phase = 1;  // at first, all stages are free
    const int at = starts.at[blockIdx.x], end = starts.at[blockIdx.x + 1];
    producer(x, w, steps, at, end, pipe, warp, m);
  } else {
    if (WARPGROUPS == 2) setmaxnreg_inc<224>();
    const Zeros zeros{opaque(below), opaque(above)};
    Sums sums;
    for (;;) {
      const Item item = mainloop<ROWS>(
          sums, pipe, warpgroup, rows,
          [&](u32 x, u32 w, uint4 share) { wgmma_step(sums, x, w, zeros, share); });
      epilogue(sums, y, m, width, item);
      if (item.last) break;
    }
  }
}
