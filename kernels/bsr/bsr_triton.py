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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.choices import density_of
from sparsebench.kernels._common.cuda import on_tape
from sparsebench.kernels._common.operator import Product
from sparsebench.kernels._common.triton import (
    BoundKernel,
    Path,
    Precision,
    box,
    choose_path,
    fitting_depth,
    most_stages,
    options,
    precision_of,
    product_of,
    stages,
    unsupported,
    unsupported_alignment,
    unsupported_row,
    whole_tile,
    without_tensor_cores,
)
from sparsebench.kernels._kernel import output_dtype, refuse
from sparsebench.kernels.bsr._call import BsrCall, bsr_engine
from sparsebench.kernels.bsr._triton_shapes import (
    BY_POINTERS,
    FP32,
    MANY_TOKENS,
    SOME_TOKENS,
    Shape,
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
class Packed:
    """The weights as the kernel reads them: blocks of whole tiles.

    offsets  int32 [groups + 1]: first block of each group of block rows
    columns  int32 [blocks + 1]: block columns; the kernel reads one past the last
    values   [blocks, height, width]
    order    int32 [groups]: groups by falling number of blocks
    """

    offsets: Tensor
    columns: Tensor
    values: Tensor
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


def bound(x: Tensor, w: Bsr, config: Config, packed: Packed) -> BoundKernel:
    """Return the kernel of Y [m, n]; `packed` is pack(w, config)."""
    (m, k), (n, _), (r, c) = x.shape, w.shape, w.block
    y = x.new_empty((m, n), dtype=output_dtype(x.dtype))
    _, height, width = packed.values.shape
    token_tiles = triton.cdiv(m, config.tokens)
    row_tiles = len(packed.order) * (height // config.features)
    args = (
        box(x, config.tokens, config.depth, config.path),
        box(packed.values.view(-1, width), config.features, config.depth, config.path),
        box(y, config.tokens, config.features, config.path),
        *(packed.columns, packed.offsets, packed.order),
        *(m, n, k, config.group * r, c, x.stride(0), token_tiles),
    )
    constants = constants_of(config, height, width) | options(config.warps, config.path)
    return BoundKernel(_multiply, (row_tiles * token_tiles,), args, constants, y)


def constants_of(config: Config, height: int, width: int) -> dict[str, Any]:
    """Return the constants of the kernel; height and width are of a packed block."""
    return {
        "TOKENS": config.tokens,
        "FEATURES": config.features,
        "DEPTH": config.depth,
        "ROW_TILES": height // config.features,
        "COLUMN_TILES": width // config.depth,
        "STAGES": config.stages,
        "ROWS_FIRST": config.rows_first,
        "SWAPPED": config.swapped,
        "TMA": config.path == "tma",
        "PRECISION": config.precision,
    }


def packed_block(block: tuple[int, int], config: Config) -> tuple[int, int]:
    """Return height and width of a packed block, multiples of a tile's."""
    r, c = block
    height = triton.cdiv(config.group * r, config.features) * config.features
    return height, triton.cdiv(c, config.depth) * config.depth


def pack(w: Bsr, config: Config) -> Packed:
    """Unite the block rows of each group and pad the blocks; copy values only if needed."""
    (r, c), (height, width) = w.block, packed_block(w.block, config)
    block_columns = triton.cdiv(w.shape[1], c)
    block_row = torch.arange(len(w.offsets) - 1, device=w.offsets.device)
    block_row = block_row.repeat_interleave(w.offsets.diff())
    place = block_row // config.group * block_columns + w.columns
    if (height, width) == (r, c) and len(w.values):
        values = w.values
    else:
        place, slot = place.unique(return_inverse=True)
        values = w.values.new_zeros(max(1, len(place)), height, width)
        inner = values[:, : config.group * r, :c].view(len(values), config.group, r, c)
        inner[slot, block_row % config.group] = w.values
    rows = triton.cdiv(len(w.offsets) - 1, config.group)
    lengths = torch.bincount(place // block_columns, minlength=rows)
    return Packed(
        offsets=pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        columns=pad(place % block_columns, (0, 1)).to(torch.int32),
        values=values,
        order=lengths.argsort(descending=True, stable=True).to(torch.int32),
    )


def packer(w: Bsr, config: Config) -> tuple[Packed, Callable[[Tensor], Tensor] | None]:
    """Return the index that `pack` makes, and a function that packs values, if needed.

    The function does not wait for the device.
    """
    (r, c), blocks = w.block, len(w.columns)
    number = torch.arange(1, blocks + 1, dtype=torch.int32, device=w.columns.device)
    numbered = number[:, None, None].expand(blocks, r, c).contiguous()
    packed = pack(replace(w, values=numbered), config)
    size, index = packed.values.shape, replace(packed, values=number[:0])
    if size == numbered.shape:
        return index, None
    # A packed block now holds the numbers of the blocks in it, counted from 1; 0 means no block.
    numbers = packed.values[:, : config.group * r : r, 0]
    slot, member = numbers.nonzero(as_tuple=True)
    order = numbers[slot, member].argsort()
    slot, member = slot[order], member[order]

    def pack_values(values: Tensor) -> Tensor:
        on_tape(complete=False)  # torch's own kernels pack
        united = values.new_zeros(size)
        united[:, : config.group * r, :c].view(size[0], config.group, r, c)[slot, member] = values
        return united

    return index, pack_values


def path_of(w: Bsr, call: BsrCall) -> Path:
    """Return the path by which operands are read. Raises Unsupported if there is none."""
    width, size = whole_tile(w.block[1]), call.dtype.itemsize
    if size == 1 and width < FP8_DEPTH:
        least = f"expected blocks of more than {FP8_DEPTH // 2} columns in fp8"
        refuse(f"{least}, found {w.block[1]}")
    return choose_path(unsupported_by_tma(call.activations[0], w), w.columns.device)


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return what reads no padding, or else all by the padding, the least first.

    In fp32, with blocks of 10 and 64 tokens, unions of six block rows took 223 µs on an H200, and
    single ones 34 µs.
    """
    (r, c), (n, k), path = w.block, w.shape, path_of(w, call)
    precision = precision_of(tf32=call.tf32)
    configs = configurations(call.m, w.block, call.dtype.itemsize, path, precision)
    density = density_of(n, k, w.block, len(w.columns))

    def padded(config: Config) -> float:  # elements of W as packed, for random blocks
        height, width = packed_block(w.block, config)
        columns = triton.cdiv(k, c) * (1 - (1 - density) ** config.group)
        rows = triton.cdiv(triton.cdiv(n, r), config.group)
        return float(rows * columns * height * width)

    stored = [config for config in configs if packed_block(w.block, config) == w.block]
    return stored or sorted(configs, key=padded)


def plan(w: Bsr, call: BsrCall, config: Config) -> Product:
    """Unite the block rows of each group, and compile."""
    if config.path != path_of(w, call):
        refuse(f"expected the path {path_of(w, call)}, found {config.path}")
    index, pack_values = packer(w, config)
    height, width = packed_block(w.block, config)
    values = torch.empty(max(1, len(index.columns) - 1), height, width, dtype=call.dtype)

    def kernel(x: Tensor, values: Tensor) -> BoundKernel:
        return bound(x, w, config, replace(index, values=values))

    operands = *call.activations, values.to("meta")
    return product_of(kernel, operands, w.columns.device, pack_values)


KERNEL = bsr_engine(
    "bsr_triton", "linear", choices, plan, partial(unsupported, least=FP8_CAPABILITY), Config
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


def unsupported_by_tma(x: Tensor, w: Bsr) -> str | None:
    r, c = w.block
    if whole_tile(r) != r or whole_tile(c) != c:
        return f"blocks of {r}x{c} are not whole tiles"
    size = x.element_size()
    reason = unsupported_row(w.shape[0], size) or unsupported_row(c, size)
    return reason or unsupported_alignment(x)
