// A panel of X in shared memory: some columns of TOKENS tokens, each column contiguous.
//
//     X[m, k]                        panel
//     +----+-----------+----+        column 0    | t0 t1 t2 ..  TOKENS |
//     |    | columns   |    |        column 1    |                     |
//     |    | x TOKENS  |    |  ->      ...
//     +----+-----------+----+
//
// LANES lanes read a column, VECTORS times 16 bytes each; the WAYS parts of a warp read different
// columns.
//
// Macros: FP32, FP16 = 0|1 (neither: bf16), TOKENS, THREADS, and ALIGNED = 0|1, whether four columns
// of a token can be read at a time.

#pragma once

using u16 = unsigned short;
using u32 = unsigned int;

constexpr int SIZE = FP32 ? 4 : 2;
constexpr int VECTOR = 16 / SIZE;  // tokens in 16 bytes
constexpr int LANES = TOKENS / VECTOR < 8 ? TOKENS / VECTOR : 8, WAYS = 32 / LANES;
constexpr int VECTORS = TOKENS / VECTOR / LANES;
constexpr int COLUMN_BYTES = TOKENS * SIZE;
constexpr int CLASSES = COLUMN_BYTES < 128 ? 128 / COLUMN_BYTES : 1;  // columns in all banks

#if FP32
using Element = u32;  // its bits
using Four = uint4;   // columns of a token
#else
using Element = u16;
using Four = uint2;
#endif

// ---- PTX ----

#if FP32
__device__ __forceinline__ u32 narrow(float f) { return __float_as_uint(f); }
#else
__device__ __forceinline__ float to_float(u16 value) {
  float f;
#if FP16
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(value));
#else
  f = __uint_as_float((u32)value << 16);
#endif
  return f;
}
__device__ __forceinline__ u16 narrow(float f) {
  u16 value;
#if FP16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(value) : "f"(f));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(value) : "f"(f));
#endif
  return value;
}
#endif
__device__ __forceinline__ void prefetch_l2(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(line));
}
extern __shared__ __align__(16) char shared[];

// All threads of the CTA prefetch [first, end) to the L2 cache.
__device__ __forceinline__ void prefetch(const void* first, const void* end) {
  #pragma unroll 1
  for (const char* line = (const char*)first + threadIdx.x * 128; line < end; line += THREADS * 128)
    prefetch_l2(line);
}

// ---- the panel ----

// The place of a column in the panel, by the same formula as on the host. A quarter of a warp writes
// 16 bytes of CLASSES columns that are 4 apart, to different banks.
__device__ __forceinline__ int place_of(int quad, int i) {
  return 4 * quad + (i ^ (quad & (CLASSES - 1)));
}

__device__ __forceinline__ Four load_four(const Element* row, int column, int k) {
#if ALIGNED
  return column < k ? __ldg((const Four*)(row + column)) : Four{};
#else
  Element e[4];
  #pragma unroll
  for (int i = 0; i < 4; i++) e[i] = column + i < k ? __ldg(row + column + i) : Element{};
#if FP32
  return {e[0], e[1], e[2], e[3]};
#else
  return {e[0] | (u32)e[1] << 16, e[2] | (u32)e[3] << 16};
#endif
#endif
}

// Element i of each of VECTOR tokens.
__device__ __forceinline__ uint4 transposed(const Four (&t)[VECTOR], int i) {
#if FP32
  const auto of = [i](const Four& f) { return i == 0 ? f.x : i == 1 ? f.y : i == 2 ? f.z : f.w; };
  return {of(t[0]), of(t[1]), of(t[2]), of(t[3])};
#else
  const auto both = [i](const uint2& a, const uint2& b) {
    return __byte_perm(i < 2 ? a.x : a.y, i < 2 ? b.x : b.y, i % 2 ? 0x7632 : 0x5410);
  };
  return {both(t[0], t[1]), both(t[2], t[3]), both(t[4], t[5]), both(t[6], t[7])};
#endif
}

// A thread copies four columns of VECTOR tokens at a time; tokens past m and columns past k are
// zeros. Neighbouring lanes have different tokens, then different columns. The thread calls
// `meanwhile` after it has issued its first reads.
template <class Work>
__device__ __forceinline__ void load_panel(char* panel, const Element* x, long long stride,
                                           int token, int m, int column, int columns, int k,
                                           Work meanwhile) {
  constexpr int GROUPS = TOKENS / VECTOR;
  const u32 units = GROUPS * ((columns + 3) / 4);
  Four t[VECTOR];
  const auto read = [&](u32 unit) {
    #pragma unroll
    for (int j = 0; j < VECTOR; j++) {
      const int at = token + unit % GROUPS * VECTOR + j;
      t[j] = at < m ? load_four(x + at * stride, column + unit / GROUPS * 4, k) : Four{};
    }
  };
  u32 unit = threadIdx.x;
  if (unit < units) read(unit);
  meanwhile();
  while (unit < units) {
    char* to = panel + unit % GROUPS * 16;
    #pragma unroll
    for (int i = 0; i < 4; i++)
      *(uint4*)(to + place_of(unit / GROUPS, i) * COLUMN_BYTES) = transposed(t, i);
    unit += THREADS;
    if (unit < units) read(unit);
  }
}

// Read the tokens of a lane from a column; `from` is at the lane's 16 bytes.
__device__ __forceinline__ void read(float (&x)[VECTORS * VECTOR], const char* from) {
  #pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const uint4 all = *(const uint4*)(from + v * LANES * 16);
    const u32 words[4] = {all.x, all.y, all.z, all.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
#if FP32
      x[4 * v + i] = __uint_as_float(words[i]);
#else
      x[8 * v + 2 * i] = to_float(words[i] & 0xffff);
      x[8 * v + 2 * i + 1] = to_float(words[i] >> 16);
#endif
    }
  }
}
