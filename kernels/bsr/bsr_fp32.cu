// Y[m, n] = X[m, k] @ W[n, k].T in exact fp32, W in blocks of any size (compute capability 8.0 and
// newer). The products are fp32 FMAs. Hopper's tensor cores multiply fp64 at the same rate,
// so there (DOUBLE=1) a step of fp32 values is converted, sums are in fp64, and Y is rounded once.
//
//   CTA: ROWS features of a block row x TOKENS tokens. Its WARPS warps take every WARPS-th step:
//
//         W, a block row                 X                      Y
//      +----+----+----+----+      TOKENS x DEPTH of X at
//      |    | ## |    | ## |      the step's columns       TOKENS x ROWS, a share in each warp
//      +----+----+----+----+                               added in order at the end
//       step: ROWS x DEPTH
//
//   A warp copies a step of W and of X into a ring of its own by cp.async. With FMA, lane 8 f + t
//   multiplies tokens t, t + 8, ... by features f, f + 4, ...: with 32 x 32 tiles, 12 loads of 16
//   bytes for each 128 FMA, which take 384 clocks of an SM where FMA take 256. With mma a step has
//   16 loads, 64 clocks.
//
// The rows that lanes read at once must lie in different banks. With mma, these are two rows, so
// the halves of odd rows of 128 bytes are swapped. With FMA, these are 8 tokens and 4 features, so
// rows of a tile have a pitch of DEPTH + 4 words. Columns of X beyond k are zeros, and W's edge
// blocks are zeros there. Every sum has a fixed order: equal inputs give equal bits.
//
// If ROWS or DEPTH does not divide a block, the last step of a block extends beyond it. There the
// copies write zeros instead of W and of X, so a NaN of X beside a block does not reach it:
//
//      R = C = 10:     0 . . . . . . . . 9 | 6 columns of zeros      a step of 16 x 16
//
// Macros: ROWS, DEPTH (8, 16 or 32), R, C (sides of a block), TOKENS=16|32, WARPS, STAGES,
// DOUBLE=0|1, W_PIECE, X_PIECE (floats of a copy, 4, 2 or 1, which divide C; X_PIECE divides k).

using u32 = unsigned int;

#if DOUBLE
using Sum = double;
constexpr int PITCH = DEPTH, SWIZZLE = DEPTH == 32 ? 16 : 0, OUT_PITCH = ROWS + 8, COPIES = 4;
#else
using Sum = float;
constexpr int PITCH = DEPTH + 4, SWIZZLE = 0, OUT_PITCH = ROWS + 4, COPIES = 8;
#endif
constexpr int TILES = (R + ROWS - 1) / ROWS, CUT = (C + DEPTH - 1) / DEPTH;
constexpr bool LOW = R % ROWS != 0, NARROW = C % DEPTH != 0;  // the last step of a block
constexpr int STAGE = (ROWS + TOKENS) * PITCH;                // floats
constexpr int RING = STAGES * (ROWS + TOKENS) * (DEPTH + 4);  // floats of a warp
static_assert(TOKENS * OUT_PITCH * sizeof(Sum) <= RING * sizeof(float), "sums fit into the ring");

__device__ __forceinline__ void copy_16(float* to, const float* from, bool there) {
  const u32 at = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(at), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_8(float* to, const float* from, bool there) {
  const u32 at = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
               :: "r"(at), "l"(from), "r"(there ? 8 : 0) : "memory");
}
__device__ __forceinline__ void copy_4(float* to, const float* from, bool there) {
  const u32 at = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :: "r"(at), "l"(from), "r"(there ? 4 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}

// Copy HEIGHT x DEPTH floats by a warp; zeros from row `rows` and from column `width` on.
template <int HEIGHT, int FLOATS>
__device__ __forceinline__ void copy_tile(float* to, const float* from, long long step, int rows,
                                          int width) {
  constexpr int ACROSS = DEPTH / FLOATS, PIECES = HEIGHT * ACROSS;
  const int lane = threadIdx.x % 32, column = lane % ACROSS * FLOATS;
  #pragma unroll (FLOATS == 4 ? COPIES : 4)  // of single floats, all would spill
  for (int i = 0; i < (PIECES + 31) / 32; i++) {
    const int row = (i * 32 + lane) / ACROSS;
    if (PIECES % 32 && row >= HEIGHT) break;
    const bool there = row < rows && column < width;
    const float* piece = from + (there ? row * step + column : 0);
    float* place = to + row * PITCH + (column ^ row % 2 * SWIZZLE);
    if (FLOATS == 4) copy_16(place, piece, there);
    else if (FLOATS == 2) copy_8(place, piece, there);
    else copy_4(place, piece, there);
  }
}

struct alignas(16) BlockRow { int row, begin, end, unused; };  // its blocks: begin to end - 1

// ---- sums of a warp ----

#if DOUBLE
__device__ __forceinline__ void mma_m16n8k16(double (&d)[4], const double (&a)[8],
                                             const double (&b)[4]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
               : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
               : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]),
                 "d"(a[7]), "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}

// Lane 4 g + q has tokens 16 i + g and + 8, features 8 j + 2 q and + 1. The sum over 16 columns is
// the same in any order: lane q takes columns 4 q to 4 q + 3, which are 16 bytes.
struct Sums {
  double d[TOKENS / 16][ROWS / 8][4] = {};

