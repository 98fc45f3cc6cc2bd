"""Block-sparse attention in Triton: O = softmax(scale Q K.T) V over the blocks of a mask.

A program computes a tile of O, `tokens` queries of `pack` heads, and walks the list of its row:

            K, V of one key head                             tile of O
        +-----+-----+-----+-----+-----+           heads that share a list and a key head
     b_q|  #  |     |  #p |     |  #  |              +-----------+-----------+
        +-----+-----+-----+-----+-----+       tokens | token, h0 | token, h1 | ...
          full blocks first: 0 4, then 2p            +-----------+-----------+

Packed heads share each load of K and V. A block may have any side: tiles of keys are cut from the
blocks of a list laid end to end, so four blocks of 16 make a tile of 64 (_tiles.py). Only blocks in
the list are read, so a NaN in another block does not reach O.

    S = Q K.T                   a step of `keys` columns
    p = exp2(scale S - top)     top: largest scaled score of a row so far, in units of log2
    O = O * shrink + p V        shrink = exp2(old top - new top)
    LSE = ln 2 (top + log2 sum p)

A row without an allowed element has O = 0 and LSE = -inf. Rows with many blocks start first. Heads
are outermost, so that the L2 cache holds K and V of the few heads in flight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.triton import BoundKernel, Path
from sparsebench.kernels._common.tuned_table import Tuned
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.attention._lists import Lists, lists_of
from sparsebench.kernels.attention._search import fastest_forward
from sparsebench.kernels.attention._shapes import (
    LOG2_E,
    Bound,
    Shape,
    arguments_of,
    by_head,
    constants_of,
    head_box,
    packing,
    query_tiles,
    tiles_that_fit,
    unsupported,
)
from sparsebench.kernels.attention._tiles import (
    column_of,
    each_token,
    entry_of,
    fold,
    is_allowed,
    load_queries,
    load_tile,
    queries_of,
    token_of,
)

LN_2 = tl.constexpr(1 / LOG2_E)

# rows of queries, keys, warps and stages of a tile; the default first
TILES = [(64, 64, 4, 3), (128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2)]
FLAT = [
    (32, 32, 2, 3),
    (32, 32, 1, 3),
    (32, 64, 2, 3),
    (16, 16, 1, 3),
    (16, 32, 1, 3),
    (16, 64, 1, 3),
]
SMALL_BOX = 16  # keys of a TMA box that may be slower than loads by pointers


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens, pack  queries and heads of a tile; their product is its height
    shared        heads that could be packed, a key of tables of configurations
    keys          keys of a step
    """

    tokens: int
    pack: int
    shared: int
    keys: int
    stages: int
    warps: int
    path: Path


def configurations(shape: Shape, shared: int, path: Path) -> list[Config]:
    """Return at most eight configurations to try, the default first.

    shared  heads that may be packed
    """
    configs = [
        Config(
            *packing(rows, shape, shared),
            shared=shared,
            keys=keys,
            stages=stages,
            warps=warps,
            path=way,
        )
        for rows, keys, warps, stages in tiles_that_fit(
            shape, shape.tile_side * shared, TILES, FLAT
        )
        for way in _paths(shape, keys, path)
    ]
    return list(dict.fromkeys(configs))[:8]


def _paths(shape: Shape, keys: int, path: Path) -> list[Path]:
    """Return how to load a step: TMA loads no step of several blocks."""
    if shape.block[1] % keys:
        return ["pointers"]
    return [path, "pointers"] if keys <= SMALL_BOX else [path]


def launch(
    operands: Sequence[Tensor],
    mask: BlockMask,
    shape: Shape,
    scale: float,
    config: Config,
    lists: Lists | None = None,
) -> Bound[BoundKernel]:
    """Return the kernel of O [batch * S_q, H * D] and of the LSE [batch * H, S_q].

    operands  q like O, and k, v [batch * S_kv, H_kv * D]
    lists     lists_of(mask) if they exist already
    """
    q, k, v = inputs = tuple(by_head(x, shape) for x in operands)
    lists = lists or lists_of(mask)
    o = torch.empty_like(operands[0])
    lse = q.new_empty(shape.batch * shape.heads, shape.q_tokens, dtype=torch.float32)
    tile, keys = (config.tokens, config.pack), (config.keys, 1)
    args = (
        head_box(q, shape, tile, config.path),
        *(head_box(matrix, shape, keys, config.path) for matrix in (k, v)),
        *(o, lse, *arguments_of(lists, mask, shape), scale * LOG2_E),
    )
    grid = (query_tiles(shape, config.tokens, config.pack),)
    constants = constants_of(
        shape,
        mask,
        masked=lists.masked or shape.block[1] % config.keys != 0,
        path=config.path,
        stages=config.stages,
        warps=config.warps,
    )
    constants |= {"TOKENS": config.tokens, "PACK": config.pack, "KEYS": config.keys}
    program = BoundKernel(_forward, grid, args, constants, o)
    return Bound(program, inputs, (o, lse))


