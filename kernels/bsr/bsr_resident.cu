// Y[m, n] = X[m, k] @ W[n, k].T for W in blocks of any even size up to 64, by mma (compute
// capability 8.0 and newer), for small k: a tile of X with all of its columns stays in shared
// memory.
//
//   CTA: TOKENS tokens of Y       SHARE warps: one block row at a time, from a list of all rows
//
//      X tile, loaded once           W, a block row                       Y
//     +---------------------+      +----+----+----+----+
//     |       k             |   x  | ## |    | ## |    |  r features  =  TOKENS x r, in registers
//     | TOKENS              |      +----+----+----+----+
//     +---------------------+        block: registers, straight from memory
//
// In other kernels, a step reads a block's column and then loads the columns of X there. Here no
// load waits for an index: X is loaded whole, and the blocks of a row are contiguous. So a launch
// takes little longer than its longest chain: bounds of a row, first block, products, store. If all
// rows have the same number of blocks, the bounds are computed, and nothing waits for them. A block
// may start at any even column because the registers of mma are read from the X tile word by word.
//
//   mma m16n8k16    A  16 tokens x 16 of k, four words of the X tile per lane
//                   B  16 of k x 8 features, two words per lane: the host packs them in this order
//   the last 8 or fewer of a block's columns take m16n8k8
//
// Columns between a block's end and the end of its last product are zeros in W and are read as
// zeros of X, so a NaN beside a block does not reach it. Rows of the X tile are PITCH bytes apart,
// an odd multiple of 16, so the eight rows that a warp reads at once are in different banks.
//
// With SHARE > 1, each of these warps has a contiguous part of the row's blocks. The first one adds
// the sums of the others in order: equal inputs give equal bits.
//
// Macros: R, C (a block's sides, even) TOKENS=16..128 WARPS SHARE=1|2|4, FP16=0|1.
// Source: PTX ISA 9.0, mma.m16n8k16, mma.m16n8k8, cp.async, bar.sync.

using u32 = unsigned int;
using u64 = unsigned long long;
#if FP16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
#include "mma.cuh"

constexpr int MT = TOKENS / 16, NT = (R + 7) / 8;            // products of 16 tokens, 8 features
constexpr int DEEP = (C + 7) / 16, REST = C - 16 * DEEP;     // products 16 deep; one 8 deep?
constexpr bool SHALLOW = REST > 0;
constexpr int WORDS = NT * (2 * DEEP + SHALLOW);             // of a block in a lane
constexpr int ROWS = WARPS / SHARE;                          // that a CTA has at a time
// Blocks that are loaded at a time; twice as many are in flight, in registers. More blocks need
// more code, which is also read cold: 12 blocks of 10 x 10 at a time took 0.4 us longer (NOTES.md).
constexpr int FIT = (WARPS < 16 ? 64 : 24) / (WORDS + 1);
constexpr int AHEAD = FIT > 4 ? 4 : FIT > 0 ? FIT : 1;

struct Row { int number, begin, end, unused; };  // a block row, its blocks
// All CTAs together multiply `slots` rows at a time. `each`: blocks of every row; -1 if rows
// differ.
struct Weights { const u32* blocks; const int* columns; const Row* order; int rows, slots, each; };

__device__ __forceinline__ void cp_async_16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ u32 pack_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Start loading the tile of X. Rows beyond m are not loaded, and their products are not stored.
__device__ __forceinline__ void load_x(const char* x, long long row_bytes, int tokens, int k,
                                       int pitch, u32 tile) {
  const int pieces = k / 8;  // of 16 bytes in a row
  for (int row = threadIdx.x / 32; row < tokens; row += WARPS)
    for (int piece = threadIdx.x % 32; piece < pieces; piece += 32)
      cp_async_16(tile + row * pitch + piece * 16, x + row * row_bytes + piece * 16);
  cp_async_commit();
}

struct Block { int column; u32 words[WORDS]; };  // a block column; -1: no block

__device__ __forceinline__ Block load_block(const Weights& w, int at, int end) {
  Block block;
  block.column = at < end ? __ldg(w.columns + at) : -1;  // a use here would wait for it
  const u32* from = w.blocks + ((u64)at * 32 + threadIdx.x % 32) * WORDS;
  #pragma unroll
  for (int i = 0; i < WORDS; i++) block.words[i] = 0;
  if (at < end) {
    if (WORDS % 4 == 0) {
      #pragma unroll
      for (int i = 0; i < WORDS; i += 4) {
        const uint4 v = __ldg((const uint4*)(from + i));
        block.words[i] = v.x, block.words[i + 1] = v.y;
        block.words[i + 2] = v.z, block.words[i + 3] = v.w;
      }
    } else if (WORDS % 2 == 0) {
      #pragma unroll
      for (int i = 0; i < WORDS; i += 2) {
        const uint2 v = __ldg((const uint2*)(from + i));
        block.words[i] = v.x, block.words[i + 1] = v.y;
      }
    } else {
      #pragma unroll
      for (int i = 0; i < WORDS; i++) block.words[i] = __ldg(from + i);
    }
  }
  return block;
}

// Prefetch the blocks from `at` on into L2, 128 bytes per lane at a time.
__device__ __forceinline__ void prefetch(const Weights& w, int at, int end) {
  const char* from = (const char*)(w.blocks + (u64)at * 32 * WORDS);
  #pragma unroll 1
  for (int i = threadIdx.x % 32; i < (end - at) * WORDS; i += 32)
    asm volatile("prefetch.global.L2 [%0];" :: "l"(from + 128 * i));
}

__device__ __forceinline__ u32 word_of(const char* from, bool there) {
  return there ? *(const u32*)from : 0;
}

