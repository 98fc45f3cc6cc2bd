// The pieces of W's blocks, in the order in which a kernel reads them. A piece has 16 bytes, or
// fewer if blocks are not a multiple of 16 bytes wide.
//
//    source   3  0  -1  7 ...        out   piece 3 | piece 0 | zeros | piece 7 | ...
//
// A thread copies PIECES pieces that lie 256 apart, so that its loads are in flight together.
// Fewest bytes: W is read once and written once.
//
// Macro: PIECE_BYTES=16|8|4.

#if PIECE_BYTES == 16
using Piece = uint4;
#elif PIECE_BYTES == 8
using Piece = uint2;
#else
using Piece = unsigned;
#endif
constexpr int THREADS = 256, PIECES = 4;

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_pieces(const Piece* blocks, const int* source, Piece* out, int pieces) {
  const int first = blockIdx.x * (THREADS * PIECES) + threadIdx.x;
  Piece piece[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int at = first + i * THREADS, from = at < pieces ? source[at] : -1;
    piece[i] = from < 0 ? Piece{} : blocks[from];
  }
#pragma unroll
  for (int i = 0; i < PIECES; i++)
    if (first + i * THREADS < pieces) out[first + i * THREADS] = piece[i];
}
