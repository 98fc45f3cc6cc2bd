// Y[m, n] = X[m, k] @ W[n, k].T in exact fp32, W in blocks of multiples of 8, without tensor cores
// (compute capability 8.0 and newer).
//
//   CTA: ROWS features of a block row x TOKENS tokens. Its WARPS warps take every WARPS-th step:
//
//         W, a block row                 X                      Y
//      +----+----+----+----+      TOKENS x DEPTH of X at
//      |    | ## |    | ## |      the step's columns       TOKENS x ROWS, a share in each warp
//      +----+----+----+----+                               added in order at the end
//       step: ROWS x DEPTH
//
//   A warp copies a step of W and of X into a ring of its own by cp.async. Lane 8 f + t multiplies
//   tokens t, t + 8, ... by features f, f + 4, ...: with 32 x 32 tiles, 12 loads of 16 bytes for
//   each 128 FMA.
//
// Rows of a tile have a pitch of DEPTH + 4 words: the 8 tokens, and the 4 features, that lanes read
// at once lie in other banks. Columns of X beyond k are zeros, and W's edge blocks are zeros there.
// Every sum has a fixed order: equal inputs give equal bits.
//
// Macros: ROWS, DEPTH (8, 16 or 32, which divide R and C), R, C (sides of a block), TOKENS=16|32,
// WARPS, STAGES, PIECE (floats of a copy of X: 4, or 1 if its rows are not aligned).

using u32 = unsigned int;

constexpr int PITCH = DEPTH + 4, TILES = R / ROWS, CUT = C / DEPTH;
constexpr int STAGE = (ROWS + TOKENS) * PITCH, RING = STAGES * STAGE;  // floats, of a warp
constexpr int OUT_PITCH = ROWS + 4;
static_assert(TOKENS * OUT_PITCH <= RING, "sums fit into the ring");

__device__ __forceinline__ void copy_16(float* to, const float* from, bool there) {
  const u32 at = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(at), "l"(from), "r"(there ? 16 : 0) : "memory");
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
  #pragma unroll (FLOATS == 4 ? 8 : 4)  // all of 4 floats; of single ones, all would spill
  for (int i = 0; i < (PIECES + 31) / 32; i++) {
    const int row = (i * 32 + lane) / ACROSS;
    if (PIECES % 32 && row >= HEIGHT) break;
    const bool there = row < rows && column < width;
    const float* piece = from + (there ? row * step + column : 0);
    float* place = to + row * PITCH + column;
    if (FLOATS == 4) copy_16(place, piece, there);
    else copy_4(place, piece, there);
  }
}

// x_step: floats between rows of X. CTAs of one tile of W and other tokens are neighbours.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 12 / WARPS)  // up to 168 registers, or 255
multiply_fp32(const float* x, long long x_step, const int* offsets, const int* columns,
              const float* values, float* y, int m, int n, int k, int token_tiles) {
  extern __shared__ char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, f = lane / 8, t = lane % 8;
  const int tile = blockIdx.x / token_tiles, token = blockIdx.x % token_tiles * TOKENS;
  const int row = tile / TILES, part = tile % TILES * ROWS;
  if (token >= m || row * R + part >= n) return;
  float* rings = (float*)shared;
  float* ring = rings + warp * RING;
  const int begin = offsets[row] * CUT + warp, end = offsets[row + 1] * CUT;
  int next = begin;
  int column = next < end ? columns[next / CUT] : 0;  // of the block to load next

  auto load = [&](int stage) {
    if (next < end) {
      float* w = ring + stage * STAGE;
      const int inner = next % CUT * DEPTH, from = column * C + inner;
      const float* block = values + ((long long)(next / CUT) * R + part) * C + inner;
      copy_tile<ROWS, 4>(w, block, C, ROWS, DEPTH);
      copy_tile<TOKENS, PIECE>(w + ROWS * PITCH, x + token * x_step + from, x_step, m - token,
                               k - from);
      next += WARPS;
      column = next < end ? columns[next / CUT] : 0;
    }
    cp_async_commit();
  };

  float sums[TOKENS / 8][ROWS / 4] = {};  // tokens t + 8 j, features f + 4 i
  #pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load(i);
  int stage = 0;
  for (int at = begin; at < end; at += WARPS) {
    load((stage + STAGES - 1) % STAGES);
    cp_async_wait<STAGES - 1>();
    __syncwarp();
    const float* w = ring + stage * STAGE + f * PITCH;
    const float* xs = ring + stage * STAGE + (ROWS + t) * PITCH;
    #pragma unroll 2
    for (int kk = 0; kk < DEPTH; kk += 4) {
      float4 a[TOKENS / 8], b[ROWS / 4];
      #pragma unroll
      for (int j = 0; j < TOKENS / 8; j++) a[j] = *(const float4*)(xs + 8 * j * PITCH + kk);
      #pragma unroll
      for (int i = 0; i < ROWS / 4; i++) b[i] = *(const float4*)(w + 4 * i * PITCH + kk);
      #pragma unroll
      for (int j = 0; j < TOKENS / 8; j++)
        #pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
          sums[j][i] += a[j].x * b[i].x;
          sums[j][i] += a[j].y * b[i].y;
          sums[j][i] += a[j].z * b[i].z;
          sums[j][i] += a[j].w * b[i].w;
        }
    }
    __syncwarp();  // all lanes have read the stage
    if (++stage == STAGES) stage = 0;
  }
  cp_async_wait<0>();
  __syncwarp();
  #pragma unroll
  for (int j = 0; j < TOKENS / 8; j++)
    #pragma unroll
    for (int i = 0; i < ROWS / 4; i++) ring[(t + 8 * j) * OUT_PITCH + f + 4 * i] = sums[j][i];
  __syncthreads();
  const int feature = row * R + part + lane;
  if (lane >= ROWS || feature >= n) return;
  for (int i = warp; i < TOKENS && token + i < m; i += WARPS) {
    float total = 0;
    #pragma unroll
    for (int p = 0; p < WARPS; p++) total += rings[p * RING + i * OUT_PITCH + lane];
    y[(long long)(token + i) * n + feature] = total;
  }
}
