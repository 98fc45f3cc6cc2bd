"""Products of routed rows with block-sparse experts in Triton: Y_e = X_e @ W_e.T.

    W, experts one below the other       X, sorted by expert
    +-----+-----+-----+-----+            +--------------------+
    |  #  |     |     |  #  | block rows | rows of expert 0   |   `tokens` rows are a tile, of one
    |     |  #  |     |     | of expert 0+--------------------+   expert
    +-----+-----+-----+-----+            | rows of expert 1   |
    |     |     |  #  |  #  |            |                    |
    |  #  |     |     |     |            +--------------------+

A program multiplies a tile of an expert's rows of X by one block row, as bsr_triton does. The ends
of the experts stay on the device: a first launch, a program for each expert, lists the tiles. The
host knows only that there are at most rows / tokens + experts of them. Tiles after the last expert
write zeros to the rows that have none, and the others end at once. When each
program counted the tiles itself, 8,192 programs of 1.2 blocks took 63 us (measured on an H200).

With an `activation` W_e is gate above up, and the result is H = act(G) * U: a program multiplies
block row i of both, one after the other, and G and U never leave registers.

`DGRAD`, dX_e = dY_e @ W_e, is the same kernel over the transposed blocks of each expert.

    blocks  r rows are a power of two of 16 or more, so that an expert has whole block rows, and c
            columns too; n of each expert is a multiple of r
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import offsets_of, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.choices import density_of
from sparsebench.kernels._common.elementwise import activated
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.operator import Engine, Operator, OperatorCall, bucket
from sparsebench.kernels._common.product import MOST_CONFIGS, Product
from sparsebench.kernels._common.triton import (
    BoundKernel,
    Path,
    box,
    choose_path,
    fitting_depth,
    most_stages,
    product_of,
    unsupported_alignment,
    unsupported_row,
    whole_tile,
)
from sparsebench.kernels._common.triton import unsupported as unsupported_by_triton
from sparsebench.kernels._kernel import NAMES, Operands, output_dtype
from sparsebench.kernels.bsr._triton import constants_of
from sparsebench.kernels.bsr.bsr_triton import FP8_CAPABILITY, FP8_DEPTH
from sparsebench.results.record import Problem

MOST_EXPERTS = 1024  # a program has all ends in registers: 32 in each thread of a warp
TOKENS = 16, 32, 64, 128
MOST_SUMS = 128 * 128  # of a program with 4 warps: 128 registers of a thread


class BlockExpertsCall(NamedTuple):
    """Products of up to m rows in all, or gradients. It determines the plan on a device.

    shape       n and k of each of the experts
    stored      blocks of all experts
    activation  if set, W is gate above up in each expert, and the result is H [rows, n / 2]
    """

    m: int
    experts: int
    shape: tuple[int, int]
    block: tuple[int, int]
    dtype: torch.dtype
    stored: int
    activation: str | None = None

    @property
    def height(self) -> int:
        """Return the columns of the result."""
        return self.shape[0] // (2 if self.activation else 1)


@dataclass(frozen=True)
class BlockExpertsConfig:
    """One way to run the kernel: a tile of Y, columns of X in a step, and steps in flight."""

    tokens: int
    features: int
    depth: int
    stages: int
    warps: int
    path: Path


def choices(w: Bsr, call: BlockExpertsCall) -> list[BlockExpertsConfig]:
    """Return configurations, the likeliest first: about as many tokens as an expert has rows."""
    (r, c), size = call.block, call.dtype.itemsize
    x = torch.empty(call.m, call.shape[1], dtype=call.dtype, device="meta")
    reason = unsupported_row(c, size) or unsupported_alignment(x)
    path = choose_path(reason, w.columns.device)
    mean = whole_tile(max(1, -(-call.m // call.experts)))
    nearest = sorted(TOKENS, key=lambda tokens: abs(tokens.bit_length() - mean.bit_length()))
    configs = []
    products = 2 if call.activation else 1
    for tokens in nearest[:2]:
        for features in sorted({min(r, 128), min(r, 64)}, reverse=True):
            sums = products * tokens
            warps = 8 if sums * features > MOST_SUMS else 4
            for in_flight in (3, 4, 2):
                widest = fitting_depth(sums, features, 128 // size, warps, path)
                depth = min(c, widest * 2 // size or 16)
                stages = min(in_flight, most_stages(tokens, features, depth, size))
                configs.append(BlockExpertsConfig(tokens, features, depth, stages, warps, path))
    return list(dict.fromkeys(configs))


def plan(w: Bsr, call: BlockExpertsCall, config: BlockExpertsConfig) -> Product:
    """Compile. Reads only the shapes and the device of W."""
    (r, c), k = call.block, call.shape[1]
    x = torch.empty(call.m, k, dtype=call.dtype, device="meta")
    ends = torch.empty(1, call.experts, dtype=torch.int32, device="meta")
    weight = [
        torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (w.values, w.columns, w.offsets)
    ]

    def kernel(
        x: Tensor, ends: Tensor, values: Tensor, columns: Tensor, offsets: Tensor
    ) -> BoundKernel:
        y = x.new_empty((len(x), call.height), dtype=output_dtype(x.dtype))
        flat = values.view(-1, c)
        count = triton.cdiv(len(x), config.tokens) + min(call.experts, len(x))
        tiles = torch.empty(count, 4, dtype=torch.int32, device="meta")
        list_args = x, ends, flat, columns, offsets, tiles, len(x), call.experts, count
        of_experts = {"TOKENS": config.tokens, "EXPERTS": triton.next_power_of_2(call.experts)}
        grid = (call.experts + 1,)
        listing = BoundKernel(_list_tiles, grid, list_args, {**of_experts, "num_warps": 1}, tiles)
        args = (
            *(box(x, config.tokens, config.depth, config.path), ends),
            box(flat, config.features, config.depth, config.path),
            *(y, columns, offsets, tiles, call.height, k, x.stride(0)),
        )
        gate = {"ACTIVATION": call.activation or ""}
        constants = constants_of(_multiply_experts, config, R=r, C=c) | gate
        grid = (call.height // config.features * count,)
        return BoundKernel(_multiply_experts, grid, args, constants, y, listing)

    return product_of(kernel, (x, ends, *weight), w.columns.device)


def call_of(
    w: Bsr, experts: int, rows: int, dtype: torch.dtype, activation: str | None = None
) -> BlockExpertsCall:
    """Return the call that plans a product of rows with experts, or its gradient."""
    shape = w.shape[0] // experts, w.shape[1]
    return BlockExpertsCall(
        *(bucket(rows), experts, shape, w.block, dtype, len(w.columns), activation)
    )


def problem_of(call: BlockExpertsCall, op: str = "bsr.experts") -> dict[str, Any]:
    """Return a call's sizes, as a list of choices has them."""
    (n, k), block = call.shape, list(call.block)
    density = density_of(call.experts * n, k, call.block, call.stored)
    fields = {"op": op, "dtype": NAMES.get(call.dtype, str(call.dtype))}
    gate = {"activation": call.activation} if call.activation else {}
    sizes = {"block": block, "m": call.m, "n": n, "k": k, "experts": call.experts}
    return {**fields, **gate, **sizes, "density": density}


