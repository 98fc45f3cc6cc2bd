"""Gradient of a block-sparse linear layer's weights in Triton: dY.T @ X at W's blocks.

    values [blocks, r, c]  =  dY[:, rows of the block].T  @  X[:, columns of the block]

A program multiplies a strip: stored blocks that are neighbours in a block row and so share dY's
tile. It sums over all tokens, or over one of several equal parts of them:

             dY                       X                                  dW
         +--------+     +---------------------------+          +----+----+----+----+
         |  |##|  |     |  |##|     |##|##|      |  |        r | #0 |    | #1 | #2 |
  tokens |  |##|  |     |  |##|     |##|##|      |  |    ->    +----+----+----+----+
         |  |##|  |     |  |##|     |##|##|      |  |             a strip of three
         +--------+     +---------------------------+

Blocks of 64 and more that are whole tiles make strips of one block, loaded by TMA. Smaller and odd
blocks are gathered through pointers into a tile 64 to 256 wide. Each has a slot whose width is the
next power of two, and masks fill the rest. A block wider or higher than a tile is computed tile by
tile.

If there are few blocks, there are few programs. Then the tokens are split into parts: the sums of
each part are written in fp32, and a second kernel adds them in a fixed order. So every call gives
the same bits.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats._format import rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.triton import (
    BoundKernel,
    Path,
    Precision,
    box,
    most_stages,
    precision_of,
    product_of,
    unsupported,
    whole_tile,
    without_tensor_cores,
)
from sparsebench.kernels.bsr._call import BsrCall, bsr_engine
from sparsebench.kernels.bsr._triton import constants_of, path_of, require_path

WIDEST = 128  # side of a tile that TMA loads

Tile = tuple[int, int, int, int]  # width, tokens (in 16 bits), warps, most stages
# Tiles of strips by their height, the default first. A thread has at most 32 elements of X: in odd
# rows each needs a separate address, and more do not fit into the registers.
STRIPS: dict[int, tuple[Tile, ...]] = {
    16: ((128, 64, 8, 4), (256, 32, 8, 4), (128, 32, 4, 4), (64, 32, 4, 4)),
    32: ((128, 64, 8, 3), (256, 32, 8, 4), (128, 32, 4, 4), (64, 32, 4, 4)),
    64: ((128, 32, 8, 4), (64, 64, 8, 3), (64, 32, 4, 4)),
    128: ((128, 32, 8, 4), (64, 32, 8, 4)),
}
BOXES: tuple[Tile, ...] = ((128, 64, 4, 3), (128, 64, 4, 4), (128, 32, 4, 5), (128, 64, 8, 4))
FP32: tuple[Tile, ...] = ((64, 32, 4, 3), (64, 32, 8, 3), (32, 32, 4, 3))  # no tensor cores

PROGRAMS_A_CORE = 2  # the target of splitting
FEWEST_TOKENS = 256  # fewest tokens of a part
PARTS = 16  # at most
SUMMED = 1024  # elements of a program of the second kernel


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    rows, width  tile of a strip
    tokens       of a step
    parts        number of parts that the tokens are split into
    """

    rows: int
    width: int
    tokens: int
    parts: int
    stages: int
    warps: int
    path: Path
    precision: Precision


@dataclass(frozen=True)
class Strips:
    """Runs of stored blocks of a block row, for one configuration: int32, on the device.

    starts  [strips]: first block
    rows    [strips]: block row
    """

    starts: Tensor
    rows: Tensor


def strips_of(pattern: Bsr, config: Config) -> Strips:
    """Cut every block row into strips; needs only the index. Waits for the device."""
    length = strip_length(pattern.block, config)
    counts = (pattern.offsets.diff() + length - 1) // length
    firsts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    rows = rows_of(firsts)
    within = torch.arange(len(rows), device=rows.device) - firsts[rows]
    starts = pattern.offsets[rows] + within * length
    return Strips(starts.to(torch.int32), rows.to(torch.int32))