// Add the products of a block. `mine` is the address of this lane's words: token lane / 4, column
// 2 * (lane % 4).
__device__ __forceinline__ void multiply(float (&sums)[MT][NT][4], const Block& block,
                                         const char* mine, int k, int pitch) {
  const int column = block.column * C;
  const int left = min(C, k - column) - threadIdx.x % 4 * 2;  // columns that the lane may read
  const char* from = mine + 2 * column;
  #pragma unroll
  for (int s = 0; s < DEEP; s++)
    #pragma unroll
    for (int i = 0; i < MT; i++) {
      const char *upper = from + 16 * i * pitch + 32 * s, *lower = upper + 8 * pitch;
      const bool first = 16 * s < left, second = 16 * s + 8 < left;
      const u32 a[4] = {word_of(upper, first), word_of(lower, first), word_of(upper + 16, second),
                        word_of(lower + 16, second)};
      #pragma unroll
      for (int j = 0; j < NT; j++)
        mma_m16n8k16(sums[i][j], a, block.words[2 * (s * NT + j)],
                     block.words[2 * (s * NT + j) + 1]);
    }
  if (SHALLOW) {
    #pragma unroll
    for (int i = 0; i < MT; i++) {
      const char *upper = from + 16 * i * pitch + 32 * DEEP, *lower = upper + 8 * pitch;
      const bool there = 16 * DEEP < left;
      const u32 a0 = word_of(upper, there), a1 = word_of(lower, there);
      #pragma unroll
      for (int j = 0; j < NT; j++)
        mma_m16n8k8(sums[i][j], a0, a1, block.words[2 * DEEP * NT + j]);
    }
  }
}

__device__ __forceinline__ void store(const float (&sums)[MT][NT][4], char* y, int row, int tokens,
                                      int n) {
  const int lane = threadIdx.x % 32;
  #pragma unroll
  for (int i = 0; i < MT; i++)
    #pragma unroll
    for (int j = 0; j < NT; j++)
      #pragma unroll
      for (int below = 0; below < 2; below++) {
        const int token = 16 * i + 8 * below + lane / 4, in = 8 * j + lane % 4 * 2;
        if (token < tokens && in < R && row * R + in < n)
          *(u32*)(y + 2 * ((u64)token * n + row * R + in)) =
              pack_pair(sums[i][j][2 * below], sums[i][j][2 * below + 1]);
      }
}

// Synchronise all warps of a row: there is one barrier for each row of the CTA.
__device__ __forceinline__ void row_sync(int row) {
  asm volatile("bar.sync %0, %1;" :: "r"(1 + row), "n"(32 * SHARE) : "memory");
}

// Pass the sums of a row's warps to the first one. `given` is the row's part of shared memory: 16
// bytes for each lane, product and warp except the first.
__device__ __forceinline__ void join(float (&sums)[MT][NT][4], float4* given, int row, int part) {
  given += threadIdx.x % 32;
  if (part > 0)
    #pragma unroll
    for (int i = 0; i < MT * NT; i++) {
      const float* s = sums[i / NT][i % NT];
      given[((part - 1) * MT * NT + i) * 32] = float4{s[0], s[1], s[2], s[3]};
    }
  row_sync(row);
  if (part == 0)
    #pragma unroll
    for (int i = 0; i < MT * NT; i++)
      #pragma unroll
      for (int other = 0; other < SHARE - 1; other++) {
        const float4 v = given[(other * MT * NT + i) * 32];
        float* s = sums[i / NT][i % NT];
        s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
      }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
multiply_rows(const char* x, long long row_bytes, Weights w, char* y, int m, int n, int k,
              int pitch) {
  extern __shared__ __align__(16) char tile[];
  const int groups = w.slots / ROWS, group = blockIdx.x % groups;
  const int token = blockIdx.x / groups * TOKENS, tokens = min(TOKENS, m - token);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int seat = warp % ROWS, part = warp / ROWS;
  load_x(x + token * row_bytes, row_bytes, tokens, k, pitch,
         (u32)__cvta_generic_to_shared(tile));
  y += 2 * (u64)token * n;
  const char* mine = tile + lane / 4 * pitch + lane % 4 * 4;
  float4* given = (float4*)(tile + TOKENS * pitch) + seat * (SHARE - 1) * MT * NT * 32;
  bool waits = true;
  for (int slot = group * ROWS + seat; slot < w.rows || waits; slot += w.slots) {
    const bool some = slot < w.rows;
    int4 own{0, 0, 0, 0};
    if (some && w.each >= 0) own = int4{slot, slot * w.each, (slot + 1) * w.each, 0};
    else if (some) own = __ldg((const int4*)(w.order + slot));
    const int row = own.x, blocks = own.z - own.y;
    int at = own.y + blocks * part / SHARE;
    const int end = own.y + blocks * (part + 1) / SHARE;
    Block next[AHEAD];
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) next[i] = load_block(w, at + i, end);
    prefetch(w, at + 2 * AHEAD, end);
    if (waits) {
      cp_async_wait<0>();
      __syncthreads();
    }
    float sums[MT][NT][4] = {};
    for (; at < end; at += AHEAD) {
      Block now[AHEAD];
      #pragma unroll
      for (int i = 0; i < AHEAD; i++) now[i] = next[i];
      #pragma unroll
      for (int i = 0; i < AHEAD; i++) next[i] = load_block(w, at + AHEAD + i, end);
      #pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (now[i].column >= 0) multiply(sums, now[i], mine, k, pitch);
    }
    if (SHARE > 1) {
      if (!waits) row_sync(seat);  // the first warp has read the sums of the last row
      join(sums, given, seat, part);
    }
    if (some && part == 0) store(sums, y, row, tokens, n);
    waits = false;
  }
}