def unsupported_call(w: Bsr, call: BlockExpertsCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    (r, c), n = call.block, call.height
    if (whole_tile(r), whole_tile(c)) != (r, c) or n % r:
        return f"expected blocks of powers of two from 16 on that divide n, found {r}x{c} and {n}"
    if call.experts > MOST_EXPERTS:
        return f"expected at most {MOST_EXPERTS} experts, found {call.experts}"
    if call.dtype.itemsize == 1 and c < FP8_DEPTH:
        return f"expected blocks of {FP8_DEPTH} columns or more in fp8, found {c}"
    return None


def bound(
    w: Bsr,
    x: Tensor,
    ends: Tensor,
    experts: int,
    engines: tuple[Engine, ...],
    activation: str | None = None,
) -> OperatorCall:
    """Return a call of X with experts."""
    call = call_of(w, experts, len(x), w.values.dtype, activation)
    operator = Operator(engines, lambda call: w, problem_of, w.columns.device)
    weight = w.values, w.columns, w.offsets
    return OperatorCall(operator, call, (x, ends), lambda product: weight)


def bind(operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
    """Return the call of a suite's operands. Raises Unsupported."""
    w, experts, a = operands.weights["w"], operands.problem["experts"], operands.activations
    if not isinstance(w, Bsr):
        raise Unsupported(f"expected a weight in bsr, found {type(w).__name__}")
    if operands.problem.op == "experts_dgrad":
        return bound(transposed(w, experts), a["dy"], a["ends"], experts, engines)
    return bound(w, a["x"], a["ends"], experts, engines)


def transposed(w: Bsr, experts: int) -> Bsr:
    """Return the transposed experts [experts k, n], one below the other. Raises Unsupported."""
    order, offsets, columns = turned(w, experts)
    values = w.values[order].transpose(1, 2).contiguous()
    return Bsr((experts * w.shape[1], w.shape[0] // experts), offsets, columns, values)


def turned(w: Bsr, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order in which `transposed` has the blocks of W, and its offsets and columns.

    Raises Unsupported.
    """
    (rows, k), (r, c) = w.shape, w.block
    if k % c or rows // experts % r:
        raise Unsupported(f"expected blocks that divide n and k, found {r}x{c} and {rows}, {k}")
    row, of_expert = rows_of(w.offsets), rows // experts // r  # block rows
    place = row // of_expert * (k // c) + w.columns
    order = place.argsort(stable=True)
    columns = (row % of_expert)[order].to(torch.int32)
    return order, offsets_of(place, experts * k // c), columns


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run a problem here, or None."""
    if problem["dtype"] == "fp32":
        return "expected fp16, bf16 or fp8, found fp32"
    return unsupported_by_triton(problem, device, FP8_CAPABILITY)


KERNEL = gpu_engine(
    *("experts_triton", "experts", "bsr", BlockExpertsConfig, choices, plan),
    *(unsupported, bind, unsupported_call),
    most=MOST_CONFIGS,
)
DGRAD = replace(KERNEL, op="experts_dgrad")


@triton.jit
def _most(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit  # type: ignore[untyped-decorator]
def _list_tiles(  # type: ignore[no-untyped-def]
    x, ends, w, columns, offsets, tiles, m, experts, tile_count,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write the tiles of an expert: its number, the first row, and where its rows end.

    The program after those of the experts has the rows without one; its tiles have number -1. The
    operands of the product come first, because the first launch of a product takes all of them.
    """
    this, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    end = tl.minimum(tl.load(ends + expert, expert < experts, 0), m)
    end = tl.associative_scan(tl.maximum(end, 0), 0, _most)
    before = tl.minimum(tl.load(ends + expert - 1, (expert > 0) & (expert < experts), 0), m)
    begin = tl.associative_scan(tl.maximum(before, 0), 0, _most)
    counts = tl.where(expert < experts, (end - begin + TOKENS - 1) // TOKENS, 0)
    first = tl.sum(tl.where(expert < this, counts, 0), 0)
    is_expert = this < experts
    token = tl.max(tl.where(expert < this, end, 0), 0)
    stop = tl.where(is_expert, tl.max(tl.where(expert <= this, end, 0), 0), m)
    count = tl.where(is_expert, tl.sum(tl.where(expert == this, counts, 0), 0), tile_count - first)
    number = tl.where(is_expert, this, -1)
    lane = tl.arange(0, 32)
    for i in range(0, count, 32):
        at, inside = tiles + 4 * (first + i + lane), i + lane < count
        tl.store(at, tl.zeros_like(lane) + number, inside)
        tl.store(at + 1, token + (i + lane) * TOKENS, inside)
        tl.store(at + 2, tl.zeros_like(lane) + stop, inside)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_experts(  # type: ignore[no-untyped-def]
    x, ends, w, y, columns, offsets, tiles, n, k, x_stride,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    ROW_TILES: tl.constexpr = R // FEATURES
    GATED: tl.constexpr = ACTIVATION != ""
    program = tl.program_id(0)
    row_tiles = n // FEATURES
    row_tile, tile = program % row_tiles, tiles + program // row_tiles * 4
    number, token, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if token >= stop:
        return
    height = n // R
    row = tl.maximum(number, 0) * height * (1 + GATED) + row_tile // ROW_TILES
    row0 = row_tile % ROW_TILES * FEATURES
    tokens, features = tl.arange(0, TOKENS), tl.arange(0, FEATURES)
    sums = _multiply_row(
        x, w, columns, offsets, number, token, stop, k, x_stride, row, row0,
        TOKENS, FEATURES, DEPTH, R, C, STAGES, TMA,
    )  # fmt: skip
    if GATED:
        up = _multiply_row(
            x, w, columns, offsets, number, token, stop, k, x_stride, row + height, row0,
            TOKENS, FEATURES, DEPTH, R, C, STAGES, TMA,
        )  # fmt: skip
        sums = activated(sums, ACTIVATION) * up
    y_at = y + token.to(tl.int64) * n + row_tile * FEATURES
    y_at += tokens[:, None] * n + features[None, :]
    tl.store(y_at, sums.T.to(y.dtype.element_ty), (tokens < stop - token)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_row(  # type: ignore[no-untyped-def]
    x, w, columns, offsets, number, token, stop, k, x_stride, row, row0,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return the sums of a block row, fp32 [FEATURES, TOKENS]; zeros for rows without an expert."""
    COLUMN_TILES: tl.constexpr = C // DEPTH
    start = tl.load(offsets + row) * COLUMN_TILES
    end = tl.where(number < 0, start, tl.load(offsets + row + 1) * COLUMN_TILES)
    tokens, features, lanes = tl.arange(0, TOKENS), tl.arange(0, FEATURES), tl.arange(0, DEPTH)
    sums = tl.zeros((FEATURES, TOKENS), tl.float32)
    ahead = tl.load(columns + start // COLUMN_TILES, start < end, 0)
    for i in tl.range(start, end, num_stages=STAGES):
        column, depth = ahead * C, i % COLUMN_TILES * DEPTH
        w_row = i // COLUMN_TILES * R + row0
        if TMA:
            x_tile = x.load([token, column + depth])
            w_tile = w.load([w_row, depth])
        else:
            inside = lanes < k - column - depth
            x_at = x + token.to(tl.int64) * x_stride + column + depth
            x_at += tokens[:, None] * x_stride + lanes[None, :]
            x_tile = tl.load(x_at, (tokens < stop - token)[:, None] & inside[None, :], 0.0)
            w_at = w + w_row.to(tl.int64) * C + depth
            w_tile = tl.load(w_at + features[:, None] * C + lanes[None, :])
        next_step = i + 1
        ahead = tl.load(columns + next_step // COLUMN_TILES, next_step < end, 0)
        sums = tl.dot(w_tile, x_tile.T, sums)
    return sums
