"""Linear layer with block-sparse weights in Triton: Y[m, n] = X[m, k] @ W[n, k].T, W in BSR.

A program computes a tile of Y, `tokens` x `features`, from the stored blocks of one block row:

           c                    W, one block row               X
        +-----+-----+-----+-----+-----+                +--------------------+
      r |  #  |     |  #  |     |  #  |         tokens | tile |      | tile |...
        +-----+-----+-----+-----+-----+                +--------------------+
         depth of k at a time               only the columns that a block touches

A block smaller than a tile is padded to a tile in a packed copy. A larger block is multiplied tile
by tile. Small blocks make flat tiles, each of which loads X again. Therefore `group` neighbouring
block rows may be multiplied together: their union is group * r rows high, with zeros where a row
has no block. That trades arithmetic for loads, and the search decides. Columns of X that no block
of the group touches are not read, so a NaN there does not reach Y.

The next block column is loaded one step ahead into a register: loaded in the same step, it would
take every second pipeline stage. Long block rows start first, so that none runs alone at the end.

In fp8 (e4m3) Y is bf16, and blocks are wider than 16 columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.choices import density_of
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.tape import on_tape
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
from sparsebench.kernels._kernel import output_dtype
from sparsebench.kernels.bsr._call import BsrCall, bsr_engine
from sparsebench.kernels.bsr._triton import (
    BY_POINTERS,
    FP32,
    MANY_TOKENS,
    SOME_TOKENS,
    Shape,
    constants_of,
    path_of,
    require_path,
)

FP8_DEPTH = 32  # depth of one fp8 product on tensor cores
FP8_CAPABILITY = 8, 9  # from which on Triton has e4m3


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens, features, depth  tile of Y of a program, and columns of X in a step
    group                    block rows multiplied together
    rows_first               neighbouring programs take different block rows, not tokens
    swapped                  the tensor cores multiply W X.T: features are the M of wgmma
    """

    tokens: int
    features: int
    depth: int
    group: int
    stages: int
    warps: int
    rows_first: bool
    swapped: bool
    path: Path
    precision: Precision = "ieee"


@dataclass(frozen=True)
class Unions:
    """The index of packed blocks, which are whole tiles: int32, on W's device.

    offsets  [groups + 1]: first block of each group of block rows
    columns  [blocks + 1]: block columns; the kernel reads one past the last
    order    [groups]: groups by falling number of blocks
    """

    offsets: Tensor
    columns: Tensor
    order: Tensor


