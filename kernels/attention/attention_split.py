"""Block-sparse attention for few queries, as in decoding, in Triton: each list is split.

    list of a row    | 0 | 3 | 4 | 9 | 12 | 31 |        16 blocks of 64 keys, for instance
    splits           | program 0     | program 1    |   each has a part of O, and a sum and maximum
    merged           the program that comes last, by a counter, adds the parts up in their order

A row of a decoding step has one query of each head. The heads of a group are packed into a tile, so
K and V of a key head are read once. There is one tile per sequence and key head, too few for
all SMs, so `splits` programs share the list of each. The order of the sum does not depend on which
program comes last, so the same operands give the same bits. The counters return to zero.

The time is bound by the bytes of the selected blocks. For 16 sequences it is about 30 us, so the
loads before the first load of K matter: rows have no order, if all lists are equally long the
kernel reads no offset, and Q is loaded by pointers, because a TMA load would be waited for first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.device import multiprocessors
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
)
from sparsebench.kernels.attention._shapes import unsupported as unsupported_by_triton
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
from sparsebench.results.record import Problem

MOST_QUERIES = 16  # most queries of a sequence; more fill the SMs without a split
FEW_ROWS = 16  # rows of a tile: the fewest that tl.dot takes
PARTS = 1, 2, 0.5  # programs for each SM, among which the search chooses
LN_2 = tl.constexpr(1 / LOG2_E)


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens, pack  queries and heads of a tile; their product is its height
    shared        heads that could be packed, a key of tables of configurations
    keys          keys of a step
    splits        programs that share a list
    """

    tokens: int
    pack: int
    shared: int
    keys: int
    splits: int
    stages: int
    warps: int
    path: Path


