// The pieces of 16 bytes of W's blocks, in the order in which a kernel reads them.
//
//    source   3  0  -1  7 ...        out   piece 3 | piece 0 | zeros | piece 7 | ...
//
// A thread copies PIECES pieces that lie 256 apart, so that its loads are in flight together.
// Fewest bytes: W is read once and written once.

constexpr int THREADS = 256, PIECES = 4;

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_pieces(const uint4* blocks, const int* source, uint4* out, int pieces) {
  const int first = blockIdx.x * (THREADS * PIECES) + threadIdx.x;
  uint4 piece[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int at = first + i * THREADS, from = at < pieces ? source[at] : -1;
    piece[i] = from < 0 ? make_uint4(0, 0, 0, 0) : blocks[from];
  }
#pragma unroll
  for (int i = 0; i < PIECES; i++)
    if (first + i * THREADS < pieces) out[first + i * THREADS] = piece[i];
}
