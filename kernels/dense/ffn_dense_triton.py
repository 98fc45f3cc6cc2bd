"""Gated feed-forward layer, dense, with gate and up fused: the gain of fusion without sparsity.

    H = act(X @ Wg.T) * (X @ Wu.T)      one Triton kernel: a tile of G and one of U share X's tiles,
                                        and only H is written
    Y = H @ Wd.T                        the fastest call (_gemm.py)

Three GEMMs by cuBLAS write and read G and U, m n elements each; this kernel does not. The gain of a
kernel that uses the sparsity of H is due to sparsity only as far as it exceeds this one. Tiles are
loaded and stored by TMA, so rows have a multiple of 16 bytes.
Programs run in bands of BAND token tiles, so that concurrent programs share tiles in the L2 cache:

            features
    tokens  0  4   8 ...      BAND = 4
            1  5   9
            2  6  10
            3  7  11
"""

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.requirements import HOPPER, unsupported_device
from sparsebench.kernels._common.search import search
from sparsebench.kernels._common.triton import (
    COMPILE_THREADS,
    SM_BYTES,
    BoundKernel,
    box,
    options,
    unsupported_alignment,
    unsupported_row,
)
from sparsebench.kernels._common.triton import unsupported as triton_unsupported
from sparsebench.kernels._kernel import Kernel, Launch, Operands, refuse
from sparsebench.kernels.dense._gemm import DenseProduct, fastest_way
from sparsebench.kernels.dense._layers import in_turn
from sparsebench.results.record import Problem

BAND = 8

# Timed in `prepare`: (tokens, features, depth in 16 bits, stages, warps). A program has two tiles
# of accumulators, for gate and up.
MANY_TOKENS = ((128, 128, 64, 4, 8), (128, 64, 64, 3, 4), (128, 64, 64, 4, 8), (256, 64, 64, 4, 8))
SOME_TOKENS = ((64, 32, 64, 4, 4), (64, 64, 64, 4, 4), (128, 32, 64, 4, 4), (128, 64, 64, 4, 8))
FEW_TOKENS = ((16, 64, 6, 4), (16, 128, 4, 4), (32, 64, 4, 4), (32, 128, 3, 4))  # without tokens
IN_FP32 = ((32, 32, 32, 3, 4), (64, 32, 32, 3, 4), (64, 64, 32, 3, 8))


@dataclass(frozen=True)
class Config:
    """One way to run the kernel: the tile of H, and of k, that a program multiplies at a time."""

    tokens: int
    features: int
    depth: int
    stages: int
    warps: int


def configurations(m: int, itemsize: int) -> list[Config]:
    few = max(16, triton.next_power_of_2(m))
    shapes: tuple[tuple[int, int, int, int, int], ...]
    if itemsize == 4:
        shapes = IN_FP32
    elif m <= 64:
        shapes = tuple((few, *shape) for shape in FEW_TOKENS)
    else:
        shapes = SOME_TOKENS if m <= 1024 else MANY_TOKENS
    configs = [Config(*shape) for shape in shapes]
    return [c for c in configs if _stage_bytes(c, itemsize) * c.stages <= SM_BYTES]


def _stage_bytes(config: Config, itemsize: int) -> int:
    return (config.tokens + 2 * config.features) * config.depth * itemsize


def launch(x: Tensor, wg: Tensor, wu: Tensor, config: Config, activation: str) -> BoundKernel:
    (m, k), n = x.shape, len(wg)
    h = x.new_empty(m, n)
    grid = (triton.cdiv(m, config.tokens) * triton.cdiv(n, config.features),)
    args = (
        box(x, config.tokens, config.depth, "tma"),
        box(wg, config.features, config.depth, "tma"),
        box(wu, config.features, config.depth, "tma"),
        box(h, config.tokens, config.features, "tma"),
        *(m, n, k),
    )
    constants = {
        "TOKENS": config.tokens,
        "FEATURES": config.features,
        "DEPTH": config.depth,
        "BAND": BAND,
        "STAGES": config.stages,
        "ACTIVATION": activation,
    }
    compiled_with = constants | options(config.warps, "tma")
    return BoundKernel(_gate_and_up, grid, args, compiled_with, h)


def prepare(operands: Operands) -> Launch:
    """Time a few configurations, and the calls of the last product."""
    x = operands.activations["x"]
    wg, wu = (operands.weights[name].to_dense() for name in ("wg", "wu"))
    refuse(unsupported_row(len(wg), x.element_size()) or unsupported_alignment(x, wg, wu))
    configs = configurations(len(x), x.element_size())
    pinned = operands.pinned
    if pinned:
        configs = [Config(**{name: pinned[name] for name in asdict(configs[0])})]
    activation = operands.problem["activation"]
    candidates = [launch(x, wg, wu, config, activation) for config in configs]
    best = search(candidates, x.device, COMPILE_THREADS).best
    hidden, y = candidates[best], torch.empty_like(x)
    wd = operands.weights["wd"].to_dense().t()
    down = fastest_way(DenseProduct(hidden.out, wd, y), pinned and pinned.get("down", pinned))
    run = in_turn(hidden, down)
    return Launch(run, {**asdict(configs[best]), "down": down.choice}, hidden.code)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run the problem here, or None."""
    return triton_unsupported(problem, device) or unsupported_device(device, HOPPER, newer=True)


KERNEL = Kernel("ffn", "dense", "cuda", prepare, unsupported)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_and_up(  # type: ignore[no-untyped-def]
    x,
    wg,
    wu,
    h,
    m,
    n,
    k,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    program = tl.program_id(0)
    token_tiles = tl.cdiv(m, TOKENS)
    band = program // (BAND * tl.cdiv(n, FEATURES))
    height = tl.minimum(BAND, token_tiles - band * BAND)
    inner = program - band * BAND * tl.cdiv(n, FEATURES)
    token = (band * BAND + inner % height) * TOKENS
    feature = inner // height * FEATURES

    gate = tl.zeros((TOKENS, FEATURES), tl.float32)
    up = tl.zeros((TOKENS, FEATURES), tl.float32)
    for depth in tl.range(0, k, DEPTH, num_stages=STAGES):
        x_tile = x.load([token, depth])
        g_tile = wg.load([feature, depth])
        u_tile = wu.load([feature, depth])
        gate = tl.dot(x_tile, g_tile.T, gate, input_precision="ieee")
        up = tl.dot(x_tile, u_tile.T, up, input_precision="ieee")

    if ACTIVATION == "silu":
        gate = gate / (1 + tl.exp(-gate))
    else:
        gate = tl.where(gate <= 0, 0.0, gate)  # NaN stays
        if ACTIVATION == "relu2":
            gate = gate * gate
    hidden = gate * up
    h.store([token, feature], hidden.to(h.dtype))
