// C names for MACKO's functions, for ctypes; built with -I CHECKOUT/src/macko_spmv/cuda (macko.py).
#include <cuda_fp16.h>

#include "cpu_compressor.cuh"
#include "kernels.cuh"

// Compress a weight [n, k] on the host: values, two deltas of 4 bits per byte, starts of rows.
extern "C" int compress(half* w, int n, int k, half** values, unsigned char** deltas, int** rows, int* padded) {
    int stored = 0;
    compress_rows_cpu(w, n, k, rows, deltas, values, &stored, padded);
    return stored;
}

extern "C" void release(void* memory) { free(memory); }

// y [n] = W x, for x [k], with a warp per row, like their launcher for torch.
extern "C" int multiply(cudaStream_t stream, half* values, unsigned char* deltas, int* rows, half* x, half* y, int n,
                        int k) {
    dim3 block(WARP_SIZE, BLOCK_SIZE);
    macko_spmv<false><<<UPDIV(n, BLOCK_SIZE), block, 0, stream>>>(values, deltas, rows, x, n, k, 1.f, 0.f, y);
    return cudaGetLastError();
}