def configurations(
    m: int, block: tuple[int, int], itemsize: int, path: Path, precision: Precision = "ieee"
) -> list[Config]:
    """Return what is worth trying for m tokens and r x c blocks: at most eight."""
    r, c = block
    row_tile, width = min(128, whole_tile(r)), whole_tile(c)
    if without_tensor_cores(itemsize, precision):
        plain = [(*shape, 32) for shape in FP32]
    elif m <= 64:
        plain = [
            (whole_tile(m), features, 4, depth)
            for features in (16, 32, 64, 128)
            for depth in (64, 128)
            if depth == 64 or width >= 128
        ]
    elif path == "tma":
        shapes = (MANY_TOKENS if m > 1024 else SOME_TOKENS)[row_tile]
        return [_swept(shape, r, width, itemsize, precision) for shape in shapes]
    else:
        plain = [(*s, 64) for s in BY_POINTERS if s[1] == row_tile or s[1] >= max(64, row_tile)]
    configs = [
        Config(
            tokens=tokens,
            features=features,
            depth=deep,
            group=max(1, features // r),
            stages=stages(tokens, features, deep, itemsize, path, precision),
            warps=warps,
            rows_first=True,
            swapped=False,
            path=path,
            precision=precision,
        )
        for tokens, features, warps, depth in plain
        if (deep := min(width, fitting_depth(tokens, features, depth, warps, path) * 2 // itemsize))
    ]
    return list(dict.fromkeys(configs))


def _swept(shape: Shape, r: int, width: int, itemsize: int, precision: Precision) -> Config:
    """Return a configuration of the sweep, with as many stages as fit on one SM."""
    tokens, features, in_flight, warps, order = shape
    depth = min(width, 128 // itemsize)
    return Config(
        tokens=tokens,
        features=features,
        depth=depth,
        group=max(1, features // r),
        stages=min(in_flight, most_stages(tokens, features, depth, itemsize)),
        warps=warps,
        rows_first=order.startswith("rows"),
        swapped=order.endswith("S"),
        path="tma",
        precision=precision,
    )


def bound(x: Tensor, values: Tensor, w: Bsr, config: Config, unions: Unions) -> BoundKernel:
    """Return the kernel of Y [m, n]; `values` are packed."""
    (m, k), (n, _), (r, c) = x.shape, w.shape, w.block
    y = x.new_empty((m, n), dtype=output_dtype(x.dtype))
    _, height, width = values.shape
    token_tiles = triton.cdiv(m, config.tokens)
    row_tiles = len(unions.order) * (height // config.features)
    args = (
        box(x, config.tokens, config.depth, config.path),
        box(values.view(-1, width), config.features, config.depth, config.path),
        box(y, config.tokens, config.features, config.path),
        *(unions.columns, unions.offsets, unions.order),
        *(m, n, k, config.group * r, c, x.stride(0), token_tiles),
    )
    tiles = {"ROW_TILES": height // config.features, "COLUMN_TILES": width // config.depth}
    constants = constants_of(_multiply, config, **tiles)
    return BoundKernel(_multiply, (row_tiles * token_tiles,), args, constants, y)


def packed_block(block: tuple[int, int], config: Config) -> tuple[int, int]:
    """Return height and width of a packed block, multiples of a tile's."""
    r, c = block
    height = triton.cdiv(config.group * r, config.features) * config.features
    return height, triton.cdiv(c, config.depth) * config.depth


def unions_of(w: Bsr, config: Config) -> tuple[Unions, Callable[[Tensor], Tensor] | None]:
    """Unite the block rows of each group.

    Also return the function that packs the values, into zeros, without waiting for the device; None
    if the kernel reads them as stored.
    """
    (r, c), group, size = w.block, config.group, packed_block(w.block, config)
    across, rows = triton.cdiv(w.shape[1], c), triton.cdiv(len(w.offsets) - 1, group)
    block_row = rows_of(w.offsets)
    place, member = block_row // group * across + w.columns, block_row % group
    pack = None
    if size != (r, c) or not len(place):
        place, slot = place.unique(return_inverse=True)
        blocks = max(1, len(place))

        def pack(values: Tensor) -> Tensor:
            on_tape(complete=False)  # torch's own kernels pack
            packed = values.new_zeros(blocks, *size)
            packed[:, : group * r, :c].view(blocks, group, r, c)[slot, member] = values
            return packed

    lengths = torch.bincount(place // across, minlength=rows)
    unions = Unions(
        offsets=pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        columns=pad(place % across, (0, 1)).to(torch.int32),
        order=lengths.argsort(descending=True, stable=True).to(torch.int32),
    )
    return unions, pack


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return what reads no padding, or else all by the padding, the least first.

    In fp32, with blocks of 10 and 64 tokens, unions of six block rows took 223 µs on an H200, and
    single ones 34 µs.
    """
    (r, c), (n, k) = w.block, w.shape
    path, precision = path_of(w, call), precision_of(tf32=call.tf32)
    configs = configurations(call.m, w.block, call.dtype.itemsize, path, precision)
    density = density_of(n, k, w.block, len(w.columns))

    def padded(config: Config) -> float:  # elements of W as packed, for random blocks
        height, width = packed_block(w.block, config)
        columns = triton.cdiv(k, c) * (1 - (1 - density) ** config.group)
        return float(triton.cdiv(triton.cdiv(n, r), config.group) * columns * height * width)

    stored = [config for config in configs if packed_block(w.block, config) == w.block]
    return stored or sorted(configs, key=padded)


def plan(w: Bsr, call: BsrCall, config: Config) -> Product:
    """Unite the block rows of each group, and compile."""
    require_path(config.path, w, call)
    unions, pack = unions_of(w, config)
    size = max(1, len(unions.columns) - 1), *packed_block(w.block, config)
    values = torch.empty(size, dtype=call.dtype, device="meta")

    def kernel(x: Tensor, values: Tensor) -> BoundKernel:
        return bound(x, values, w, config, unions)

    return product_of(kernel, (*call.activations, values), w.columns.device, pack)


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    if call.dtype.itemsize > 1 or whole_tile(w.block[1]) >= FP8_DEPTH:
        return None
    return f"expected blocks of more than {FP8_DEPTH // 2} columns in fp8, found {w.block[1]}"


KERNEL = bsr_engine(
    "bsr_triton",
    "linear",
    choices,
    plan,
    partial(unsupported, least=FP8_CAPABILITY),
    Config,
    unsupported_call,
)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x,
    w,
    y,
    columns,
    offsets,
    order,
    m,
    n,
    k,
    r,
    c,
    x_stride,
    token_tiles,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    ROW_TILES: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    SWAPPED: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    if ROWS_FIRST:
        row_tiles = tl.num_programs(0) // token_tiles
        tile, token = program % row_tiles, program // row_tiles * TOKENS
    else:
        tile, token = program // token_tiles, program % token_tiles * TOKENS
    row = tl.load(order + tile // ROW_TILES)
    row0 = tile % ROW_TILES * FEATURES
    start = tl.load(offsets + row) * COLUMN_TILES
    end = tl.load(offsets + row + 1) * COLUMN_TILES

    # A 64-bit base and 32-bit offsets in the tile take fewer registers than 64-bit pointers.
    tokens = tl.arange(0, TOKENS)
    features = tl.arange(0, FEATURES)
    lanes = tl.arange(0, DEPTH)
    ahead = tl.load(columns + start // COLUMN_TILES)
    total = tl.zeros((FEATURES, TOKENS) if SWAPPED else (TOKENS, FEATURES), tl.float32)
    for i in tl.range(start, end, num_stages=STAGES):
        column, depth = ahead * c, i % COLUMN_TILES * DEPTH
        w_row = i // COLUMN_TILES * (ROW_TILES * FEATURES) + row0
        if TMA:
            x_tile = x.load([token, column + depth])
            w_tile = w.load([w_row, depth])
        else:
            inside = lanes < tl.minimum(c, k - column) - depth
            x_at = x + token.to(tl.int64) * x_stride + column + depth
            x_at += tokens[:, None] * x_stride + lanes[None, :]
            x_tile = tl.load(x_at, (tokens < m - token)[:, None] & inside[None, :], 0.0)
            w_at = w + w_row.to(tl.int64) * (COLUMN_TILES * DEPTH) + depth
            w_tile = tl.load(w_at + features[:, None] * (COLUMN_TILES * DEPTH) + lanes[None, :])
        ahead = tl.load(columns + (i + 1) // COLUMN_TILES)
        if SWAPPED:
            total = tl.dot(w_tile, x_tile.T, total, input_precision=PRECISION)
        else:
            total = tl.dot(x_tile, w_tile.T, total, input_precision=PRECISION)

    if SWAPPED:
        total = total.T
    if TMA:
        y.store([token, row * r + row0], total.to(y.dtype))
    else:
        feature = row.to(tl.int64) * r + row0
        inside = features < tl.minimum(r - row0, n - feature)
        y_at = y + token.to(tl.int64) * n + feature
        y_at += tokens[:, None] * n + features[None, :]
        mask = (tokens < m - token)[:, None] & inside[None, :]
        tl.store(y_at, total.to(y.dtype.element_ty), mask)