def configurations(shape: Shape, shared: int, path: Path, programs: int) -> list[Config]:
    """Return at most eight configurations to try, the default first.

    shared    heads that may be packed
    programs  multiprocessors of the device
    """
    tokens, pack = packing(FEW_ROWS, shape, shared)
    tiles = query_tiles(shape, tokens, pack)
    steps = [(32, 4, 2)] if shape.itemsize == 4 else [(64, 4, 3), (64, 8, 3), (128, 4, 2)]
    configs = [
        Config(
            *(tokens, pack, shared, keys, max(1, min(64, round(parts * programs / tiles)))),
            *(stages, warps),
            path=path if shape.block[1] % keys == 0 else "pointers",
        )
        for (keys, warps, stages), parts in product(steps, PARTS)
        if keys * shape.depth * shape.itemsize <= 32 * 1024
    ]
    return list(dict.fromkeys(configs))[:8]


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run the problem here, or None."""
    if problem["m"] > MOST_QUERIES:
        return f"expected at most {MOST_QUERIES} queries of a sequence, found {problem['m']}"
    return unsupported_by_triton(problem, device)


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
    tiles, rows = query_tiles(shape, config.tokens, config.pack), config.tokens * config.pack
    shape_of_parts = (tiles, config.splits, rows)
    parts = q.new_empty(*shape_of_parts, shape.depth, dtype=torch.float32)
    sums, tops = (q.new_empty(shape_of_parts, dtype=torch.float32) for _ in range(2))
    counters = lists.offsets.new_zeros(tiles)  # they stay with the kernel
    args = (
        q,
        *(head_box(matrix, shape, (config.keys, 1), config.path) for matrix in (k, v)),
        *(o, lse, parts, sums, tops, counters, *arguments_of(lists, mask, shape)),
        *(lists.blocks_per_row, scale * LOG2_E),
    )
    constants = constants_of(
        shape,
        mask,
        masked=lists.masked or shape.block[1] % config.keys != 0,
        path=config.path,
        stages=config.stages,
        warps=config.warps,
    )
    constants |= {"TOKENS": config.tokens, "PACK": config.pack, "KEYS": config.keys}
    constants |= {"SPLITS": config.splits, "UNIFORM": lists.blocks_per_row >= 0}
    program = BoundKernel(_split, (tiles * config.splits,), args, constants, o)
    return Bound(program, inputs, (o, lse))


def prepare(operands: Operands, path: Path | None = None, *, tuned: Tuned = True) -> Launch:
    """Sort the lists; take a table's configuration, or compile and time a few.

    `path` forces one path. Raises Unsupported.
    """
    offered = partial(configurations, programs=multiprocessors(operands.device))
    return fastest_forward("attention_split", Config, offered, launch, operands, path, tuned)


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported, tunes=True)


@triton.jit  # type: ignore[untyped-decorator]
def _split(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    o,
    lse,
    parts,
    sums,
    tops,
    counters,
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
    each_row,
    scale,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    Q_SIDE: tl.constexpr,
    KV_SIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    PACK: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    UNIFORM: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BITS: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ROWS: tl.constexpr = TOKENS * PACK
    program = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    stacked, sequence, head, kv_head, row, token, at, inside, place = queries_of(
        program, order, q_tokens, heads, kv_heads, lists, D, Q_SIDE, TOKENS, PACK, False
    )
    if UNIFORM:
        start, count = row * each_row, each_row
    else:
        start = tl.load(offsets + row)
        count = tl.load(offsets + row + 1) - start
    steps = tl.cdiv(count * KV_SIDE, KEYS)
    first, end = split * steps // SPLITS, (split + 1) * steps // SPLITS
    column = column_of(columns, start, count, first, KV_SIDE, KEYS)
    q_tile = load_queries(q, sequence, token, head, place, inside, D, DEPTH, ROWS, False)

    top = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for i in tl.range(first, end, num_stages=STAGES):
        key = token_of(column, i, KV_SIDE, KEYS)
        at_k = sequence, key, kv_tokens, kv_head, kv_heads
        k_tile = load_tile(k, *at_k, D, DEPTH, KV_SIDE, KEYS, TMA, False)
        v_tile = load_tile(v, *at_k, D, DEPTH, KV_SIDE, KEYS, TMA, False)
        scores = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
        if MASKED:
            keys = each_token(key, KV_SIDE, KEYS)[None, :]
            entry = entry_of(start, i, KV_SIDE, KEYS)
            at_mask = at[:, None], keys, column < 0, entry, slots, bits, q_tokens, kv_tokens
            allowed = is_allowed(*at_mask, Q_SIDE, KV_SIDE, CAUSAL, BITS)
            scores = tl.where(allowed, scores, -float("inf"))
        column = column_of(columns, start, count, i + 1, KV_SIDE, KEYS)
        total, weight, top = fold(scores, v_tile, total, weight, top, scale, True, PRECISION)

    lane = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)[None, :]
    last = True
    if SPLITS > 1:
        part = (program * SPLITS + split) * ROWS + lane
        tl.store(tops + part, top)
        tl.store(sums + part, weight)
        tl.store(parts + part[:, None] * DEPTH + depth, total)
        tl.debug_barrier()  # all threads have stored before one of them counts
        last = tl.atomic_add(counters + program, 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
        if last:
            tl.store(counters + program, 0)
            top = tl.full((ROWS,), -float("inf"), tl.float32)
            weight = tl.zeros((ROWS,), tl.float32)
            total = tl.zeros((ROWS, DEPTH), tl.float32)
            for each in range(SPLITS):
                part = (program * SPLITS + each) * ROWS + lane
                part_top = tl.load(tops + part, cache_modifier=".cg")
                new = tl.maximum(top, part_top)
                safe = tl.where(new == -float("inf"), 0.0, new)
                shrink, grown = tl.exp2(top - safe), tl.exp2(part_top - safe)
                part_sum = tl.load(sums + part, cache_modifier=".cg")
                part_total = tl.load(parts + part[:, None] * DEPTH + depth, cache_modifier=".cg")
                weight = weight * shrink + part_sum * grown
                total = total * shrink[:, None] + part_total * grown[:, None]
                top = new
    if last:
        some = weight != 0  # also true for NaN
        weight = tl.where(some, weight, 1.0)
        stored = inside[:, None] & (depth < D)
        normal = (total / weight[:, None]).to(o.dtype.element_ty)
        tl.store(o + place[:, None] + depth, normal, stored)
        natural = tl.where(some, (top + tl.log2(weight)) * LN_2, -float("inf"))
        lse_row = (stacked + lane % PACK).to(tl.int64) * q_tokens
        tl.store(lse + lse_row + at, natural, inside)