def prepare(operands: Operands, path: Path | None = None, *, tuned: Tuned = True) -> Launch:
    """Sort the lists; take a table's configuration, or compile and time a few.

    `path` forces one path. Raises Unsupported.
    """
    kernel = Config, configurations, launch
    return fastest_forward("attention_triton", *kernel, operands, path, tuned)


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported, tunes=True)


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    o,
    lse,
    offsets,
    columns,
    fulls,
    order,
    slots,
    bits,
    q_tokens,
    kv_tokens,
    heads,
    kv_heads,
    lists,
    scale,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    Q_SIDE: tl.constexpr,
    KV_SIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    PACK: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BITS: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ROWS: tl.constexpr = TOKENS * PACK
    stacked, sequence, head, kv_head, row, token, at, inside, place = queries_of(
        tl.program_id(0), order, q_tokens, heads, kv_heads, lists, D, Q_SIDE, TOKENS, PACK, True
    )
    start = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - start
    whole = tl.load(fulls + row) * KV_SIDE // KEYS
    q_tile = load_queries(q, sequence, token, head, place, inside, D, DEPTH, ROWS, TMA)

    top = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    column = column_of(columns, start, count, 0, KV_SIDE, KEYS)
    for i in tl.range(0, whole, num_stages=STAGES):
        key = token_of(column, i, KV_SIDE, KEYS)
        at_k = sequence, key, kv_tokens, kv_head, kv_heads
        k_tile = load_tile(k, *at_k, D, DEPTH, KV_SIDE, KEYS, TMA, True)
        v_tile = load_tile(v, *at_k, D, DEPTH, KV_SIDE, KEYS, TMA, True)
        column = column_of(columns, start, count, i + 1, KV_SIDE, KEYS)
        scores = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
        total, weight, top = fold(scores, v_tile, total, weight, top, scale, False, PRECISION)
    if MASKED:
        for i in tl.range(whole, tl.cdiv(count * KV_SIDE, KEYS), num_stages=STAGES):
            key = token_of(column, i, KV_SIDE, KEYS)
            at_k = sequence, key, kv_tokens, kv_head, kv_heads
            k_tile = load_tile(k, *at_k, D, DEPTH, KV_SIDE, KEYS, TMA, False)
            v_tile = load_tile(v, *at_k, D, DEPTH, KV_SIDE, KEYS, TMA, False)
            keys = each_token(key, KV_SIDE, KEYS)[None, :]
            entry = entry_of(start, i, KV_SIDE, KEYS)
            at_mask = at[:, None], keys, column < 0, entry, slots, bits, q_tokens, kv_tokens
            allowed = is_allowed(*at_mask, Q_SIDE, KV_SIDE, CAUSAL, BITS)
            column = column_of(columns, start, count, i + 1, KV_SIDE, KEYS)
            scores = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
            scores = tl.where(allowed, scores, -float("inf"))
            total, weight, top = fold(scores, v_tile, total, weight, top, scale, True, PRECISION)

    some = weight != 0  # also true for NaN
    weight = tl.where(some, weight, 1.0)
    total = total / weight[:, None]
    depth = tl.arange(0, DEPTH)[None, :]
    stored = inside[:, None] & (depth < D)
    tl.store(o + place[:, None] + depth, total.to(o.dtype.element_ty), stored)
    natural = tl.where(some, (top + tl.log2(weight)) * LN_2, -float("inf"))
    lse_row = (stacked + tl.arange(0, ROWS) % PACK).to(tl.int64) * q_tokens
    tl.store(lse + lse_row + at, natural, inside)
