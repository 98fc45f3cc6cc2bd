// Y[m, n] = X[m, k] @ W[n, k].T in fp32, W in blocks of 32 x 32, without tensor cores (8.0 and up).
//
//   A CTA has a block row and 32 tokens; its WARPS warps take every WARPS-th block of the row. A warp
//   copies a block and its 32 columns of X into a ring of its own by cp.async, and multiplies
//
//        32 tokens x 32 features, 4 x 8 of a lane: for 4 of k 12 loads of 16 bytes and 128 FMA
//
//   Rows have a pitch of 36 words: 8 tokens, and 4 features, that lanes read at once lie in other
//   banks. At the end the warps' sums are added in order.
//
// Macros: WARPS, STAGES.

constexpr int SIDE = 32, PITCH = 36, TILE = SIDE * PITCH;  // floats

__device__ __forceinline__ void copy_16(float* to, const float* from, bool there) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(at), "l"(from), "r"(there ? 16 : 0) : "memory");
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
multiply_fp32(const float* x, const int* offsets, const int* columns, const float* values, float* y,
              int m, int n, int k) {
  extern __shared__ float shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x;
  const int token = blockIdx.y * SIDE, feature = lane / 8, mine = lane % 8;
  float* ring = shared + warp * STAGES * 2 * TILE;
  const int end = offsets[row + 1];
  int next = offsets[row] + warp;
  int column = next < end ? columns[next] : 0;  // of the block to load next

  auto load = [&](int stage) {
    if (next < end) {
      float* w = ring + stage * 2 * TILE;
      const float* block = values + (long long)next * SIDE * SIDE;
      const float* of_x = x + (long long)column * SIDE;
      #pragma unroll
      for (int i = 0; i < 8; i++) {
        const int r = i * 4 + lane / 8, piece = lane % 8 * 4;
        copy_16(w + r * PITCH + piece, block + r * SIDE + piece, true);
        const bool there = token + r < m;
        copy_16(w + TILE + r * PITCH + piece, of_x + (there ? (long long)(token + r) * k : 0) + piece,
                there);
      }
      next += WARPS;
      column = next < end ? columns[next] : 0;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float sums[4][8] = {};  // tokens mine + 8 j, features feature + 4 i
  #pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load(i);
  int stage = 0;
  for (int at = offsets[row] + warp; at < end; at += WARPS) {
    load((stage + STAGES - 1) % STAGES);
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
    __syncwarp();
    const float* w = ring + stage * 2 * TILE + feature * PITCH;
    const float* xs = ring + stage * 2 * TILE + TILE + mine * PITCH;
    #pragma unroll 2
    for (int kk = 0; kk < SIDE; kk += 4) {
      float4 a[4], b[8];
      #pragma unroll
      for (int j = 0; j < 4; j++) a[j] = *(const float4*)(xs + 8 * j * PITCH + kk);
      #pragma unroll
      for (int i = 0; i < 8; i++) b[i] = *(const float4*)(w + 4 * i * PITCH + kk);
      #pragma unroll
      for (int j = 0; j < 4; j++)
        #pragma unroll
        for (int i = 0; i < 8; i++) {
          sums[j][i] += a[j].x * b[i].x;
          sums[j][i] += a[j].y * b[i].y;
          sums[j][i] += a[j].z * b[i].z;
          sums[j][i] += a[j].w * b[i].w;
        }
    }
    __syncwarp();  // all lanes have read the stage
    if (++stage == STAGES) stage = 0;
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
  #pragma unroll
  for (int j = 0; j < 4; j++)
    #pragma unroll
    for (int i = 0; i < 8; i++) ring[(mine + 8 * j) * PITCH + feature + 4 * i] = sums[j][i];
  __syncthreads();
  for (int t = warp; t < SIDE && token + t < m; t += WARPS) {
    float total = 0;
    #pragma unroll
    for (int p = 0; p < WARPS; p++) total += shared[p * STAGES * 2 * TILE + t * PITCH + lane];
    y[(long long)(token + t) * n + row * SIDE + lane] = total;
  }
}
