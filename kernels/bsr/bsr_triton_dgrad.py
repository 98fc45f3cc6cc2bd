"""Gradient of a block-sparse linear layer's input in Triton: dX[m, k] = dY[m, n] @ W[n, k].

A program computes a tile of dX, `tokens` x `features`, from the stored blocks of one block column.
W stays as the forward pass stores it. An index by columns lists the blocks of a block column.

       W, stored by rows        one block column, 64 deep at a time          dY
        +----+----+----+                    +----+                  +-----------------+
        | b0 |    | b1 |                 r  | b0 |          tokens  |####|    |####|  |
        +----+----+----+         ->         +----+                  +-----------------+
        | b2 | b3 |    |                 r  | b2 |             columns of the two rows of blocks
        +----+----+----+                    +----+

TMA loads blocks that are whole tiles, one after the other. Other blocks are read through pointers.
Short ones are gathered: 64 / r make a tile, each in a slot whose height is the next power of two.
Masks fill up slots and narrow blocks, and nothing is padded in memory. Columns of dY that no block
of the column touches are not read, so a NaN there does not reach dX. As in bsr_triton, the index is
loaded a step ahead, and long block columns start first.
"""

from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats._format import rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.triton import (
    BoundKernel,
    Path,
    Precision,
    box,
    fitting_depth,
    most_stages,
    precision_of,
    product_of,
    stages,
    unsupported,
    whole_tile,
    without_tensor_cores,
)
from sparsebench.kernels.bsr._call import BsrCall, bsr_engine
from sparsebench.kernels.bsr._launch import no_block
from sparsebench.kernels.bsr._triton import constants_of, path_of, require_path

# Tokens and stages by the width of a tile, the default first. Every combination is tried in both
# orders of programs. They won bsr_triton's sweep on an H200.
BY_BOXES = {
    16: ((256, 128), (5, 3)),
    32: ((256, 128), (5, 3)),
    64: ((256, 128), (5, 3)),
    128: ((128, 64), (3, 5)),
}
# (tokens, warps) by the width of a tile, the default first.
BY_POINTERS = {
    16: ((128, 4), (256, 8), (64, 4)),
    32: ((128, 4), (256, 8), (64, 4)),
    64: ((128, 4), (64, 4), (128, 8)),
    128: ((128, 8), (64, 4), (64, 8)),
}
SHORT = 64  # blocks with fewer rows do not fill a step
FEW_TOKENS = 64
NARROW = 32, 16, 64, 128  # widths for few tokens: narrow tiles make more programs
FP32 = ((64, 64, 8), (64, 32, 4), (32, 32, 4))  # tokens, features, warps: no tensor cores


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens, features, depth  tile of dX of a program, and columns of dY in a step
    columns_first            neighbouring programs take other block columns, not other tokens
    """

    tokens: int
    features: int
    depth: int
    stages: int
    warps: int
    columns_first: bool
    path: Path
    precision: Precision


@dataclass(frozen=True)
class Index:
    """W's index by block columns: int32, on W's device.

    offsets  [block columns + 1]: first of each block column in the next two
    rows     [blocks]: block row, ascending within a block column
    places   [blocks]: position in W's values
    order    [block columns]: block columns by falling number of blocks
    """

    offsets: Tensor
    rows: Tensor
    places: Tensor
    order: Tensor


def index_of(w: Bsr) -> Index:
    """Transpose W's index on its device; its values are not read."""
    columns, places = w.columns.sort(stable=True)
    starts = torch.arange(triton.cdiv(w.shape[1], w.block[1]) + 1, device=columns.device)
    offsets = torch.searchsorted(columns, starts.to(columns.dtype), out_int32=True)
    return Index(
        offsets=offsets,
        rows=rows_of(w.offsets)[places].to(torch.int32),
        places=places.to(torch.int32),
        order=offsets.diff().argsort(descending=True, stable=True).to(torch.int32),
    )


def configurations(
    m: int, block: tuple[int, int], itemsize: int, path: Path, precision: Precision = "ieee"
) -> list[Config]:
    """Return what is worth trying for m tokens and r x c blocks: at most eight, default first."""
    height, widest = whole_tile(block[0]), min(128, whole_tile(block[1]))
    exact = without_tensor_cores(itemsize, precision)
    depth = 16 if exact else 128 // itemsize
    if path == "tma" and m > FEW_TOKENS and not exact:
        return _boxes(widest, min(depth, height), itemsize, precision)
    if exact:
        tiles = [(tokens, min(width, widest), depth, warps) for tokens, width, warps in FP32]
    elif m <= FEW_TOKENS:
        tiles = [(whole_tile(m), width, depth, 4) for width in NARROW if width <= widest]
    else:
        tiles = [(tokens, widest, depth, warps) for tokens, warps in BY_POINTERS[widest]]
    fitting = dict.fromkeys(
        (tokens, width, min(deep, height) if path == "tma" else deep, warps)
        for tokens, width, depth, warps in tiles
        if (deep := fitting_depth(tokens, width, depth, warps, path))
    )
    return [
        Config(
            *(tokens, width, depth),
            stages=stages(tokens, width, depth, itemsize, path, precision),
            warps=warps,
            columns_first=True,
            path=path,
            precision=precision,
        )
        for tokens, width, depth, warps in fitting
    ]


