"""Shapes with which the tests run the kernels of the family, and configurations to emulate."""

from itertools import product

from sparsebench.kernels.bsr import bsr_small, bsr_wgmma
from sparsebench.kernels.bsr import bsr_wgrad_mma as wgrad_mma
from sparsebench.kernels.bsr import bsr_wgrad_small as wgrad_small
from tests.kernels.bsr.examples import Shape

SMALL = [bsr_small.Config(*c) for c in product(bsr_small.TOKENS, bsr_small.FEATURES)]

WGMMA = [bsr_wgmma.Config(tokens, cluster) for tokens in bsr_wgmma.TOKENS for cluster in (1, 2)]

WGRAD_MMA = [wgrad_mma.Config(32, 3, 3), wgrad_mma.Config(16, 4, 5), wgrad_mma.Config(16, 2, 8)]

WGRAD_SMALL = [
    *(wgrad_small.Config(64, 2, 7), wgrad_small.Config(32, 2, 12), wgrad_small.Config(64, 4, 12)),
    *(wgrad_small.Config(32, 4, 18), wgrad_small.Config(32, 6, 24)),
]

# For Triton's interpreter: a shape and a dtype. Blocks that tiles do not divide; whole tiles; and
# enough tokens or columns that wgrad splits tokens and cuts strips.
ODD: list[tuple[Shape, str]] = [
    *(((1, 1, 1, (8, 8), 1.0), "fp16"), ((3, 45, 53, (1, 1), 0.5), "fp16")),
    *(((17, 41, 37, (8, 8), 0.5), "fp32"), ((33, 45, 53, (10, 10), 0.5), "fp16")),
    *(((5, 70, 90, (48, 24), 0.5), "fp16"), ((17, 300, 430, (200, 200), 0.5), "fp16")),
    *(((9, 260, 258, (256, 256), 0.5), "fp16"), ((20, 90, 100, (16, 32), 0.5), "fp32")),
    *(((700, 40, 90, (8, 8), 0.5), "fp16"), ((3, 128, 64, (64, 64), 0.0), "fp16")),
]
WHOLE: list[tuple[Shape, str]] = [
    *(((20, 80, 96, (16, 16), 0.5), "fp16"), ((70, 72, 104, (16, 32), 0.5), "fp32")),
    *(((130, 144, 200, (64, 128), 0.5), "fp16"), ((66, 264, 256, (256, 64), 0.5), "fp16")),
]
WIDE: list[tuple[Shape, str]] = [
    *(((600, 128, 192, (64, 64), 0.5), "fp16"), ((20, 72, 188, (16, 64), 0.5), "fp32")),
]

