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
write zeros to the rows that have none, and the others end at once. If each program counted the
tiles itself, 8,192 programs of 1.2 blocks took 63 us instead of 45 on an H200.

`DGRAD`, dX_e = dY_e @ W_e, is the same kernel over the transposed index of each expert; each step
of training packs the transposed blocks.

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
from sparsebench.kernels._common.cuda import on_tape
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

MOST_EXPERTS = 1024
TOKENS = 16, 32, 64, 128


class BlockExpertsCall(NamedTuple):
    """Products of up to m rows in all; with the index of W it determines the plan.

    shape       n and k of each of the experts
    transposed  the product is with W instead of W.T
    """

    m: int
    experts: int
    shape: tuple[int, int]
    block: tuple[int, int]
    dtype: torch.dtype
    transposed: bool = False

    @property
    def product(self) -> tuple[int, int, int, int]:
        """Return the columns of the result and of the rows, and the sides of a block there."""
        (n, k), (r, c) = self.shape, self.block
        return (k, n, c, r) if self.transposed else (n, k, r, c)


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
    (_, depth_of_x, r, c), size = call.product, call.dtype.itemsize
    x = torch.empty(call.m, depth_of_x, dtype=call.dtype, device="meta")
    reason = unsupported_row(c, size) or unsupported_alignment(x)
    path = choose_path(reason, w.columns.device)
    mean = whole_tile(max(1, -(-call.m // call.experts)))
    nearest = sorted(TOKENS, key=lambda tokens: abs(tokens.bit_length() - mean.bit_length()))
    configs = []
    for tokens in nearest[:2]:
        for features in sorted({min(r, 128), min(r, 64)}, reverse=True):
            for in_flight in (3, 4, 2):
                depth = min(
                    c, fitting_depth(tokens, features, 128 // size, 4, path) * 2 // size or 16
                )
                held = most_stages(tokens, features, depth, size)
                flight = min(in_flight, held)
                configs.append(BlockExpertsConfig(tokens, features, depth, flight, 4, path))
    return list(dict.fromkeys(configs))


def plan(w: Bsr, call: BlockExpertsCall, config: BlockExpertsConfig) -> Product:
    """Transpose the index if the call needs it, and compile. Reads the index when it runs."""
    n, k, r, c = call.product
    offsets, columns, pack = w.offsets, w.columns, None
    if call.transposed:
        offsets, columns, order = transposed_index(w, call.experts)

        def pack(values: Tensor) -> Tensor:
            on_tape(complete=False)  # torch's own kernels pack
            return values[order].transpose(1, 2).contiguous()

    x = torch.empty(call.m, k, dtype=call.dtype, device="meta")
    ends = torch.empty(1, call.experts, dtype=torch.int32, device="meta")
    values = torch.empty(len(columns), r, c, dtype=call.dtype, device="meta")

    def kernel(x: Tensor, ends: Tensor, values: Tensor) -> BoundKernel:
        y = x.new_empty((len(x), n), dtype=output_dtype(x.dtype))
        flat = values.view(-1, c)
        count = triton.cdiv(len(x), config.tokens) + min(call.experts, len(x))
        tiles = torch.empty(count, 4, dtype=torch.int32, device="meta")
        ends_args = x, ends, flat, tiles, len(x), call.experts, count
        of_experts = {"TOKENS": config.tokens, "EXPERTS": triton.next_power_of_2(call.experts)}
        grid = (call.experts + 1,)
        listing = BoundKernel(_list_tiles, grid, ends_args, {**of_experts, "num_warps": 1}, tiles)
        args = (
            *(box(x, config.tokens, config.depth, config.path), ends),
            box(flat, config.features, config.depth, config.path),
            *(y, columns, offsets, tiles, n, k, x.stride(0)),
        )
        constants = constants_of(_multiply_experts, config, R=r, C=c)
        grid = (n // config.features * count,)
        return BoundKernel(_multiply_experts, grid, args, constants, y, listing)

    return product_of(kernel, (x, ends, values), w.columns.device, pack)


def transposed_index(w: Bsr, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets and columns of the transposed experts, and the block of W at each place."""
    row, across = rows_of(w.offsets), w.shape[1] // w.block[1]
    of_expert = (len(w.offsets) - 1) // experts  # block rows
    place = row // of_expert * across + w.columns
    order = place.argsort(stable=True)
    columns = (row % of_expert)[order].to(torch.int32)
    return offsets_of(place, experts * across), columns, order


def unsupported_call(w: Bsr, call: BlockExpertsCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    n, _, r, c = call.product
    if (whole_tile(r), whole_tile(c)) != (r, c) or n % r:
        of = "k" if call.transposed else "n"
        return f"expected blocks of powers of two from 16 on that divide {of}, found {r}x{c}, {n}"
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
    *,
    transposed: bool = False,
) -> OperatorCall:
    """Return a call of X, or of dY, with experts."""
    shape = w.shape[0] // experts, w.shape[1]
    call = BlockExpertsCall(bucket(len(x)), experts, shape, w.block, w.values.dtype, transposed)

    def problem(call: BlockExpertsCall) -> dict[str, Any]:
        density = density_of(*w.shape, call.block, len(w.columns))
        name = "bsr.experts_dgrad" if call.transposed else "bsr.experts"
        fields = {"op": name, "dtype": NAMES.get(call.dtype, str(call.dtype))}
        (n, k), block = call.shape, list(call.block)
        sizes = {"block": block, "m": call.m, "n": n, "k": k, "experts": call.experts}
        return {**fields, **sizes, "density": density}

    operator = Operator(engines, lambda call: w, problem, w.columns.device)
    return OperatorCall(operator, call, (x, ends), lambda product: (product.packed(w.values),))


def bind(operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
    """Return the call of a suite's operands. Raises Unsupported."""
    w, experts = operands.weights["w"], operands.problem["experts"]
    if not isinstance(w, Bsr):
        raise Unsupported(f"expected a weight in bsr, found {type(w).__name__}")
    transposed = operands.problem.op == "experts_dgrad"
    x, ends = (operands.activations[name] for name in ("dy" if transposed else "x", "ends"))
    return bound(w, x, ends, experts, engines, transposed=transposed)


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
    x, ends, w, tiles, m, experts, tile_count, TOKENS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Write the tiles of an expert: its number, the first row, and where its rows end.

    The program after those of the experts has the rows without one; its tiles have number -1.
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
    C: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    ROW_TILES: tl.constexpr = R // FEATURES
    COLUMN_TILES: tl.constexpr = C // DEPTH
    program = tl.program_id(0)
    row_tiles = n // FEATURES
    row_tile, tile = program % row_tiles, tiles + program // row_tiles * 4
    number, token, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if token >= stop:
        return
    row = tl.maximum(number, 0) * (n // R) + row_tile // ROW_TILES
    row0 = row_tile % ROW_TILES * FEATURES
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
    y_at = y + token.to(tl.int64) * n + row_tile * FEATURES
    y_at += tokens[:, None] * n + features[None, :]
    tl.store(y_at, sums.T.to(y.dtype.element_ty), (tokens < stop - token)[:, None])
