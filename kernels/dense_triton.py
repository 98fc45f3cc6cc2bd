"""Linear layer with dense weights in Triton: Y[m, n] = X[m, k] @ W[n, k].T.

The yardstick of the Triton kernels: what it lacks against cuBLAS is Triton's share of the gap of a
sparse kernel, the rest is the format's. One program computes a tile of Y, `tokens` x `features`,
`depth` of k at a time. Programs run in bands of BAND tiles of tokens, so that the tiles of X and W
that run at one time stay in L2:

            features
    tokens  0  4   8 ...      BAND = 4
            1  5   9
            2  6  10
            3  7  11
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats.dense import Dense
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels._triton import (
    COMPILE_THREADS,
    Path,
    Program,
    box,
    choose_path,
    fitting_depth,
    misaligned,
    odd_row,
    options,
    stages,
    supports,
)
from sparsebench.kernels._tune import fastest

BAND = 8

# (tokens, features, depth, warps)
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
FP32 = ((64, 64, 16, 8), (64, 32, 16, 4), (32, 32, 16, 4))  # no tensor cores


@dataclass(frozen=True)
class Config:
    """One way to run the kernel: the tile of Y, and of k, that a program multiplies at a time."""

    tokens: int
    features: int
    depth: int
    stages: int
    warps: int
    path: Path


def configurations(m: int, itemsize: int, path: Path) -> list[Config]:
    """Return what is worth trying for m tokens, at most eight."""
    shapes: Iterable[tuple[int, int, int, int]]
    if itemsize == 4:
        shapes = FP32
    elif m <= 64:
        few = max(16, triton.next_power_of_2(m))
        shapes = tuple(
            (few, features, depth, 4) for features in (16, 32, 64) for depth in (64, 128)
        )
    else:
        shapes = SOME_TOKENS if m <= 1024 else MANY_TOKENS
    return [
        Config(tokens, features, deep, stages(tokens, features, deep, itemsize, path), warps, path)
        for tokens, features, depth, warps in shapes
        if (deep := fitting_depth(tokens, features, depth, warps, path))
    ]


def launch(x: Tensor, w: Tensor, config: Config) -> Program:
    """Return the program that computes Y [m, n]."""
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
    return Program(_multiply, grid, args, constants, y)


def constants_of(config: Config) -> dict[str, int]:
    """Return what the kernel is compiled for."""
    return {
        "TOKENS": config.tokens,
        "FEATURES": config.features,
        "DEPTH": config.depth,
        "BAND": BAND,
        "STAGES": config.stages,
        "TMA": config.path == "tma",
    }


def prepare(operands: Operands, path: Path | None = None) -> Launch:
    """Compile and time the configurations; `path` insists on one."""
    x, w = operands.activations["x"], operands.weights["w"]
    assert isinstance(w, Dense)
    path = choose_path(path, _obstacle(x, w.values), x.device)
    settled = operands.settled
    configs = [Config(**settled)] if settled else configurations(len(x), x.element_size(), path)
    candidates = [launch(x, w.values, config) for config in configs]
    best = fastest(candidates, x.device, COMPILE_THREADS)
    return Launch(candidates[best], asdict(configs[best]), candidates[best].code)


KERNEL = Kernel(op="linear", consumes="dense", device="cuda", supports=supports, prepare=prepare)


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
        total = tl.dot(x_tile, w_tile.T, total, input_precision="ieee")

    if TMA:
        y.store([token, feature], total.to(y.dtype))
    else:
        y_at = y + token.to(tl.int64) * n + feature
        y_at += tokens[:, None] * n + features[None, :]
        mask = (tokens < m - token)[:, None] & (features < n - feature)[None, :]
        tl.store(y_at, total.to(y.dtype.element_ty), mask)


def _obstacle(x: Tensor, w: Tensor) -> str | None:
    """Say why boxes cannot be read and written here, or None."""
    return odd_row(len(w), x.element_size()) or misaligned(x, w)
