// Y[m, K] = (act(G) * (X @ Wu.T)) @ Wd.T where few units of act(G) are on: what follows the gate.
//
//   G[m, n] = X @ Wg.T, of the launch before. A unit of a token is on unless G <= 0: NaN is on.
//
//   a group: up to eight tokens, and SPLIT CTAs (a cluster), each with n / SPLIT of the units
//
//     G of    . . x . . . . x . .         rows, in shared memory:  unit | tokens it is on for
//     its     . . . . . . . x . .   -->                              2  |  x . .
//     tokens  . . x . . x . . . .                                    5  |  . . x   ...
//
//   a step: 16 rows of the list, for all warps; a warp has 256 columns
//
//                       K                        tokens                        tokens
//          +--------+--------+--               +--------+                    +--------+
//     16   | warp 0 | warp 1 |  of Wu      x   |   X    |   =  U, summed     |  act   |
//    rows  |        |        |                 |        |      over the  *   |  (G)   |  =  H
//          +--------+--------+--               +--------+      warps         +--------+
//
//     Y, K x tokens  +=  the same rows and columns of Wd.T, read by columns, x  H
//
// By tensor cores (mma m16n8k16), although most of H is off: weights are the tall operand, tokens
// its eight columns. A unit that several tokens share is read once, and one that a single token
// has costs what it would alone. A row takes 206 instructions of a warp at K = 2048, where threads
// that multiply and add took 364 for every token of a row. What is left is the weights' way from
// L2, 4 K bytes a row at 9 TB/s (kernels/NOTES.md).
//
// The down product of a step is under way together with the up product of the next: twice the
// loads in flight, and one exchange of U a step.
//
// U is summed over K in the order of the warps and kept in fp32; H is rounded once; Y is summed in
// the order of the units, then of the CTAs. So the bits are the same at every call. A row that no
// token of the group needs is not read. A group with more rows than `limit` is left to a dense
// product: its number goes onto the list `heavy`, and its tokens are not written.
//
// With GATED = 0, Y = act(G) @ Wd.T: there is no U, and H is act(G).
//
// With PACKED, the gate's product has written who is on (spense_wgmma.cu, "who is on"): a byte for a
// unit and eight tokens, which are a group. Of G nothing but what is on is read.
//
// Compiled with -DK, -DSPLIT=1|2|4|8, -DSQUARED=0|1 (relu, relu2), -DGATED=0|1, -DPACKED=0|1 and
// what hopper.cuh asks for. K is a multiple of 8, and of 256 beyond 3072, and at most 4096.

#include "hopper.cuh"

using u16 = unsigned short;

constexpr int COLUMNS = 256;  // of K, a warp's: 64 sums a thread
constexpr int WARPS = (K + COLUMNS - 1) / COLUMNS < 4 ? 4 : (K + COLUMNS - 1) / COLUMNS;
constexpr int THREADS = 32 * WARPS, ROWS = 16;
constexpr int CTAS = WARPS <= 8 && K % COLUMNS == 0 ? 2 : 1;  // of an SM
constexpr int X_STRIDE = 2 * COLUMNS * WARPS + 64;  // bytes: eight lanes read from all banks

extern __shared__ __align__(16) char shared[];  // X, eight tokens, zero beyond; then the rows

struct Shared {
  float parts[WARPS][ROWS][8];  // of U
  u16 h[8][ROWS + 8];           // a row of tokens every 12 words: no bank twice
  int counts[WARPS], found;
};

// ---- PTX ----

__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float wide(u16 value) {
  float f;
#if FP16
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(value));
#else
  f = __uint_as_float((u32)value << 16);
#endif
  return f;
}
__device__ __forceinline__ int int_of(const int* own, int cta) {  // of the cluster
  int value;
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %1, %2;\n"
               "ld.shared::cluster.s32 %0, [remote];\n}"
               : "=r"(value) : "r"(address_of(own)), "r"(cta) : "memory");
  return value;
}
__device__ __forceinline__ float4 floats_of(const float* own, int cta) {
  float4 v;
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\n"
               "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address_of(own)), "r"(cta) : "memory");
  return v;
}

__device__ __forceinline__ int cta_number() {  // read again at each call
  int cta;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
  return cta;
}
__device__ __forceinline__ int thread_number() {  // likewise
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// ---- rows: unit << 8 | tokens that it is on for ----

__device__ __forceinline__ int sum_before(int own, Shared& s, int& all) {  // over the CTA
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int up_to = own;
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int below = __shfl_up_sync(~0u, up_to, by);
    if (lane >= by) up_to += below;
  }
  if (lane == 31) s.counts[warp] = up_to;
  __syncthreads();
  int before = up_to - own;
  all = 0;
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) before += s.counts[w];
    all += s.counts[w];
  }
  __syncthreads();
  return before;
}

