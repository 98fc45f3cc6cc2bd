"""The gradient of block-sparse experts at their blocks in Triton: dW_e = dY_e.T @ X_e.

    dY, rows of expert e          X, the same rows
    +-----+-----+-----+           +-----+-----+-----+
    |     |  #  |     | tokens    |     |     |  #  |     block (row, column) of W_e
    |     |  #  |     | at a time |     |     |  #  |     = sum over tiles of  dY tile.T @ X tile
    +-----+-----+-----+           +-----+-----+-----+

A program computes a stored block, or a part of one, over all rows of its expert, which it finds by
the ends on the device. The block of an expert without rows becomes zero.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.operator import Engine, Operator, OperatorCall
from sparsebench.kernels._common.product import MOST_CONFIGS, Product
from sparsebench.kernels._common.triton import BoundKernel, product_of, whole_tile
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.bsr import experts_triton
from sparsebench.kernels.bsr.experts_triton import (
    BlockExpertsCall,
    call_of,
    problem_of,
    unsupported,
)

WIDEST = 128  # columns of dY and of X in the part of a block that a program computes


@dataclass(frozen=True)
class ExpertsGradientConfig:
    """One way to run the kernel: rows in a step, steps in flight, and warps."""

    tokens: int
    stages: int
    warps: int


def choices(w: Bsr, call: BlockExpertsCall) -> list[ExpertsGradientConfig]:
    """Return configurations, the likeliest first: steps of about as many rows as an expert has."""
    mean = max(16, min(64, whole_tile(max(1, call.m // call.experts))))
    warps = 8 if min(call.block) >= WIDEST else 4
    sizes = [(mean, 3), (mean, 4), (max(16, mean // 2), 4)]
    return list(dict.fromkeys(ExpertsGradientConfig(*size, warps) for size in sizes))


def plan(w: Bsr, call: BlockExpertsCall, config: ExpertsGradientConfig) -> Product:
    """Expand the block rows, and compile. Reads the index of W, but no value."""
    (n, k), (r, c) = call.shape, call.block
    rows = rows_of(w.offsets).to(torch.int32)
    dy, x = (torch.empty(call.m, width, dtype=call.dtype, device="meta") for width in (n, k))
    ends = torch.empty(1, call.experts, dtype=torch.int32, device="meta")
    high, wide = min(r, WIDEST), min(c, WIDEST)
    constants = {"TOKENS": config.tokens, "R": r, "C": c, "HIGH": high, "WIDE": wide}
    constants |= {"EXPERTS": triton.next_power_of_2(call.experts), "STAGES": config.stages}
    constants |= {"num_warps": config.warps, "maxnreg": 255}

    def kernel(dy: Tensor, x: Tensor, ends: Tensor) -> BoundKernel:
        values = x.new_empty(len(w.columns), r, c)
        sizes = len(x), n, k, call.experts, dy.stride(0), x.stride(0)
        args = dy, x, ends, values, rows, w.columns, *sizes
        grid = (max(1, len(w.columns)) * (r // high) * (c // wide),)
        return BoundKernel(_contract_experts, grid, args, constants, values)

    return product_of(kernel, (dy, x, ends), w.columns.device)


def unsupported_call(w: Bsr, call: BlockExpertsCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    if reason := experts_triton.unsupported_call(w, call):
        return reason
    return None if call.stored else "expected a stored block, found none"


def bind(operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
    """Return the call of a suite's operands. Raises Unsupported."""
    w, experts, a = operands.pattern, operands.problem["experts"], operands.activations
    if not isinstance(w, Bsr):
        raise Unsupported(f"expected a pattern in bsr, found {type(w).__name__}")
    call = call_of(w, experts, len(a["x"]), a["x"].dtype)
    problem = partial(problem_of, op="bsr.experts_wgrad")
    operator = Operator(engines, lambda call: w, problem, w.columns.device)
    activations = a["dy"], a["x"], a["ends"]
    return OperatorCall(operator, call, activations, result=lambda v: replace(w, values=v))


KERNEL = gpu_engine(
    *("experts_triton_wgrad", "experts_wgrad", "bsr", ExpertsGradientConfig, choices, plan),
    *(unsupported, bind, unsupported_call),
    most=MOST_CONFIGS,
)


@triton.jit  # type: ignore[untyped-decorator]
def _contract_experts(  # type: ignore[no-untyped-def]
    dy, x, ends, values, rows, columns, m, n, k, experts, dy_stride, x_stride,
    TOKENS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, EXPERTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (R // HIGH) * (C // WIDE)
    program = tl.program_id(0)
    block, part = program // PARTS, program % PARTS
    row0, column0 = part // (C // WIDE) * HIGH, part % (C // WIDE) * WIDE
    row, column = tl.load(rows + block), tl.load(columns + block)
    expert, every = row // (n // R), tl.arange(0, EXPERTS)
    end = tl.minimum(tl.load(ends + every, every < experts, 0), m)
    begin = tl.max(tl.where(every < expert, tl.maximum(end, 0), 0), 0)
    stop = tl.max(tl.where(every <= expert, tl.maximum(end, 0), 0), 0)

    token, high, wide = tl.arange(0, TOKENS), tl.arange(0, HIGH), tl.arange(0, WIDE)
    dy_at = dy + row % (n // R) * R + row0 + high[None, :]
    feature = column * C + column0 + wide
    x_at = x + feature[None, :]
    sums = tl.zeros((HIGH, WIDE), tl.float32)
    for first in tl.range(begin, stop, TOKENS, num_stages=STAGES):
        inside = (token < stop - first)[:, None]
        at = (first + token).to(tl.int64)[:, None]
        dy_tile = tl.load(dy_at + at * dy_stride, inside, 0.0)
        x_tile = tl.load(x_at + at * x_stride, inside & (feature < k)[None, :], 0.0)
        sums = tl.dot(dy_tile.T, x_tile, sums)
    to = values + block.to(tl.int64) * (R * C) + (row0 + high[:, None]) * C + column0
    tl.store(to + wide[None, :], sums.to(values.dtype.element_ty))
