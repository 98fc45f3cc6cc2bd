"""Linear layer with small blocks in Triton: Y[m, n] = X[m, k] @ W[n, k].T, blocks gathered along k.

Several blocks of a (united) block row stand side by side in one tile, so that a step is one deep
product instead of several short ones. Blocks of 16, four of them in a tile 64 deep:

    W, one block row                         packed                    X, the columns of a tile
    +---+---+---+---+---+---+---+---+       +---+---+---+---+         +---+---+---+---+
    |   | a |   | b | c |   |   | d |  -->  | a | b | c | d |    x    | 1 | 3 | 4 | 7 |  tokens
    +---+---+---+---+---+---+---+---+       +---+---+---+---+         +---+---+---+---+
      0   1   2   3   4   5   6   7              64 deep                columns: 1, 3, 4, 7

X comes through pointers, a vector of block columns at a time: pieces of 16 bytes by cp.async, where
a box of TMA costs an SM about 1 ns a row, however short (NOTES.md). `group` neighbouring block rows
are united as in bsr_triton. Places that no block fills are zeros in W and not read in X, so a NaN
of a column that no block of the group touches stays out of Y.

    dtype     fp16, bf16, fp32, tf32
    blocks    at most half a tile wide: 32 columns of 16 bits, 16 of 32
    X         contiguous rows

bsr_triton has its own table of tuned configurations. This is a kernel beside it, so that they stay.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.triton import (
    COMPILE_THREADS,
    BoundKernel,
    Precision,
    options,
    precision_of,
    unsupported,
    whole_tile,
    without_tensor_cores,
)
from sparsebench.kernels._common.tuned_table import Sizes, Tuned, blocked, choose
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr import bsr_triton
from sparsebench.kernels.bsr.bsr_triton import Packed

DEPTH_BYTES = 128  # of a row of X in a step: 64 columns of 16 bits
# (tokens, features, stages, warps), the likeliest first. 128 x 128 is what was measured (NOTES.md).
MANY_TOKENS = ((128, 128, 3, 8), (128, 64, 4, 4), (256, 64, 3, 8), (128, 32, 4, 4), (256, 16, 4, 8))
FEW_TOKENS = ((16, 4), (32, 4), (64, 3))  # (features, stages), for one tile of tokens
FP32 = ((64, 32, 3, 8), (32, 32, 3, 4), (64, 16, 3, 4), (32, 16, 3, 4))  # no tensor cores


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens, features  tile of Y of a program
    gather            blocks side by side in a tile
    group             block rows multiplied together
    rows_first        neighbouring programs take other block rows, not other tokens
    """

    tokens: int
    features: int
    gather: int
    group: int
    stages: int
    warps: int
    rows_first: bool = True
    precision: Precision = "ieee"