  __device__ __forceinline__ void multiply(const float* w, const float* x, int lane) {
    const int g = lane / 4, turn = g % 2 * SWIZZLE;
    #pragma unroll 1
    for (int kk = 0; kk < DEPTH; kk += 16) {
      const int at = g * PITCH + (kk + lane % 4 * 4 ^ turn);
      double b[ROWS / 8][4];
      #pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
        const float4 v = *(const float4*)(w + 8 * j * PITCH + at);
        b[j][0] = v.x, b[j][1] = v.y, b[j][2] = v.z, b[j][3] = v.w;
      }
      #pragma unroll
      for (int i = 0; i < TOKENS / 16; i++) {
        const float4 u = *(const float4*)(x + 16 * i * PITCH + at);
        const float4 v = *(const float4*)(x + (16 * i + 8) * PITCH + at);
        const double a[8] = {u.x, v.x, u.y, v.y, u.z, v.z, u.w, v.w};
        #pragma unroll
        for (int j = 0; j < ROWS / 8; j++) mma_m16n8k16(d[i][j], a, b[j]);
      }
    }
  }
  __device__ __forceinline__ void store(double* to, int lane) const {
    #pragma unroll
    for (int i = 0; i < TOKENS / 8; i++)
      #pragma unroll
      for (int j = 0; j < ROWS / 8; j++)
        *(double2*)(to + (8 * i + lane / 4) * OUT_PITCH + 8 * j + lane % 4 * 2) =
            {d[i / 2][j][i % 2 * 2], d[i / 2][j][i % 2 * 2 + 1]};
  }
};
#else
struct Sums {
  float d[TOKENS / 8][ROWS / 4] = {};  // lane 8 f + t: tokens t + 8 j, features f + 4 i

  __device__ __forceinline__ void multiply(const float* w, const float* x, int lane) {
    w += lane / 8 * PITCH, x += lane % 8 * PITCH;
    #pragma unroll 2
    for (int kk = 0; kk < DEPTH; kk += 4) {
      float4 a[TOKENS / 8], b[ROWS / 4];
      #pragma unroll
      for (int j = 0; j < TOKENS / 8; j++) a[j] = *(const float4*)(x + 8 * j * PITCH + kk);
      #pragma unroll
      for (int i = 0; i < ROWS / 4; i++) b[i] = *(const float4*)(w + 4 * i * PITCH + kk);
      #pragma unroll
      for (int j = 0; j < TOKENS / 8; j++)
        #pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
          d[j][i] += a[j].x * b[i].x;
          d[j][i] += a[j].y * b[i].y;
          d[j][i] += a[j].z * b[i].z;
          d[j][i] += a[j].w * b[i].w;
        }
    }
  }
  __device__ __forceinline__ void store(float* to, int lane) const {
    #pragma unroll
    for (int j = 0; j < TOKENS / 8; j++)
      #pragma unroll
      for (int i = 0; i < ROWS / 4; i++)
        to[(lane % 8 + 8 * j) * OUT_PITCH + lane / 8 + 4 * i] = d[j][i];
  }
};
#endif

// x_step: floats between rows of X. CTAs of one tile of W and other tokens are neighbours.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 12 / WARPS)  // up to 168 registers, or 255
multiply_fp32(const float* x, long long x_step, const BlockRow* rows, const int* columns,
              const float* values, float* y, int m, int n, int k, int token_tiles) {
  extern __shared__ char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile = blockIdx.x / token_tiles, token = blockIdx.x % token_tiles * TOKENS;
  const BlockRow listed = rows[tile / TILES];
  const int row = listed.row, part = tile % TILES * ROWS;
  if (token >= m || row * R + part >= n) return;
  float* rings = (float*)shared;
  float* ring = rings + warp * RING;
  const int begin = listed.begin * CUT + warp, end = listed.end * CUT;
  int next = begin;
  int column = next < end ? columns[next / CUT] : 0;  // of the block to load next

  auto load = [&](int stage) {
    if (next < end) {
      float* w = ring + stage * STAGE;
      const int inner = next % CUT * DEPTH, from = column * C + inner;
      const float* block = values + ((long long)(next / CUT) * R + part) * C + inner;
      const int width = NARROW ? min(DEPTH, C - inner) : DEPTH;
      copy_tile<ROWS, W_PIECE>(w, block, C, LOW ? min(ROWS, R - part) : ROWS, width);
      copy_tile<TOKENS, X_PIECE>(w + ROWS * PITCH, x + token * x_step + from, x_step, m - token,
                                 NARROW ? min(width, k - from) : k - from);
      next += WARPS;
      column = next < end ? columns[next / CUT] : 0;
    }
    cp_async_commit();
  };

  Sums sums;
  #pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load(i);
  int stage = 0;
  for (int at = begin; at < end; at += WARPS) {
    load((stage + STAGES - 1) % STAGES);
    cp_async_wait<STAGES - 1>();
    __syncwarp();
    const float* w = ring + stage * STAGE;
    sums.multiply(w, w + ROWS * PITCH, lane);
    __syncwarp();  // all lanes have read the stage
    if (++stage == STAGES) stage = 0;
  }
  cp_async_wait<0>();
  __syncwarp();
  sums.store((Sum*)ring, lane);
  __syncthreads();
  const int feature = row * R + part + lane;
  if (lane >= ROWS || (LOW && part + lane >= R) || feature >= n) return;
  for (int i = warp; i < TOKENS && token + i < m; i += WARPS) {
    Sum total = 0;
    #pragma unroll
    for (int p = 0; p < WARPS; p++) total += ((Sum*)(rings + p * RING))[i * OUT_PITCH + lane];
    y[(long long)(token + i) * n + feature] = (float)total;
  }
}
