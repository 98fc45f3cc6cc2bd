// SpInfer's own functions under C names, for ctypes: built with -I CHECKOUT/csrc (spinfer.py).
// A weight [n, k] row by row is their A [M, K]; X [m, k] is their B, and Y [m, n] their C, both
// column by column.
#include "SpMM_API.cu"

// Compress a weight on the host. Tiles of 64 x 64, of 16 x 64 in them, and of 8 x 8 with a bitmap.
extern "C" int compress(half* w, int n, int k, half** values, int** tiles, int** median,
                        uint64_t** bitmap, int* most, int* stored) {
    int* counts = nullptr;
    int global =
        InitSparseMatrixA_bitmap(w, n, k, 8, 16, 64, 8, 64, 64, values, &counts, median, tiles, bitmap, *most);
    free(counts);
    if (global < 0) return -1;
    *most = (*most + 63) / 64 * 64;  // as their benchmark rounds it
    *stored = (*tiles)[global];
    return global;
}

extern "C" void release(void* memory) { free(memory); }

extern "C" int multiply(cudaStream_t stream, half* values, int* tiles, int* median, uint64_t* bitmap,
                        int* most, half* x, half* y, int n, int m, int k, half* workspace, int split) {
    return SpMM_SplitK_API_bitmap_v3(stream, nullptr, values, tiles, median, bitmap, most, x, y, n, m, k, workspace,
                                     split);
}