// List the units of pieces `at` to `end`, eight a piece, that are on for some token, in ascending
// order; a last step is filled up with a row that is on for none. Returns their number.
__device__ __forceinline__ int list_rows(u32* rows, const u16* g, const uint2* bits, int tokens,
                                         int n, int at, int end, Shared& s) {
  int found = 0;
  for (; at < end; at += THREADS) {
    const int piece = at + threadIdx.x;
    u32 masks[4] = {};  // of two units each
    if (PACKED && piece < end) {
      const uint2 v = __ldg(bits + piece);
      masks[0] = __byte_perm(v.x, 0, 0x4140), masks[1] = __byte_perm(v.x, 0, 0x4342);
      masks[2] = __byte_perm(v.y, 0, 0x4140), masks[3] = __byte_perm(v.y, 0, 0x4342);
    } else if (piece < end) {
      #pragma unroll
      for (int i = 0; i < 8; i++)
        if (i < tokens) {
          const uint4 v = __ldg((const uint4*)(g + (u64)i * n) + piece);
          masks[0] |= on(v.x) & 0x10001u << i;
          masks[1] |= on(v.y) & 0x10001u << i;
          masks[2] |= on(v.z) & 0x10001u << i;
          masks[3] |= on(v.w) & 0x10001u << i;
        }
    }
    int own = 0, all;
    #pragma unroll
    for (int j = 0; j < 8; j++) own += (masks[j / 2] >> 16 * (j % 2) & 0xff) != 0;
    int to = found + sum_before(own, s, all);
    #pragma unroll
    for (int j = 0; j < 8; j++) {
      const u32 mask = masks[j / 2] >> 16 * (j % 2) & 0xff;
      if (mask) rows[to++] = (u32)(8 * piece + j) << 8 | mask;
    }
    found += all;
  }
  __syncthreads();
  if (threadIdx.x < ROWS) rows[found + threadIdx.x] = found ? rows[found - 1] & ~0xffu : 0;
  __syncthreads();
  return found;
}

// ---- products ----

// Eight columns of a row. A column beyond K is another one: X is zero there, and Y not written.
struct Row {
  const uint4* w;
  u32 at;
  int column;
  __device__ __forceinline__ Row(const uint4* w, u32 row, int column)
      : w(w), at((row >> 8) * (K / 8) + (column < K ? column / 8 : 0)), column(column) {}
  __device__ __forceinline__ uint4 ahead(int columns) const {
    return w[at + (K % COLUMNS == 0 || column + columns < K ? columns / 8 : 0)];
  }
};

// U of 16 rows, this warp's columns alone. A piece of eight columns is two of the four that a lane
// holds for each k = 16, in A and B alike: a sum may be taken in any order.
struct Up {
  Row upper, lower;
  const char* x;
  float u[4];
  __device__ __forceinline__ static int column() {
    return threadIdx.x / 32 * COLUMNS + threadIdx.x % 4 * 8;
  }
  __device__ __forceinline__ Up(const uint4* w, const u32* rows)
      : upper(w, rows[threadIdx.x % 32 / 4], column()),
        lower(w, rows[threadIdx.x % 32 / 4 + 8], column()),
        x(shared + threadIdx.x % 32 / 4 * X_STRIDE + 2 * column()), u{} {}
  __device__ __forceinline__ void add(int i) {  // 32 columns
    const uint4 a = upper.ahead(32 * i), b = lower.ahead(32 * i);
    const uint4 v = *(const uint4*)(x + 64 * i);
    multiply(u, a.x, b.x, a.y, b.y, v.x, v.y);
    multiply(u, a.z, b.z, a.w, b.w, v.z, v.w);
  }
  __device__ __forceinline__ void put(Shared& s) const {
    const int row = threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
    float (&part)[ROWS][8] = s.parts[threadIdx.x / 32];
    *(float2*)&part[row][token] = float2{u[0], u[1]};
    *(float2*)&part[row + 8][token] = float2{u[2], u[3]};
  }
};

// Sums of Y.T: [i][j] is of columns 64 i + 8 (lane / 4) + 2 j and the next, tokens 2 (lane % 4) and
// the next.
using Sums = float[COLUMNS / 64][4][4];

