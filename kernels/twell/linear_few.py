"""Linear layer of sparse inputs for up to 4 tokens: reads the columns of W whose input is not zero.

    Y = X @ W.T = sum over i with x[:, i] != 0 of x[:, i] (W.T)[i, :]

    W.T [k, n]   FEATURES
               +----+----+      a program adds up the rows of its tile of W.T whose input is not
        DEPTH  | p0 | p1 |      zero for any token; the other rows are not read, because their
               +----+----+      loads are masked
               | p2 | p3 |      k is in PARTS; the last program of a column of tiles adds up the
               +----+----+      sums of the others

`prepare` copies W.T, and times tiles and parts. Sums are in fp32. Tokens share rows only by chance:
if a share a of the inputs is not zero, m tokens read 1 - (1 - a)^m of the rows.
Source: Liu et al., TEAL, arXiv:2408.14690, section 4.2, whose kernel multiplies one token so.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.triton import COMPILE_THREADS, BoundKernel
from sparsebench.kernels._common.triton import unsupported as triton_unsupported
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem

MOST_TOKENS = 4
PROGRAMS = 256, 4096  # fewest and most, for which candidates are timed
PRODUCTS = 32, 64  # fewest and most of a tile for each thread; its registers hold no more


@dataclass(frozen=True)
class Config:
    """A tile of W.T, the parts of k, and the warps of a program."""

    features: int
    depth: int
    parts: int
    warps: int


def configurations(m: int, n: int, k: int) -> list[Config]:
    """Return the configurations to time, at least one."""
    shapes = product((64, 128, 256), (16, 32, 64), (2, 4, 8, 16, 32, 64), (2, 4, 8))
    fewest, most = PRODUCTS
    every = [Config(*shape) for shape in shapes if fewest <= _products(m, *shape) <= most]
    fitting = [c for c in every if PROGRAMS[0] <= _programs(c, n) <= PROGRAMS[1]]
    return [c for c in fitting if c.parts * c.depth <= k] or [Config(64, 16, 1, 4)]


def _products(m: int, features: int, depth: int, parts: int, warps: int) -> int:
    return int(triton.next_power_of_2(m)) * features * depth // (32 * warps)


def _programs(config: Config, n: int) -> int:
    return int(triton.cdiv(n, config.features)) * config.parts


def launch(x: Tensor, w_t: Tensor, config: Config) -> BoundKernel:
    """Return the kernel of Y [m, n], bound to X [m, k] and W.T [k, n]."""
    (m, k), n = x.shape, w_t.shape[1]
    y, tiles = x.new_empty(m, n), triton.cdiv(n, config.features)
    sums = x.new_empty(config.parts if config.parts > 1 else 0, m, n, dtype=torch.float32)
    done = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    args = x, w_t, y, sums, done, n, k, triton.cdiv(k, config.parts), x.stride(0)
    return BoundKernel(_columns, (tiles, config.parts), args, constants_of(config, m), y)


def constants_of(config: Config, m: int) -> dict[str, Any]:
    """Return the constants of the kernel."""
    return {
        "TOKENS": m,
        "ROWS": triton.next_power_of_2(m),
        "FEATURES": config.features,
        "DEPTH": config.depth,
        "PARTS": config.parts,
        "num_warps": config.warps,
    }


def prepare(operands: Operands) -> Launch:
    """Copy W.T, and choose the fastest configuration."""
    w_t, x = operands.weights["w"].to_dense().t().contiguous(), operands.activations["x"]
    configs = configurations(len(x), w_t.shape[1], len(w_t))
    if pinned := operands.pinned:
        configs = [Config(**{name: pinned[name] for name in asdict(configs[0])})]
    candidates = [launch(x, w_t, config) for config in configs]
    by: Mapping[str, Any] = {}
    return fastest_launch(configs, candidates, by, x.device, COMPILE_THREADS)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run the problem on the device, or None."""
    if problem["m"] > MOST_TOKENS:
        return f"expected at most {MOST_TOKENS} tokens, found {problem['m']}"
    return triton_unsupported(problem, device)


KERNEL = Kernel("linear_active", "cvse", "cuda", prepare, unsupported)


@triton.jit  # type: ignore[untyped-decorator]
def _columns(  # type: ignore[no-untyped-def]
    x,
    w_t,
    y,
    sums,
    done,
    n,
    k,
    part_depth,
    x_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    token, lane = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    feature = tile * FEATURES + tl.arange(0, FEATURES)
    end = tl.minimum((part + 1) * part_depth, k)
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    for start in tl.range(part * part_depth, end, DEPTH):
        i = start + lane
        inside = (token < TOKENS)[:, None] & (i < end)[None, :]
        inputs = tl.load(x + token[:, None] * x_stride + i[None, :], inside, 0.0)
        active = tl.max((inputs != 0).to(tl.int32), 0) > 0
        at = w_t + i[:, None].to(tl.int64) * n + feature[None, :]
        rows = tl.load(at, active[:, None] & (feature < n)[None, :], 0.0)
        products = inputs.to(tl.float32)[:, :, None] * rows.to(tl.float32)[None, :, :]
        total += tl.sum(products, 1)

    inside = (token < TOKENS)[:, None] & (feature < n)[None, :]
    place = token[:, None] * n + feature[None, :]
    if PARTS == 1:
        tl.store(y + place, total.to(y.dtype.element_ty), inside)
    else:
        tl.store(sums + part * TOKENS * n + place, total, inside)
        tl.debug_barrier()  # all sums of this program come before its count
        before = tl.atomic_add(done + tile, 1, sem="acq_rel")
        if before == PARTS - 1:
            whole = tl.zeros((ROWS, FEATURES), tl.float32)
            for other in tl.range(0, PARTS):
                whole += tl.load(
                    sums + other * TOKENS * n + place, inside, 0.0, cache_modifier=".cg"
                )
            tl.store(y + place, whole.to(y.dtype.element_ty), inside)
            tl.store(done + tile, 0)  # for the next launch
