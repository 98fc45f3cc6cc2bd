"""Linear layer of sparse inputs for up to 4 tokens: reads the columns of W whose input is not zero.

    Y = X @ W.T = sum over i with x[:, i] != 0 of x[:, i] (W.T)[i, :]

    W.T [k, n]   FEATURES
               +----+----+      a program adds up the rows of its tile of W.T whose input is not
        DEPTH  | p0 | p1 |      zero for any token; the other rows are not read, because their
               +----+----+      loads are masked
               | p2 | p3 |      k is in PARTS; the last program of a column of tiles adds up the
               +----+----+      sums of the others

The weight is read as a copy of W.T. Sums are in fp32. Tokens share rows only by chance: if a share
a of the inputs is not zero, m tokens read 1 - (1 - a)^m of the rows.
Source: Liu et al., TEAL, arXiv:2408.14690, section 4.2, whose kernel multiplies one token so.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.operator import Engine, Operator, OperatorCall
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.scratch import counters
from sparsebench.kernels._common.triton import BoundKernel, product_of
from sparsebench.kernels._common.triton import unsupported as triton_unsupported
from sparsebench.kernels._kernel import Operands
from sparsebench.results.record import Problem

MOST_TOKENS = 4
MOST_PRODUCTS = 64  # of a tile for each thread; its registers hold no more


@dataclass(frozen=True)
class Config:
    """A tile of W.T, the parts of k, and the warps of a program."""

    features: int
    depth: int
    parts: int
    warps: int


# The fastest in each published cell of linear-active (H200), then one for a small k.
CONFIGS = (
    *(Config(256, 16, 32, 2), Config(256, 32, 32, 4), Config(128, 32, 32, 4)),
    *(Config(128, 16, 64, 2), Config(128, 32, 16, 2), Config(64, 64, 16, 2)),
    *(Config(64, 16, 16, 2), Config(128, 16, 16, 4), Config(64, 16, 1, 4)),
)


class ActiveCall(NamedTuple):
    """A product of m tokens with W [n, k]."""

    m: int
    n: int
    k: int
    dtype: torch.dtype


def choices(device: torch.device, call: ActiveCall) -> list[Config]:
    """Return the configurations to time, at least one."""
    rows, last = triton.next_power_of_2(call.m), CONFIGS[-1]
    products = {c: rows * c.features * c.depth // (32 * c.warps) for c in CONFIGS}
    fitting = [c for c in CONFIGS if products[c] <= MOST_PRODUCTS and c.parts * c.depth <= call.k]
    return fitting or [last]


def bound(x: Tensor, w_t: Tensor, done: Tensor, config: Config) -> BoundKernel:
    """Return the kernel of Y [m, n] of X [m, k] and W.T [k, n].

    done  int32, at least one for each tile of features; zeros, which the kernel sets back
    """
    (m, k), n = x.shape, w_t.shape[1]
    y, tiles = x.new_empty(m, n), triton.cdiv(n, config.features)
    sums = x.new_empty(config.parts if config.parts > 1 else 0, m, n, dtype=torch.float32)
    args = x, w_t, done, y, sums, n, k, triton.cdiv(k, config.parts), x.stride(0)
    constants = {"TOKENS": m, "ROWS": triton.next_power_of_2(m), "FEATURES": config.features}
    constants |= {"DEPTH": config.depth, "PARTS": config.parts, "num_warps": config.warps}
    return BoundKernel(_columns, (tiles, config.parts), args, constants, y)


def plan(device: torch.device, call: ActiveCall, config: Config) -> Product:
    """Compile for the sizes; run(x, w_t, out=None)."""
    (m, n, k, dtype), tiles = call, triton.cdiv(call.n, config.features)
    x, w_t = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((m, k), (k, n)))
    done = torch.empty(tiles, dtype=torch.int32, device="meta")

    def kernel(x: Tensor, w_t: Tensor, done: Tensor) -> BoundKernel:
        return bound(x, w_t, done, config)

    product = product_of(kernel, (x, w_t, done), device)

    def run(x: Tensor, w_t: Tensor, out: Tensor | None = None) -> Tensor:
        zeros = counters(x, tiles) if x.is_cuda else done.new_zeros(tiles, device=x.device)
        assert zeros is not None
        y: Tensor = product.run(x, w_t, zeros[:tiles], out=out)
        return y

    return Product(run, product.code)


def bind(operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
    """Return the call of a suite's operands, with a copy of W.T."""
    w_t, x = operands.weights["w"].to_dense().t().contiguous(), operands.activations["x"]
    call = ActiveCall(len(x), w_t.shape[1], len(w_t), x.dtype)
    fields, active = operands.problem.fields, operands.problem["active"]

    def problem(call: ActiveCall) -> dict[str, Any]:
        sizes = {"m": call.m, "n": call.n, "k": call.k}
        density = 1.0 if active is None else float(f"{active / call.k:.2g}")
        return {"op": "twell.linear", "dtype": fields["dtype"], **sizes, "density": density}

    operator = Operator(engines, lambda call: x.device, problem, x.device)
    return OperatorCall(operator, call, (x,), lambda product: (w_t,))


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run the problem on the device, or None."""
    if problem["m"] > MOST_TOKENS:
        return f"expected at most {MOST_TOKENS} tokens, found {problem['m']}"
    return triton_unsupported(problem, device)


KERNEL = gpu_engine(
    *("linear_few", "linear_active", "cvse", Config, choices, plan, unsupported, bind)
)


@triton.jit  # type: ignore[untyped-decorator]
def _columns(  # type: ignore[no-untyped-def]
    x,
    w_t,
    done,
    y,
    sums,
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