struct Down {
  Row rows[4];
  u32 h[2];
  __device__ __forceinline__ static int column() {
    return threadIdx.x / 32 * COLUMNS + threadIdx.x % 32 / 4 * 8;
  }
  __device__ __forceinline__ static Row row(const uint4* w, const u32* rows, int i) {
    return Row(w, rows[threadIdx.x % 4 * 2 + i], column());
  }
  __device__ __forceinline__ Down(const uint4* w, const u32* list, const Shared& s)
      : rows{row(w, list, 0), row(w, list, 1), row(w, list, 8), row(w, list, 9)} {
    const u16* own = &s.h[threadIdx.x % 32 / 4][threadIdx.x % 4 * 2];
    h[0] = *(const u32*)own, h[1] = *(const u32*)(own + 8);
  }
  __device__ __forceinline__ void add(Sums& y, int i) const {  // 64 columns
    uint4 q[4];
    #pragma unroll
    for (int r = 0; r < 4; r++) q[r] = rows[r].ahead(64 * i);
    const u32 *a = &q[0].x, *b = &q[1].x, *c = &q[2].x, *d = &q[3].x;
    #pragma unroll
    for (int j = 0; j < 4; j++)  // two rows of a column to a word
      multiply(y[i][j], __byte_perm(a[j], b[j], 0x5410), __byte_perm(a[j], b[j], 0x7632),
               __byte_perm(c[j], d[j], 0x5410), __byte_perm(c[j], d[j], 0x7632), h[0], h[1]);
  }
};

// A token's unit in H: thread t has row t / 8 of token t % 8. Its gate, which is loaded ahead, is
// zero where the unit is off, and nowhere else.
struct Unit {
  u16 gate;
  __device__ __forceinline__ Unit(const u32* rows, const u16* g, int n) : gate(0) {
    if (threadIdx.x >= ROWS * 8) return;
    const u32 row = rows[threadIdx.x / 8], token = threadIdx.x % 8;
    // The same place in three ways, each where it costs fewest registers: 64 bits spill one kernel,
    // 32 the other. With packed gates 16 bytes are spilled, once, after the last step.
    const u16* at = GATED ? g + ((u64)token * n + (row >> 8)) : g + (token * (u32)n + (row >> 8));
    if (PACKED) {
      const u32 own = (u32)cta_number() / SPLIT * 8 + (u32)thread_number() % 8;
      at = g + ((u64)own * (u32)n + (row >> 8));  // g is not of the group, but of all tokens
    }
    if (row >> token & 1) gate = __ldg(at);
  }
  __device__ __forceinline__ void put(Shared& s) const {
    const int row = threadIdx.x / 8, token = threadIdx.x % 8;
    if (threadIdx.x >= ROWS * 8) return;
    float u = GATED ? 0.f : 1.f;
    if (GATED) {
      #pragma unroll
      for (int w = 0; w < WARPS; w++) u += s.parts[w][row][token];
    }
    const float z = wide(gate);
    s.h[token][row] = pair_of(gate ? (SQUARED ? z * z : z) * u : 0.f, 0.f) & 0xffff;
  }
};

__device__ __forceinline__ void put_up(const uint4* w, const u32* rows, Shared& s) {
  if (!GATED) return;
  Up up(w, rows);
  #pragma unroll
  for (int i = 0; i < COLUMNS / 32; i++) up.add(i);
  up.put(s);
}
__device__ __forceinline__ void add_down(Sums& y, const uint4* w, const u32* rows,
                                         const Shared& s) {
  const Down down(w, rows, s);
  #pragma unroll
  for (int i = 0; i < COLUMNS / 64; i++) down.add(y, i);
}

__device__ __forceinline__ void walk(Sums& y, Shared& s, const u32* rows, const u16* g,
                                     const uint4* wu, const uint4* wd, int n) {
  if (!(rows[0] & 0xff)) return;
  {
    const Unit unit(rows, g, n);
    put_up(wu, rows, s);
    __syncthreads();
    unit.put(s);
    __syncthreads();
  }
  for (; rows[ROWS] & 0xff; rows += ROWS) {
    if (!GATED) add_down(y, wd, rows, s);  // the order in which nothing is spilled
    const Unit unit(rows + ROWS, g, n);
    put_up(wu, rows + ROWS, s);
    if (GATED) add_down(y, wd, rows, s);
    __syncthreads();
    unit.put(s);
    __syncthreads();
  }
  add_down(y, wd, rows, s);
}

// ---- out ----

__device__ __forceinline__ uint4 rounded(float4 a, float4 b) {
  return uint4{pair_of(a.x, a.y), pair_of(a.z, a.w), pair_of(b.x, b.y), pair_of(b.z, b.w)};
}