def strip_length(block: tuple[int, int], config: Config) -> int:
    """Return the largest number of blocks in a strip."""
    return max(1, config.width // int(triton.next_power_of_2(block[1])))


def configurations(
    m: int,
    block: tuple[int, int],
    blocks: int,
    itemsize: int,
    path: Path,
    cores: int,
    precision: Precision = "ieee",
) -> list[Config]:
    """Return what is worth trying for m tokens: at most eight, the default first.

    `blocks` of r x c are stored; `cores` is the number of multiprocessors.
    """
    r, c = block
    height = min(WIDEST, whole_tile(r))
    if without_tensor_cores(itemsize, precision):
        height, tiles = min(height, 64), FP32
    else:
        tiles = BOXES if path == "tma" else STRIPS[height]
    configs = []
    for most, tokens, warps, pipeline in tiles:
        width, deep = min(most, c) if path == "tma" else most, tokens * 2 // itemsize
        held = most_stages(width, height, deep, itemsize)
        config = Config(height, width, deep, 1, min(pipeline, held), warps, path, precision)
        strips = triton.cdiv(blocks, strip_length(block, config))
        programs = max(1, strips) * triton.cdiv(r, height) * triton.cdiv(c, width)
        configs.append(replace(config, parts=_parts(m, PROGRAMS_A_CORE * cores // programs)))
    other = 1 if configs[0].parts > 1 else _parts(m, 2)
    return list(dict.fromkeys([*configs, replace(configs[0], parts=other)]))


def _parts(m: int, most: int) -> int:
    """Return the largest power of two up to `most` that leaves a part FEWEST_TOKENS."""
    most = min(most, PARTS, m // FEWEST_TOKENS)
    return 1 << (max(1, most).bit_length() - 1)


def bound(dy: Tensor, x: Tensor, pattern: Bsr, config: Config, strips: Strips) -> BoundKernel:
    """Return the kernel of dW's values [blocks, r, c]; `strips` is strips_of(pattern, config)."""
    (m, n), k, (r, c), blocks = dy.shape, x.shape[1], pattern.block, len(pattern.columns)
    values = x.new_empty(blocks, r, c)
    tiles = triton.cdiv(r, config.rows) * triton.cdiv(c, config.width)
    part = triton.cdiv(triton.cdiv(m, config.parts), config.tokens) * config.tokens
    parts = triton.cdiv(m, part)
    out = x.new_empty(parts, blocks, r, c, dtype=torch.float32) if parts > 1 else values
    args = (
        box(dy, config.tokens, config.rows, config.path),
        box(x, config.tokens, config.width, config.path),
        *(out, strips.starts, strips.rows, pattern.offsets, pattern.columns),
        *(m, n, k, dy.stride(0), x.stride(0), part, values.numel()),
    )
    slot = min(triton.next_power_of_2(c), config.width)
    constants = constants_of(_contract, config, R=r, C=c, SLOT=slot)
    contract = BoundKernel(_contract, (len(strips.rows) * tiles, parts), args, constants, values)
    if parts == 1:
        return contract
    grid = (triton.cdiv(values.numel(), SUMMED),)
    sizes = {"PARTS": parts, "SUMMED": SUMMED}
    return BoundKernel(_add, grid, (out, values, values.numel()), sizes, values, before=contract)


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return what is worth timing, the default first."""
    device, size = w.columns.device, call.dtype.itemsize
    sizes = len(w.columns), size, path_of(w, call), multiprocessors(device)
    return configurations(call.m, w.block, *sizes, precision_of(tf32=call.tf32))


def plan(w: Bsr, call: BsrCall, config: Config) -> Product:
    """Cut the strips, and compile."""
    require_path(config.path, w, call)
    strips = strips_of(w, config)

    def kernel(dy: Tensor, x: Tensor) -> BoundKernel:
        return bound(dy, x, w, config, strips)

    return product_of(kernel, call.activations, w.columns.device)


KERNEL = bsr_engine("bsr_triton_wgrad", "wgrad", choices, plan, unsupported, Config)


@triton.jit  # type: ignore[untyped-decorator]
def _contract(  # type: ignore[no-untyped-def]
    dy,
    x,
    out,
    starts,
    rows,
    offsets,
    columns,
    m,
    n,
    k,
    dy_stride,
    x_stride,
    part,
    elements,
    R: tl.constexpr,
    C: tl.constexpr,
    SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ACROSS: tl.constexpr = (C + WIDTH - 1) // WIDTH  # tiles
    TILES: tl.constexpr = (R + ROWS - 1) // ROWS * ACROSS
    strip, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    row0, column0 = tile // ACROSS * ROWS, tile % ACROSS * WIDTH
    start, row = tl.load(starts + strip), tl.load(rows + strip)
    lanes = tl.arange(0, WIDTH)
    block = start + lanes // SLOT if WIDTH > SLOT else start
    stored = block < tl.load(offsets + row + 1)
    column = tl.load(columns + block, stored, 0)
    down, across = row0 + tl.arange(0, ROWS), column0 + lanes % SLOT
    kept, filled = down < R, (across < C) & stored
    in_dy, in_x = kept & (row * R + down < n), filled & (column * C + across < k)

    # The strip is M, which is 64 and more in wgmma; a small block has fewer rows.
    first = tl.program_id(1) * part
    tokens = tl.arange(0, TOKENS)
    total = tl.zeros((WIDTH, ROWS), tl.float32)
    for i in tl.range(0, tl.cdiv(tl.minimum(part, m - first), TOKENS), num_stages=STAGES):
        token = first + i * TOKENS
        if TMA:
            dy_tile = dy.load([token, row * R + row0])
            x_tile = x.load([token, column * C + column0]).T
        else:
            inside = tokens < m - token
            dy_at = dy + token.to(tl.int64) * dy_stride
            dy_at += tokens[:, None] * dy_stride + (row * R + down)[None, :]
            dy_tile = tl.load(dy_at, inside[:, None] & in_dy[None, :], 0.0)
            # Loaded as X.T: Triton keeps no stages of a tile that is transposed later (Ampere).
            x_at = x + token.to(tl.int64) * x_stride
            x_at += (column * C + across)[:, None] + tokens[None, :] * x_stride
            x_tile = tl.load(x_at, in_x[:, None] & inside[None, :], 0.0)
        total = tl.dot(x_tile, dy_tile, total, input_precision=PRECISION)

    # Outside of W a block is zero, even where NaN times padding is not.
    total = tl.where(in_dy[:, None] & in_x[None, :], total.T, 0.0)
    at = tl.program_id(1).to(tl.int64) * elements + start.to(tl.int64) * (R * C)
    place = (block - start) * (R * C) + across
    mask = kept[:, None] & filled[None, :]
    sums = total.to(out.dtype.element_ty)
    tl.store(out + at + down[:, None] * C + place[None, :], sums, mask)


@triton.jit  # type: ignore[untyped-decorator]
def _add(parts, out, elements, PARTS: tl.constexpr, SUMMED: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * SUMMED + tl.arange(0, SUMMED)
    inside = at < elements
    total = tl.load(parts + at, inside)
    for _ in tl.static_range(1, PARTS):
        parts += elements
        total += tl.load(parts + at, inside)
    tl.store(out + at, total.to(out.dtype.element_ty), inside)
