"""Configurations and shapes with which the tests run each CUDA kernel of the family."""

from itertools import product
from typing import Any

from sparsebench.kernels.bsr import bsr_resident, bsr_small, bsr_strips, bsr_wgmma
from sparsebench.kernels.bsr import bsr_wgrad as wgrad
from sparsebench.kernels.bsr import bsr_wgrad_mma as wgrad_mma
from sparsebench.kernels.bsr import bsr_wgrad_small as wgrad_small
from tests.kernels.bsr.examples import Shape


def name_of(module: Any) -> str:
    return str(module.__name__.rpartition(".")[2])


SMALL = [bsr_small.Config(*c) for c in product(bsr_small.TOKENS, bsr_small.FEATURES)]

WGMMA = [bsr_wgmma.Config(tokens, cluster) for tokens in bsr_wgmma.TOKENS for cluster in (1, 2)]

# Few rows and many, one warpgroup; every number of strips in a step; then aligned strips.
STRIPS = [
    *(bsr_strips.Config(128, 2, 2), bsr_strips.Config(64, 1, 1)),
    *(bsr_strips.Config(64, 3, 2), bsr_strips.Config(256, 1, 2)),
    *(bsr_strips.Config(128, 2, 2, 2), bsr_strips.Config(64, 1, 1, 2)),
    *(bsr_strips.Config(64, 3, 2, 2), bsr_strips.Config(256, 1, 2, 2)),
]

RESIDENT = [
    *(bsr_resident.Config(16, 4), bsr_resident.Config(32, 8), bsr_resident.Config(48, 4)),
    *(bsr_resident.Config(112, 16), bsr_resident.Config(16, 8, 2)),
    *(bsr_resident.Config(16, 16, 4), bsr_resident.Config(32, 4, 4)),
]

WGRAD = [*wgrad.CONFIGS]

WGRAD_MMA = [wgrad_mma.Config(32, 3, 3), wgrad_mma.Config(16, 4, 5), wgrad_mma.Config(16, 2, 8)]

WGRAD_SMALL = [
    *(wgrad_small.Config(64, 2, 7), wgrad_small.Config(32, 2, 12), wgrad_small.Config(64, 4, 12)),
    *(wgrad_small.Config(32, 4, 18), wgrad_small.Config(32, 6, 24)),
]

SHAPES: dict[str, list[Shape]] = {
    # Full rows, so that the room for blocks ends a step; edge blocks that extend beyond W on both
    # sides; rows and columns without a block; no block at all.
    "bsr_small": [
        (100, 320, 192, 16, 0.3),
        (130, 512, 256, 32, 1.0),
        (65, 288, 512, 16, 1.0),
        (300, 200, 264, 32, 0.4),
        (257, 328, 200, 16, 0.2),
        (40, 1024, 1024, 16, 0.01),
        (1, 1024, 512, 32, 0.05),
        (70, 128, 128, 32, 0.0),
    ],
    # One slice per block row, three, two; rectangles; edge blocks; empty rows; no block.
    "bsr_wgmma": [
        (100, 320, 192, (64, 64), 0.5),
        (65, 384, 576, (192, 192), 0.4),
        (300, 512, 256, (128, 64), 0.4),
        (129, 256, 512, (64, 128), 0.4),
        (513, 200, 264, (128, 128), 0.7),
        (40, 1024, 1024, (64, 64), 0.03),
        (70, 128, 128, (64, 64), 0.0),
    ],
    # The same in fp8: blocks whose steps are 128 and 64 columns.
    "bsr_wgmma fp8": [
        (100, 320, 192, (64, 64), 0.5),
        (65, 384, 576, (192, 192), 0.4),
        (300, 512, 256, (128, 64), 0.4),
        (129, 256, 512, (64, 128), 0.4),
        (513, 200, 272, (128, 128), 0.7),
        (1, 256, 768, (64, 256), 0.5),
        (40, 1024, 1024, (64, 64), 0.03),
        (70, 128, 128, (64, 64), 0.0),
    ],
    # Full rows; edge blocks; blocks that are cut into tiles; tiles of odd multiples of 8; no block.
    "bsr_strips": [
        (100, 320, 192, (24, 24), 0.3),
        (130, 200, 328, (48, 48), 1.0),
        (65, 288, 512, (40, 40), 0.1),
        (300, 200, 264, (80, 96), 0.4),
        (257, 1000, 1000, (40, 24), 0.2),
        (513, 776, 520, (56, 56), 0.15),
        (1, 640, 640, (64, 16), 0.05),
        (4, 64, 64, (24, 48), 0.0),
        (100, 200, 144, (12, 12), 0.3),
        (300, 208, 328, (20, 20), 0.2),
        (65, 112, 320, (10, 28), 0.4),
        (257, 416, 200, (104, 12), 0.3),
        (33, 120, 96, (52, 26), 0.5),
        (1, 40, 48, (20, 10), 0.0),
    ],
    # Edge blocks; few tokens; rows without a block; no block.
    "bsr_resident": [
        (37, 200, 320, (10, 10), 0.3),
        (100, 130, 72, (8, 8), 0.5),
        (5, 62, 48, (6, 14), 0.4),
        (257, 300, 512, (16, 24), 0.05),
        (1, 128, 256, (16, 20), 1.0),
        (20, 100, 104, (8, 34), 0.0),
    ],
    # Few tokens, and enough to cut items; slices alone, in pairs, in threes; edge blocks, also by
    # whole tiles; empty rows and columns; no block; blocks whose tiles are smaller than 64.
    "bsr_wgrad": [
        (1, 320, 192, (64, 64), 0.5),
        (1000, 512, 640, (64, 64), 0.6),
        (65, 384, 576, (192, 192), 0.4),
        (300, 512, 256, (128, 64), 0.4),
        (2051, 256, 512, (64, 128), 0.4),
        (513, 200, 264, (128, 128), 0.7),
        (1500, 200, 136, (128, 192), 1.0),
        (700, 1024, 1024, (64, 64), 0.03),
        (70, 128, 128, (64, 64), 0.0),
        (300, 200, 328, (48, 40), 0.5),
        (700, 520, 504, (56, 96), 0.4),
        (2051, 480, 400, (80, 80), 0.3),
    ],
    # Few tokens, and enough to cut items; edge blocks, on both sides; full rows; empty rows and
    # columns, and items; no block.
    "bsr_wgrad_mma": [
        (1, 160, 192, (16, 16), 0.5),
        (1000, 512, 640, (16, 16), 0.3),
        (513, 392, 264, (16, 16), 0.4),
        (1500, 200, 136, (16, 16), 1.0),
        (77, 24, 1000, (16, 16), 0.5),
        (700, 1024, 1024, (16, 16), 0.03),
        (70, 64, 128, (16, 16), 0.0),
    ],
    # Few tokens, and enough to cut items; blocks smaller than a cell, larger, and that share no
    # cell; edge blocks, also by whole strips; empty rows and columns; no block.
    "bsr_wgrad_small": [
        (1, 160, 192, (32, 32), 0.5),
        (1000, 512, 640, (32, 32), 0.3),
        (700, 256, 320, (16, 16), 0.2),
        (2051, 128, 256, (8, 8), 0.05),
        (300, 240, 264, (24, 24), 0.3),
        (513, 400, 264, (48, 48), 0.4),
        (65, 200, 320, (40, 80), 0.5),
        (130, 200, 136, (16, 32), 0.4),
        (1500, 200, 136, (96, 24), 1.0),
        (700, 1024, 1024, (32, 32), 0.03),
        (70, 64, 128, (32, 32), 0.0),
    ],
}