def configurations(
    m: int, block: tuple[int, int], itemsize: int, precision: Precision = "ieee"
) -> list[Config]:
    """Return what is worth trying for m tokens and r x c blocks: at most five."""
    r, c = block
    if without_tensor_cores(itemsize, precision):
        shapes = [shape for shape in FP32 if shape[0] < 2 * m or shape[0] == 32]
    elif m <= 64:
        shapes = [(whole_tile(m), features, stages, 4) for features, stages in FEW_TOKENS]
    else:
        shapes = [*MANY_TOKENS]
    gather = DEPTH_BYTES // itemsize // width_of(c)
    return [
        Config(tokens, features, gather, max(1, features // r), stages, warps, precision=precision)
        for tokens, features, stages, warps in shapes
    ]


def space(sizes: Sizes, itemsize: int) -> list[Config]:
    """Return what a long search times: `configurations`, with other stages and the other order."""
    assert sizes.block is not None
    few = configurations(sizes.m, sizes.block, itemsize, precision_of(sizes.dtype))
    wide = [
        replace(config, stages=stages, rows_first=rows_first)
        for config, stages, rows_first in product(few, (2, 3, 4), (True, False))
    ]
    return list(dict.fromkeys([*few, *wide]))


def width_of(c: int) -> int:
    """Return the columns of a block's place in a tile: a power of two."""
    return 1 << (c - 1).bit_length()


def packed_block(block: tuple[int, int], config: Config) -> tuple[int, int]:
    """Return height and width of the place of a united block."""
    r, c = block
    return -(-config.group * r // config.features) * config.features, width_of(c)


def pack(w: Bsr, config: Config) -> Packed:
    """Unite the block rows of each group, and put `gather` blocks side by side.

    values   [tiles, height, gather x width]
    columns  int32 [(tiles + 1) x gather]: block columns; beyond W's where a place is empty
    """
    (height, width), gather = packed_block(w.block, config), config.gather
    united = _united(w, config, height, width)
    lengths = united.offsets.diff()
    tiles = -(-lengths // gather)
    offsets = pad(tiles.cumsum(0), (1, 0))
    stored = int(united.offsets[-1])
    row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    place = (
        torch.arange(stored, device=lengths.device) - united.offsets[row] + offsets[row] * gather
    )
    count, beyond = int(offsets[-1]), -(-w.shape[1] // w.block[1])
    values = united.values.new_zeros(max(count, 1) * gather, height, width)
    values[place] = united.values[:stored]
    columns = united.columns.new_full(((count + 1) * gather,), beyond)
    columns[place] = united.columns[:stored]
    side_by_side = values.view(-1, gather, height, width).transpose(1, 2).flatten(2).contiguous()
    return Packed(offsets.to(torch.int32), columns, side_by_side, united.order)


def _united(w: Bsr, config: Config, height: int, width: int) -> Packed:
    """Unite block rows as bsr_triton does, each block in a place of its own size."""
    tile = bsr_triton.Config(16, height, width, config.group, 1, 4, True, False, "pointers")
    return bsr_triton.pack(w, tile)


def launch(x: Tensor, w: Bsr, config: Config, packed: Packed | None = None) -> BoundKernel:
    """Return the kernel of Y [m, n]; `packed` is pack(w, config), if it exists already."""
    packed = packed or pack(w, config)
    (m, k), (n, _), (r, _) = x.shape, w.shape, w.block
    y, height = x.new_empty(m, n), packed.values.shape[1]
    token_tiles = triton.cdiv(m, config.tokens)
    row_tiles = len(packed.order) * (height // config.features)
    args = (
        *(x, packed.values, y, packed.columns, packed.offsets, packed.order),
        *(m, n, k, config.group * r, x.stride(0), token_tiles),
    )
    constants = constants_of(config, w.block) | options(config.warps, "pointers")
    return BoundKernel(_multiply, (row_tiles * token_tiles,), args, constants, y)


def constants_of(config: Config, block: tuple[int, int]) -> dict[str, Any]:
    """Return the constants of the kernel."""
    height, width = packed_block(block, config)
    return {
        "TOKENS": config.tokens,
        "FEATURES": config.features,
        "GATHER": config.gather,
        "WIDTH": width,
        "C": block[1],
        "ROW_TILES": height // config.features,
        "STAGES": config.stages,
        "ROWS_FIRST": config.rows_first,
        "PRECISION": config.precision,
    }


def unsupported_block(block: tuple[int, int], itemsize: int) -> str | None:
    """Say why blocks cannot be gathered, or None."""
    most = DEPTH_BYTES // itemsize // 2
    fits = width_of(block[1]) <= most
    return None if fits else f"expected blocks at most {most} wide, found {block[0]}x{block[1]}"


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Pack the weights; take a table's configuration, or compile and time a few.

    Raises Unsupported.
    """
    x, w = operands.activations["x"], operands.weights["w"]
    assert isinstance(w, Bsr)
    size = x.element_size()
    if reason := unsupported_block(w.block, size):
        raise Unsupported(reason)
    if x.stride(1) != 1:
        raise Unsupported(f"expected contiguous rows of X, found strides {list(x.stride())}")
    sizes = blocked(len(x), *w.shape, operands.problem["dtype"], w.block, len(w.values))
    few = configurations(len(x), w.block, size, precision_of(sizes.dtype))
    searched = space(sizes, size) if tuned == "wide" else few
    configs, by = choose("bsr_gathered", Config, operands, sizes, tuned, searched)
    packings: dict[Any, Packed] = {}
    candidates = []
    for config in configs:
        layout = config.gather, config.group, *packed_block(w.block, config)
        if layout not in packings:
            packings[layout] = pack(w, config)
        candidates.append(launch(x, w, config, packings[layout]))
    return fastest_launch(configs, candidates, by, x.device, COMPILE_THREADS)


KERNEL = Kernel("linear", "bsr", "cuda", prepare, unsupported, tunes=True)


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
    x_stride,
    token_tiles,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    GATHER: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    ROW_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
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
    start, end = tl.load(offsets + row), tl.load(offsets + row + 1)

    tokens = tl.arange(0, TOKENS)
    features = tl.arange(0, FEATURES)
    lanes = tl.arange(0, GATHER * WIDTH)
    block, column = lanes // WIDTH, lanes % WIDTH
    # A 64-bit base and 32-bit offsets in the tile take fewer registers than 64-bit pointers.
    x_tokens = x + token.to(tl.int64) * x_stride
    # The next step's block columns are in registers: loaded in their own step they take a stage.
    ahead = tl.load(columns + start * GATHER + block)
    total = tl.zeros((TOKENS, FEATURES), tl.float32)
    for i in tl.range(start, end, num_stages=STAGES):
        at = ahead * C + column
        if C == WIDTH:  # what Triton cannot know: pieces of 16 bytes are contiguous
            at = tl.max_contiguous(tl.multiple_of(at, WIDTH), WIDTH)
        inside = at < k if C == WIDTH else (at < k) & (column < C)
        x_at = x_tokens + (tokens[:, None] * x_stride + at[None, :])
        x_tile = tl.load(x_at, (tokens < m - token)[:, None] & inside[None, :], 0.0)
        w_at = w + (i * (ROW_TILES * FEATURES) + row0).to(tl.int64) * (GATHER * WIDTH)
        w_tile = tl.load(w_at + (features[:, None] * (GATHER * WIDTH) + lanes[None, :]))
        ahead = tl.load(columns + (i + 1) * GATHER + block)
        total = tl.dot(x_tile, w_tile.T, total, input_precision=PRECISION)

    feature = row.to(tl.int64) * r + row0
    inside = features < tl.minimum(r - row0, n - feature)
    y_at = y + token.to(tl.int64) * n + feature
    y_at += tokens[:, None] * n + features[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), (tokens < m - token)[:, None] & inside[None, :])
