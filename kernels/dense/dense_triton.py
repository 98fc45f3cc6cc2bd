"""Linear layer with dense weights in Triton: Y[m, n] = X[m, k] @ W[n, k].T.

The reference for Triton kernels of sparse formats: its gap to cuBLAS is Triton's, and what a sparse
kernel lacks beyond that is the format's. One program computes a tile of Y, `tokens` x `features`,
`depth` of k at a time. Programs run in bands of BAND tiles of tokens, so that the programs of one
time share tiles of X and W in the L2 cache:

            features
    tokens  0  4   8 ...      BAND = 4
            1  5   9
            2  6  10
            3  7  11
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats.dense import Dense
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.triton import (
    COMPILE_THREADS,
    SM_BYTES,
    BoundKernel,
    Path,
    Precision,
    box,
    choose_path,
    fitting_depth,
    options,
    precision_of,
    stages,
    unsupported,
    unsupported_alignment,
    unsupported_row,
    without_tensor_cores,
)
from sparsebench.kernels._common.tuned_table import Sizes, Tuned, choose, loads, multiprocessors
from sparsebench.kernels._kernel import Kernel, Launch, Operands

BAND = 8
TILES = 8  # that a wide search times, with several numbers of stages

# (tokens, features, depth of 16 bits, warps)
MANY_TOKENS = (
    (128, 128, 64, 4),
    (128, 128, 64, 8),
    (128, 256, 64, 8),
    (256, 128, 64, 8),
)
SOME_TOKENS = (
    (64, 32, 64, 4),
    (64, 64, 64, 4),
    (64, 128, 64, 4),
    (128, 64, 64, 4),
    (128, 128, 64, 8),
)
FP32 = ((64, 64, 32, 8), (64, 32, 32, 4), (32, 32, 32, 4))  # no tensor cores


@dataclass(frozen=True)
class Config:
    """One way to run the kernel: the tile of Y, and of k, that a program multiplies at a time."""

    tokens: int
    features: int
    depth: int
    stages: int
    warps: int
    path: Path
    precision: Precision = "ieee"


def configurations(
    m: int, itemsize: int, path: Path, precision: Precision = "ieee"
) -> list[Config]:
    """Return the configurations to time for m tokens, at most eight."""
    shapes: Iterable[tuple[int, int, int, int]]
    if without_tensor_cores(itemsize, precision):
        shapes = FP32
    elif m <= 64:
        few = max(16, triton.next_power_of_2(m))
        shapes = tuple(
            (few, features, depth, 4) for features in (16, 32, 64) for depth in (64, 128)
        )
    else:
        shapes = SOME_TOKENS if m <= 1024 else MANY_TOKENS
    return [
        Config(tokens, features, deep, in_flight, warps, path, precision)
        for tokens, features, depth, warps in shapes
        if (deep := fitting_depth(tokens, features, depth, warps, path) * 2 // itemsize)
        if (in_flight := stages(tokens, features, deep, itemsize, path, precision)) > 1
    ]


def space(sizes: Sizes, itemsize: int, path: Path, programs: int) -> list[Config]:
    """Return the configurations of a wide search: `configurations`, and TILES that load the least.

    The GPU runs `programs` at a time.
    """
    few = configurations(sizes.m, itemsize, path, precision_of(sizes.dtype))
    depths = (64, 128) if sizes.m <= 64 else (64,)
    tiles = [
        (tokens, features, deep, warps)
        for tokens, features, depth in product((16, 32, 64, 128, 256), (32, 64, 128, 256), depths)
        if tokens < 2 * sizes.m and tokens * features <= 256 * 128
        for warps in ((4,) if tokens * features <= 64 * 128 else (4, 8))
        if (deep := fitting_depth(tokens, features, depth, warps, path))
    ]

    def cost(tile: tuple[int, int, int, int]) -> float:
        grid = triton.cdiv(sizes.m, tile[0]) * triton.cdiv(sizes.n, tile[1])
        return loads(grid, programs, sizes.k, tile[0], tile[1])

    least = [] if itemsize == 4 else sorted(dict.fromkeys(tiles), key=cost)[:TILES]
    wide = [
        Config(tokens, features, depth, in_flight, warps, path)
        for tokens, features, depth, warps in least
        for in_flight in (3, 4, 6)
        if in_flight * (tokens + features) * depth * itemsize <= SM_BYTES
    ]
    return list(dict.fromkeys([*few, *wide]))


def launch(x: Tensor, w: Tensor, config: Config) -> BoundKernel:
    """Return the kernel, bound to these operands, that computes Y [m, n]."""
    (m, k), n = x.shape, len(w)
    y = x.new_empty(m, n)
    grid = (triton.cdiv(m, config.tokens) * triton.cdiv(n, config.features),)
    args = (
        box(x, config.tokens, config.depth, config.path),
        box(w, config.features, config.depth, config.path),
        box(y, config.tokens, config.features, config.path),
        *(m, n, k, x.stride(0)),
    )
    constants = constants_of(config) | options(config.warps, config.path)
    return BoundKernel(_multiply, grid, args, constants, y)


def constants_of(config: Config) -> dict[str, Any]:
    """Return the constants that the kernel is compiled with."""
    return {
        "TOKENS": config.tokens,
        "FEATURES": config.features,
        "DEPTH": config.depth,
        "BAND": BAND,
        "STAGES": config.stages,
        "TMA": config.path == "tma",
        "PRECISION": config.precision,
    }


def prepare(operands: Operands, path: Path | None = None, *, tuned: Tuned = True) -> Launch:
    """Take the configuration of a table, or the fastest of a few; `path` forces TMA or pointers."""
    x, w = operands.activations["x"], operands.weights["w"]
    assert isinstance(w, Dense)
    path = choose_path(path, _unsupported_by_tma(x, w.values), x.device)
    sizes = Sizes(len(x), *w.shape, operands.problem["dtype"])
    size = x.element_size()
    searched = (
        space(sizes, size, path, multiprocessors(x.device))
        if tuned == "wide"
        else configurations(len(x), size, path, precision_of(sizes.dtype))
    )
    configs, by = choose("dense_triton", Config, operands, sizes, tuned, searched, path=path)
    candidates = [launch(x, w.values, config) for config in configs]
    return fastest_launch(configs, candidates, by, x.device, COMPILE_THREADS)


KERNEL = Kernel("linear", "dense", "cuda", prepare, unsupported, tunes=True)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x,
    w,
    y,
    m,
    n,
    k,
    x_stride,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    token_tiles = tl.cdiv(m, TOKENS)
    band = program // (BAND * tl.cdiv(n, FEATURES))
    height = tl.minimum(BAND, token_tiles - band * BAND)
    inner = program - band * BAND * tl.cdiv(n, FEATURES)
    token = (band * BAND + inner % height) * TOKENS
    feature = inner // height * FEATURES

    # Pointers are a 64-bit scalar and 32-bit offsets within the tile: fewer registers.
    tokens = tl.arange(0, TOKENS)
    features = tl.arange(0, FEATURES)
    lanes = tl.arange(0, DEPTH)
    total = tl.zeros((TOKENS, FEATURES), tl.float32)
    for depth in tl.range(0, k, DEPTH, num_stages=STAGES):
        if TMA:
            x_tile = x.load([token, depth])
            w_tile = w.load([feature, depth])
        else:
            inside = (lanes < k - depth)[None, :]
            x_at = x + token.to(tl.int64) * x_stride + depth
            x_at += tokens[:, None] * x_stride + lanes[None, :]
            x_tile = tl.load(x_at, (tokens < m - token)[:, None] & inside, 0.0)
            w_at = w + feature.to(tl.int64) * k + depth
            w_at += features[:, None] * k + lanes[None, :]
            w_tile = tl.load(w_at, (features < n - feature)[:, None] & inside, 0.0)
        total = tl.dot(x_tile, w_tile.T, total, input_precision=PRECISION)

    if TMA:
        y.store([token, feature], total.to(y.dtype))
    else:
        y_at = y + token.to(tl.int64) * n + feature
        y_at += tokens[:, None] * n + features[None, :]
        mask = (tokens < m - token)[:, None] & (features < n - feature)[None, :]
        tl.store(y_at, total.to(y.dtype.element_ty), mask)


def _unsupported_by_tma(x: Tensor, w: Tensor) -> str | None:
    """Say why TMA cannot copy these operands, or None."""
    return unsupported_row(len(w), x.element_size()) or unsupported_alignment(x, w)