SHAPES: dict[str, list[Shape]] = {
    # Full rows, so that the room for blocks ends a step; edge blocks that extend beyond W on both
    # sides; rows and columns without a block; no block at all.
    "bsr_small": [
        *((100, 320, 192, 16, 0.3), (130, 512, 256, 32, 1.0), (65, 288, 512, 16, 1.0)),
        *((300, 200, 264, 32, 0.4), (257, 328, 200, 16, 0.2), (40, 1024, 1024, 16, 0.01)),
        *((1, 1024, 512, 32, 0.05), (70, 128, 128, 32, 0.0)),
    ],
    # Every side of a step; blocks of several steps; edge blocks; rows without a block; no block;
    # blocks that no step divides, in pieces of 4, 2 and 1 columns of W and of X.
    "bsr_fp32": [
        *((32, 96, 256, 32, 0.5), (17, 64, 512, 32, 0.3), (65, 160, 192, (16, 16), 0.4)),
        *((5, 100, 76, (8, 8), 0.3), (40, 200, 260, (64, 32), 0.6)),
        *((33, 150, 132, (24, 40), 0.5), (3, 250, 300, (128, 128), 1.0)),
        *((20, 90, 71, (16, 24), 0.5), (50, 640, 320, (32, 64), 0.03)),
        *((1, 64, 64, (32, 32), 0.0), (64, 200, 300, (10, 10), 0.2), (33, 90, 98, (10, 12), 0.4)),
        *((17, 75, 71, (10, 10), 0.5), (40, 130, 132, (36, 20), 0.4), (5, 40, 37, (3, 5), 0.3)),
        *((35, 100, 66, (50, 34), 0.6), (9, 33, 20, (1, 1), 0.4)),
    ],
    "bsr_first": [(1, 100, 96, 16, 0.5), (77, 320, 192, 16, 0.3), (40, 128, 128, 16, 0.0)],
    # One slice per block row, three, two; rectangles; edge blocks; empty rows; no block.
    "bsr_wgmma": [
        *((100, 320, 192, (64, 64), 0.5), (65, 384, 576, (192, 192), 0.4)),
        *((300, 512, 256, (128, 64), 0.4), (129, 256, 512, (64, 128), 0.4)),
        *((513, 200, 264, (128, 128), 0.7), (40, 1024, 1024, (64, 64), 0.03)),
        (70, 128, 128, (64, 64), 0.0),
    ],
    # The same in fp8: blocks whose steps are 128 and 64 columns.
    "bsr_wgmma fp8": [
        *((100, 320, 192, (64, 64), 0.5), (65, 384, 576, (192, 192), 0.4)),
        *((300, 512, 256, (128, 64), 0.4), (129, 256, 512, (64, 128), 0.4)),
        *((513, 200, 272, (128, 128), 0.7), (1, 256, 768, (64, 256), 0.5)),
        *((40, 1024, 1024, (64, 64), 0.03), (70, 128, 128, (64, 64), 0.0)),
    ],
    # Full rows; edge blocks; blocks that are cut into tiles; tiles of odd multiples of 8; no block.
    "bsr_strips": [
        *((100, 320, 192, (24, 24), 0.3), (130, 200, 328, (48, 48), 1.0)),
        *((65, 288, 512, (40, 40), 0.1), (300, 200, 264, (80, 96), 0.4)),
        *((257, 1000, 1000, (40, 24), 0.2), (513, 776, 520, (56, 56), 0.15)),
        *((1, 640, 640, (64, 16), 0.05), (4, 64, 64, (24, 48), 0.0)),
        *((100, 200, 144, (12, 12), 0.3), (300, 208, 328, (20, 20), 0.2)),
        *((65, 112, 320, (10, 28), 0.4), (257, 416, 200, (104, 12), 0.3)),
        *((33, 120, 96, (52, 26), 0.5), (1, 40, 48, (20, 10), 0.0)),
    ],
    # Edge blocks; few tokens; rows without a block; no block.
    "bsr_resident": [
        *((37, 200, 320, (10, 10), 0.3), (100, 130, 72, (8, 8), 0.5), (5, 62, 48, (6, 14), 0.4)),
        *((257, 300, 512, (16, 24), 0.05), (1, 128, 256, (16, 20), 1.0)),
        (20, 100, 104, (8, 34), 0.0),
    ],
    # Few tokens, and enough to cut items; slices alone, in pairs, in threes; edge blocks, also by
    # whole tiles; empty rows and columns; no block; blocks whose tiles are smaller than 64.
    "bsr_wgrad": [
        *((1, 320, 192, (64, 64), 0.5), (1000, 512, 640, (64, 64), 0.6)),
        *((65, 384, 576, (192, 192), 0.4), (300, 512, 256, (128, 64), 0.4)),
        *((2051, 256, 512, (64, 128), 0.4), (513, 200, 264, (128, 128), 0.7)),
        *((1500, 200, 136, (128, 192), 1.0), (700, 1024, 1024, (64, 64), 0.03)),
        *((70, 128, 128, (64, 64), 0.0), (300, 200, 328, (48, 40), 0.5)),
        *((700, 520, 504, (56, 96), 0.4), (2051, 480, 400, (80, 80), 0.3)),
    ],
    # Few tokens, and enough to cut items; edge blocks, on both sides; full rows; empty rows and
    # columns, and items; no block.
    "bsr_wgrad_mma": [
        *((1, 160, 192, (16, 16), 0.5), (1000, 512, 640, (16, 16), 0.3)),
        *((513, 392, 264, (16, 16), 0.4), (1500, 200, 136, (16, 16), 1.0)),
        *((77, 24, 1000, (16, 16), 0.5), (700, 1024, 1024, (16, 16), 0.03)),
        (70, 64, 128, (16, 16), 0.0),
    ],
    # Few tokens, and enough to cut items; blocks smaller than a cell, larger, and that share no
    # cell; edge blocks, also by whole strips; empty rows and columns; no block.
    "bsr_wgrad_small": [
        *((1, 160, 192, (32, 32), 0.5), (1000, 512, 640, (32, 32), 0.3)),
        *((700, 256, 320, (16, 16), 0.2), (2051, 128, 256, (8, 8), 0.05)),
        *((300, 240, 264, (24, 24), 0.3), (513, 400, 264, (48, 48), 0.4)),
        *((65, 200, 320, (40, 80), 0.5), (130, 200, 136, (16, 32), 0.4)),
        *((1500, 200, 136, (96, 24), 1.0), (700, 1024, 1024, (32, 32), 0.03)),
        (70, 64, 128, (32, 32), 0.0),
    ],
}

LARGE: dict[str, list[Shape]] = {
    "bsr_small": [(1000, 1536, 1280, 16, 0.2)],
    "bsr_strips": [(1000, 1536, 1280, (48, 40), 0.2)],
    "bsr_wgmma": [(1000, 1536, 1280, (128, 128), 0.3)],
    "bsr_fp32": [
        *((32, 4096, 4096, 32, 0.1), (300, 2048, 1000, 16, 0.2), (1024, 1000, 1000, 10, 0.2)),
    ],
    # More items than workers, and items that are cut in either way.
    "bsr_wgrad": [
        *((4096, 1024, 1024, (64, 64), 0.3), (1030, 4096, 4096, (128, 128), 0.5)),
        *((2000, 4096, 4096, (64, 64), 0.2), (4096, 2048, 4096, (64, 64), 0.05)),
        (3000, 2080, 1920, (80, 96), 0.1),
    ],
    "bsr_wgrad_mma": [
        *((2000, 1024, 1024, (16, 16), 0.2), (4096, 512, 2048, (16, 16), 0.15)),
        *((4096, 4096, 4096, (16, 16), 0.1), (64, 10240, 10240, (16, 16), 0.065)),
    ],
    "bsr_wgrad_small": [
        *((4096, 1024, 1024, (32, 32), 0.3), (1030, 4096, 4096, (16, 16), 0.3)),
        *((2000, 2048, 4096, (48, 48), 0.1), (4096, 2048, 2048, (32, 32), 0.05)),
    ],
    "bsr_triton": [(1500, 520, 776, block, 0.3) for block in (8, 32, 128, (10, 24))],
    "bsr_triton_dgrad": [(1500, 520, 776, block, 0.3) for block in (8, 32, 128, (10, 24))],
    "bsr_triton_wgrad": [(1500, 520, 776, block, 0.3) for block in (8, 32, 128, (10, 24))],
}
"""For a GPU only."""
