"""Block-sparse attention in Triton: O = softmax(scale Q K.T) V over the blocks of a mask.

A program computes a tile of O, `tokens` queries of `pack` heads, and walks the list of its row:

            K, V of one key head                             tile of O
        +-----+-----+-----+-----+-----+           heads that share a list and a key head
     b_q|  #  |     |  #p |     |  #  |              +-----------+-----------+
        +-----+-----+-----+-----+-----+       tokens | token, h0 | token, h1 | ...
          full blocks first: 0 4, then 2p            +-----------+-----------+

Packed heads share each load of K and V. A block may have any side: steps of keys are cut from the
blocks of a list laid end to end, so four blocks of 16 make a step of 64 (_tiles.py). Only blocks in
the list are read, so a NaN in another block does not reach O.

    S = Q K.T                   a step of `keys` columns
    p = exp2(scale S - top)     top: largest scaled score of a row so far, in units of log2
    O = O * shrink + p V        shrink = exp2(old top - new top)
    LSE = ln 2 (top + log2 sum p)

A row without an allowed element has O = 0 and LSE = -inf. Rows with many blocks start first. Heads
are outermost, so that the L2 cache holds K and V of the few heads in flight.

attention_split.py runs the same kernel with several programs for each list.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.machine_code import digest
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.triton import (
    BoundKernel,
    Path,
    Template,
    choose_path,
    unsupported_row,
)
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.attention._call import AttentionCall, ListedMask, attention_engine
from sparsebench.kernels.attention._shapes import (
    LOG2_E,
    Config,
    bound_kernel,
    by_head,
    head_box,
    query_config,
    query_tiles,
    tiles_that_fit,
    unsupported,
)
from sparsebench.kernels.attention._tiles import (
    add_step,
    column_of,
    list_of,
    load_rows,
    load_step,
    mask_of,
    rows_of,
)

LN_2 = tl.constexpr(1 / LOG2_E)

# rows of queries, keys, warps and stages of a tile; the default first
TILES = [(64, 64, 4, 3), (128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2)]
FLAT = [
    *((32, 32, 2, 3), (32, 32, 1, 3), (32, 64, 2, 3)),
    *((16, 16, 1, 3), (16, 32, 1, 3), (16, 64, 1, 3)),
]
SMALL_BOX = 16  # keys of a TMA box that may be slower than loads by pointers


def choices(w: ListedMask, call: AttentionCall) -> list[Config]:
    """Return the configurations to try, the default first."""
    shape, shared, path = call.shape, w.shared(call.shape), path_of(w, call)
    tiles = tiles_that_fit(shape, shape.tile_side * shared, TILES, FLAT)
    configs = [
        replace(config, path=way)
        for config in (query_config(shape, shared, tile, path) for tile in tiles)
        for way in ((config.path, "pointers") if config.keys <= SMALL_BOX else (config.path,))
    ]
    return list(dict.fromkeys(configs))


def path_of(w: ListedMask, call: AttentionCall) -> Path:
    """Return the path by which heads are read."""
    reason = unsupported_row(call.shape.head_dim, call.shape.itemsize)
    return choose_path(reason, w.mask.columns.device)


def plan(w: ListedMask, call: AttentionCall, config: Config) -> Product:
    """Sort the lists and compile; launches of a plan with splits must not overlap."""
    refuse_path(w, call, config.path)
    shape, lists, device = call.shape, w.lists, w.mask.columns.device
    q, k, v = inputs = [by_head(x, shape) for x in matrices(call)[:3]]
    o = torch.empty_like(matrices(call)[0])
    lse = q.new_empty(shape.batch * shape.heads, shape.q_tokens, dtype=torch.float32)
    tiles, splits = query_tiles(shape, config), config.splits
    q_box, kv_box = (config.tokens, config.pack), (config.keys, 1)
    merge: tuple[Tensor | int | None, ...] = (None,) * 5
    if splits:
        sums = q.new_empty(2, tiles, splits, config.tokens * config.pack, dtype=torch.float32)
        parts = q.new_empty(*sums.shape[1:], shape.depth, dtype=torch.float32)
        counters = lists.offsets.new_zeros(tiles)  # they stay with the plan
        merge = lists.blocks_per_row, parts, *sums, counters
    program = bound_kernel(
        _forward,
        tiles * max(1, splits),
        (
            q if splits else head_box(q, shape, q_box, config.path),
            *(head_box(matrix, shape, kv_box, config.path) for matrix in (k, v)),
            *(o, lse, *merge),
        ),
        (lists, w.mask, shape, call.scale * LOG2_E),
        *(config, o),
        masked=lists.masked or shape.block[1] % config.keys != 0,
        SPLITS=splits,
    )
    template = Template([program], inputs, [o, lse])

    def run(*operands: Tensor, out: Tensor | None = None) -> list[Tensor]:
        results = template(*operands, out=() if out is None else (out,))
        if is_capturing(results[0]):
            keep(template)
        return results

    return Product(run, code_of(program, device))


def refuse_path(w: ListedMask, call: AttentionCall, *paths: str) -> None:
    """Raise Unsupported if a configuration reads by TMA what TMA cannot read."""
    if "tma" in paths and path_of(w, call) != "tma":
        refuse("expected the path pointers, found tma")


def matrices(call: AttentionCall) -> list[Tensor]:
    """Return q, k, v, o and do, token-major, without data (device meta)."""
    shape = call.shape
    of_q = shape.batch * shape.q_tokens, shape.heads * shape.head_dim
    of_k = shape.batch * shape.kv_tokens, shape.kv_heads * shape.head_dim
    sizes = of_q, of_k, of_k, of_q, of_q
    return [torch.empty(size, dtype=call.dtype, device="meta") for size in sizes]


def code_of(program: BoundKernel, device: torch.device) -> str | None:
    """Compile a kernel for a GPU now, and return the digest of its code; None if interpreted."""
    return digest(*program.binaries()) if device.type == "cuda" else None


KERNEL = attention_engine("attention_triton", "attention", choices, plan, unsupported, Config)


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, o, lse, blocks_per_row, parts, sums, tops, counters,
    offsets, columns, fulls, order, slots, bits,
    q_tokens, kv_tokens, heads, kv_heads, lists, scale,
    D: tl.constexpr, DEPTH: tl.constexpr, Q_SIDE: tl.constexpr, KV_SIDE: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    TOKENS: tl.constexpr, PACK: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TOKENS * PACK
    PROGRAMS: tl.constexpr = SPLITS if SPLITS else 1  # of each list
    program, split = tl.program_id(0) // PROGRAMS, tl.program_id(0) % PROGRAMS
    stacked, sequence, head, row, token, at, inside, place = rows_of(
        program, None if SPLITS else order, q_tokens, heads, lists, D, Q_SIDE, TOKENS, PACK
    )
    kv_head = head // (heads // kv_heads)
    if blocks_per_row is None:
        start, count, whole = list_of(offsets, columns, fulls, row, kv_tokens, KV_SIDE, KEYS)
    else:
        start, count = row * blocks_per_row, blocks_per_row
    first, end = 0, tl.cdiv(count * KV_SIDE, KEYS)
    if SPLITS:
        first, end = split * end // SPLITS, (split + 1) * end // SPLITS
        whole = first if MASKED else end
    column = column_of(columns, start, count, first, KV_SIDE, KEYS)
    depth = tl.arange(0, DEPTH)[None, :]
    stored = inside[:, None] & (depth < D)
    q_tile = load_rows(q, sequence, token, head, place, stored, DEPTH, TMA and SPLITS == 0)

    top = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for MASK in tl.static_range(MASKED + 1):
        for i in tl.range(whole if MASK else first, end if MASK else whole, num_stages=STAGES):
            at_k = k, v, sequence, kv_tokens, kv_head, kv_heads, column, i
            k_tile, v_tile, key = load_step(*at_k, D, DEPTH, KV_SIDE, KEYS, TMA, not MASK)
            if MASK:
                at_mask = at[:, None], key[None, :], column, start, i, slots, bits, q_tokens
                allowed = mask_of(*at_mask, kv_tokens, Q_SIDE, KV_SIDE, KV_SIDE, KEYS, CAUSAL)
            column = column_of(columns, start, count, i + 1, KV_SIDE, KEYS)
            scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            if MASK:
                scores = tl.where(allowed, scores, -float("inf"))
            top, weight, total = add_step(scores, v_tile, scale, top, weight, total, MASK)

    lane = tl.arange(0, ROWS)
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
        total = total / weight[:, None]
        tl.store(o + place[:, None] + depth, total.to(o.dtype.element_ty), stored)
        natural = tl.where(some, (top + tl.log2(weight)) * LN_2, -float("inf"))
        lse_row = (stacked + lane % PACK).to(tl.int64) * q_tokens
        tl.store(lse + lse_row + at, natural, inside)