// Give each token's eight columns that a thread has, as two times four, to `put`.
template <class Put> __device__ __forceinline__ void each_piece(const Sums& y, int tokens, Put put) {
  const int lane = threadIdx.x % 32;
  #pragma unroll
  for (int i = 0; i < COLUMNS / 64; i++) {
    const int column = Down::column() + 64 * i;
    #pragma unroll
    for (int t = 0; t < 2; t++) {
      const int token = lane % 4 * 2 + t;
      const float4 a{y[i][0][t], y[i][0][t + 2], y[i][1][t], y[i][1][t + 2]};
      const float4 b{y[i][2][t], y[i][2][t + 2], y[i][3][t], y[i][3][t + 2]};
      if (token < tokens && column < K) put(token, column, a, b);
    }
  }
}

__device__ __forceinline__ void add_up(const Sums& y, float* own, u16* out, int tokens, int rank) {
  __syncthreads();  // X and the rows have been read: their place is free
  each_piece(y, tokens, [&](int token, int column, float4 a, float4 b) {
    float4* to = (float4*)(own + token * K + column);
    to[0] = a, to[1] = b;
  });
  __syncwarp();
  cluster_in_step();
  for (int piece = rank * THREADS + threadIdx.x; piece < tokens * K / 8; piece += SPLIT * THREADS) {
    float4 a{}, b{};
    #pragma unroll
    for (int cta = 0; cta < SPLIT; cta++) {
      const float4 c = floats_of(own + 8 * piece, cta), d = floats_of(own + 8 * piece + 4, cta);
      a.x += c.x, a.y += c.y, a.z += c.z, a.w += c.w;
      b.x += d.x, b.y += d.y, b.z += d.z, b.w += d.w;
    }
    ((uint4*)out)[piece] = rounded(a, b);
  }
  __syncwarp();
  cluster_in_step();  // no CTA may end before all have read its sums
}

// Which tokens are this CTA's. Read anew where needed: kept over the walk, it would be spilled.
struct Group {
  int number, rank, token, tokens;
  __device__ __forceinline__ Group(int m, int most) {
    const int cta = cta_number();
    number = cta / SPLIT, rank = cta % SPLIT, token = number * most;
    tokens = min(most, m - token);
  }
};

// Read X, zero beyond K and where the group has no more tokens.
__device__ __forceinline__ void bring(const uint4* x, int tokens) {
  constexpr int PIECES = WARPS * COLUMNS / 8;
  for (int i = threadIdx.x; i < 8 * PIECES; i += THREADS) {
    const int token = i / PIECES, piece = i % PIECES;
    const bool there = token < tokens && piece < K / 8;
    *(uint4*)(shared + token * X_STRIDE + 16 * piece) =
        there ? __ldg(x + token * (K / 8) + piece) : uint4{};
  }
}

// The rows of all CTAs of the cluster.
__device__ __forceinline__ int total(int found, Shared& s) {
  if (SPLIT == 1) return found;
  if (threadIdx.x == 0) s.found = found;
  __syncwarp();
  cluster_in_step();
  int all = 0;
  for (int cta = 0; cta < SPLIT; cta++) all += int_of(&s.found, cta);
  return all;
}

extern "C" __global__ void __cluster_dims__(SPLIT) __launch_bounds__(THREADS, CTAS)
up_and_down(const u16* x, const u16* g, const uint4* wu, const uint4* wd, u16* y, int* left,
            int* heavy, int m, int n, int most, int limit, const uint2* bits) {
  __shared__ Shared s;
  u32* rows = (u32*)(shared + 8 * X_STRIDE);
  const Group group(m, most);
  if (GATED) bring((const uint4*)(x + (u64)group.token * K), group.tokens);
  const int pieces = n / 8, at = pieces * group.rank / SPLIT;
  const int end = pieces * (group.rank + 1) / SPLIT;
  if (!PACKED) g += (u64)group.token * n;
  if (PACKED) bits += (u64)group.number * (n / 8);
  const int found = list_rows(rows, g, bits, group.tokens, n, at, end, s);
  if (total(found, s) > limit) {
    if (SPLIT > 1) cluster_in_step();  // all have read `found`
    if (group.rank == 0 && threadIdx.x == 0) heavy[atomicAdd(left, 1)] = group.number;
    return;
  }
  Sums sums = {};
  walk(sums, s, rows, g, wu, wd, n);
  const Group same(m, most);
  y += (u64)same.token * K;
  if (SPLIT > 1) add_up(sums, (float*)shared, y, same.tokens, same.rank);
  else
    each_piece(sums, same.tokens, [&](int token, int column, float4 a, float4 b) {
      *(uint4*)(y + (u64)token * K + column) = rounded(a, b);
    });
}
