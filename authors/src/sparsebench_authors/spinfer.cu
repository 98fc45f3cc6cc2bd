// C names for SpInfer's functions, for ctypes; built with -I CHECKOUT/csrc (spinfer.py).
// A weight [n, k] row by row is their A [M, K]; X [m, k] is their B, and Y [m, n] their C, both
// column by column.
//
// Their launch requests shared memory for 2304 of the 4096 values of a tile, but their kernel uses as
// much as the fullest tile needs: at 30 % sparsity about 2900, which ended in an illegal memory
// access. This launch requests memory for the fullest tile and is theirs otherwise.
#include "SpMM_API.cu"

// Compress a weight on the host: tiles of 64 x 64, made of 16 x 64, made of 8 x 8 with a bitmap.
extern "C" int compress(half* w, int n, int k, half** values, int** tiles, int** median,
                        uint64_t** bitmap, int* most, int* stored) {
    int* counts = nullptr;
    int global =
        InitSparseMatrixA_bitmap(w, n, k, 8, 16, 64, 8, 64, 64, values, &counts, median, tiles, bitmap, *most);
    free(counts);
    if (global < 0) return -1;
    *most = (*most + 63) / 64 * 64;  // rounded as in their benchmark
    *stored = (*tiles)[global];
    return global;
}

extern "C" void release(void* memory) { free(memory); }

// Shared memory of a block: the fullest tile's values, two tiles of X and the bitmaps; then the sums.
template <typename Tiles>
static void launch(cudaStream_t stream, half* values, int* tiles, int* median, uint64_t* bitmap, int* most, int room,
                   half* x, half* sums, int n, int m, int k, int split) {
    const int inputs = sizeof(half) * (room + 2 * Tiles::TILE_N * TILE_K) +
                       sizeof(uint64_t) * Tiles::TILE_BITMAP_M_V3 * Tiles::TILE_BITMAP_K_V3;
    const int outputs = sizeof(float) * (Tiles::TILE_M + PADDING_SHARED_MEM_FOR_C) * Tiles::TILE_N;
    const int bytes = inputs > outputs ? inputs : outputs;
    const dim3 grid((m + Tiles::TILE_N - 1) / Tiles::TILE_N, n / Tiles::TILE_M * split);
    auto kernel = SpMM_Kernel_bitmap_v3<Tiles>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<grid, WARP_SIZE * Tiles::BLOCK_WARPS, bytes, stream>>>(nullptr, values, tiles, median, bitmap, most, x,
                                                                    sums, n, m, k, split);
}

// `most` is on the device, for their kernel, and `room` is the same number.
extern "C" int multiply(cudaStream_t stream, half* values, int* tiles, int* median, uint64_t* bitmap, int* most,
                        int room, half* x, half* y, int n, int m, int k, half* parts, int split) {
    auto with_tiles = m == 8    ? launch<TilingConfigBitmapV3<4, 1, 1, 1>>
                      : m == 16 ? launch<TilingConfigBitmapV3<4, 1, 1>>
                      : m == 32 ? launch<TilingConfigBitmapV3<4, 1, 2>>
                                : launch<TilingConfigBitmapV3<4, 1, 4>>;
    with_tiles(stream, values, tiles, median, bitmap, most, room, x, split == 1 ? y : parts, n, m, k, split);
    if (split > 1) SplitK_Reduction<<<n * m / 256, WARP_SIZE, 0, stream>>>(y, parts, n, m, split);
    return cudaGetLastError();
}