def _boxes(width: int, depth: int, itemsize: int, precision: Precision) -> list[Config]:
    """Return the configurations of BY_BOXES, with as many stages as fit on one SM."""
    heights, pipelines = BY_BOXES[width]
    configs = (
        Config(
            *(tokens, width, depth),
            stages=min(in_flight, most_stages(tokens, width, depth, itemsize)),
            warps=4,
            columns_first=columns_first,
            path="tma",
            precision=precision,
        )
        for tokens, in_flight, columns_first in product(heights, pipelines, (True, False))
    )
    return list(dict.fromkeys(configs))


def bound(dy: Tensor, values: Tensor, w: Bsr, config: Config, index: Index) -> BoundKernel:
    """Return the kernel of dX [m, k]; `index` is index_of(w)."""
    (m, n), (_, k), (r, c) = dy.shape, w.shape, w.block
    dx = dy.new_empty(m, k)
    token_tiles = triton.cdiv(m, config.tokens)
    column_tiles = len(index.order) * triton.cdiv(c, config.features)
    args = (
        box(dy, config.tokens, config.depth, config.path),
        box(values.view(-1, c), config.depth, config.features, config.path),
        box(dx, config.tokens, config.features, config.path),
        *(index.rows, index.places, index.offsets, index.order),
        *(m, n, k, dy.stride(0), token_tiles),
    )
    slot = min(triton.next_power_of_2(r), config.depth)
    constants = constants_of(_multiply, config, R=r, C=c, SLOT=slot)
    return BoundKernel(_multiply, (column_tiles * token_tiles,), args, constants, dx)


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return what is worth timing; blocks of fewer than SHORT rows also by pointers."""
    path, precision = path_of(w, call), precision_of(tf32=call.tf32)
    sizes = call.m, w.block, call.dtype.itemsize
    configs = configurations(*sizes, path, precision)
    if path == "tma" and w.block[0] < SHORT:
        return [*configs[:3], *configurations(*sizes, "pointers", precision)]
    return configs


def plan(w: Bsr, call: BsrCall, config: Config) -> Product:
    """Transpose the index, and compile."""
    require_path(config.path, w, call)
    index, stored = index_of(w), len(w.columns)
    values = torch.empty(max(1, stored), *w.block, dtype=call.dtype, device="meta")

    def kernel(dy: Tensor, values: Tensor) -> BoundKernel:
        return bound(dy, values, w, config, index)

    pack = None if stored else no_block
    return product_of(kernel, (*call.activations, values), w.columns.device, pack)


KERNEL = bsr_engine("bsr_triton_dgrad", "dgrad", choices, plan, unsupported, Config)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    dy,
    w,
    dx,
    rows,
    places,
    offsets,
    order,
    m,
    n,
    k,
    dy_stride,
    token_tiles,
    R: tl.constexpr,
    C: tl.constexpr,
    SLOT: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = DEPTH // SLOT  # a step
    STEPS: tl.constexpr = (R + DEPTH - 1) // DEPTH  # a block; one of the two is 1
    TILES: tl.constexpr = (C + FEATURES - 1) // FEATURES
    program = tl.program_id(0)
    if COLUMNS_FIRST:
        column_tiles = tl.num_programs(0) // token_tiles
        tile, token = program % column_tiles, program // column_tiles * TOKENS
    else:
        tile, token = program // token_tiles, program % token_tiles * TOKENS
    column = tl.load(order + tile // TILES)
    column0 = tile % TILES * FEATURES
    start = tl.load(offsets + column)
    end = tl.load(offsets + column + 1)

    # A 64-bit base and 32-bit offsets in the tile, where they suffice, take fewer registers.
    tokens = tl.arange(0, TOKENS)
    features = tl.arange(0, FEATURES)
    lanes = tl.arange(0, DEPTH)
    first = start + lanes // SLOT if BLOCKS > 1 else start
    at = first
    row = tl.load(rows + at, at < end, 0)
    place = tl.load(places + at, at < end, 0)
    total = tl.zeros((TOKENS, FEATURES), tl.float32)
    for i in tl.range(0, tl.cdiv(end - start, BLOCKS) * STEPS, num_stages=STAGES):
        depth = i % STEPS * DEPTH
        if TMA:
            dy_tile = dy.load([token, row * R + depth])
            w_tile = w.load([place * R + depth, column0])
        else:
            within = depth + lanes % SLOT
            inside = (within < R) & (row * R + within < n) & (at < end)
            dy_at = dy + token.to(tl.int64) * dy_stride
            dy_at += tokens[:, None] * dy_stride + (row * R + within)[None, :]
            dy_tile = tl.load(dy_at, (tokens < m - token)[:, None] & inside[None, :], 0.0)
            w_at = w + (place.to(tl.int64) * (R * C) + within * C + column0)[:, None]
            narrow = (features < C - column0)[None, :]
            w_tile = tl.load(w_at + features[None, :], inside[:, None] & narrow, 0.0)
        at = first + (i + 1) // STEPS * BLOCKS
        row = tl.load(rows + at, at < end, 0)
        place = tl.load(places + at, at < end, 0)
        total = tl.dot(dy_tile, w_tile, total, input_precision=PRECISION)

    if TMA:
        dx.store([token, column * C + column0], total.to(dx.dtype))
    else:
        feature = column.to(tl.int64) * C + column0
        inside = features < tl.minimum(C - column0, k - feature)
        dx_at = dx + token.to(tl.int64) * k + feature
        dx_at += tokens[:, None] * k + features[None, :]
        mask = (tokens < m - token)[:, None] & inside[None, :]
        tl.store(dx_at, total.to(dx.dtype.element_ty), mask)
