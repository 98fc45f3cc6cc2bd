"""Gradients of block-sparse attention in Triton: dQ over the lists, dK and dV over the transpose.

Two kernels, without atomics, so the same operands give the same bits:

    dQ      a program computes a tile of queries, as the forward kernel does (attention_triton.py)
              S = Q K.T    P = exp2(scale S - LSE)    dP = dO V.T    dS = P (dP - delta)
              dQ += dS K                              delta = sum(O dO), kept for the next kernel
    dK, dV  a program computes a tile of keys, and walks the lists of all query heads of its group
              S.T = K Q.T    P.T    dV += P.T dO    dP.T = V dO.T    dK += dS.T Q

Both compute S and dP, so they do 14 D operations for each allowed element, of which 10 count. Each
block of the transposed list is read by its own lanes, as in _tiles.py, so blocks have any side.
Missing queries have an LSE of infinity, which makes their P zero.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.triton import BoundKernel, Path, Template
from sparsebench.kernels.attention._call import AttentionCall, ListedMask, attention_engine
from sparsebench.kernels.attention._shapes import (
    LOG2_E,
    bound_kernel,
    by_head,
    head_box,
    query_config,
    query_tiles,
    tiles_that_fit,
    unsupported,
)
from sparsebench.kernels.attention._shapes import Config as TileConfig
from sparsebench.kernels.attention._tiles import (
    column_of,
    list_of,
    load_rows,
    load_step,
    mask_of,
    rows_of,
)
from sparsebench.kernels.attention.attention_triton import code_of, matrices, path_of, refuse_path

LOG2 = tl.constexpr(LOG2_E)  # of the natural base, in which the LSE is

# rows, columns of a step, warps and stages of a tile; the default first
DQ = [(64, 64, 4, 3), (64, 64, 4, 2)]
DKV = [(64, 32, 4, 3), (64, 64, 4, 2)]
FLAT = [(32, 64, 2, 2), (32, 32, 2, 3), (16, 16, 2, 3), (16, 16, 1, 3), (16, 64, 2, 2)]


@dataclass(frozen=True)
class Config:
    """One way to run both kernels.

    q_tokens, q_pack    queries and heads of a tile of dQ; q_keys: keys of a step
    kv_keys, kv_tokens  keys of a tile of dK and dV; queries of a step
    """

    q_tokens: int
    q_pack: int
    q_keys: int
    q_stages: int
    q_warps: int
    q_path: Path
    kv_keys: int
    kv_tokens: int
    kv_stages: int
    kv_warps: int
    kv_path: Path

    @property
    def dq(self) -> TileConfig:
        return TileConfig(*astuple(self)[:6])

    @property
    def dkv(self) -> TileConfig:
        step = self.kv_keys, self.kv_stages, self.kv_warps, self.kv_path
        return TileConfig(self.kv_tokens, 1, *step)


def choices(w: ListedMask, call: AttentionCall) -> list[Config]:
    """Return the configurations to try, the default first."""
    shape, shared, path = call.shape, w.shared(call.shape), path_of(w, call)
    tiles = tiles_that_fit(shape, shape.tile_side * shared, DQ, FLAT)
    dq = [astuple(query_config(shape, shared, tile, path))[:6] for tile in tiles]
    dkv: list[tuple[Any, ...]] = [
        (keys, tokens, stages, warps, path if shape.block[0] % tokens == 0 else "pointers")
        for keys, tokens, warps, stages in tiles_that_fit(shape, shape.block[1], DKV, FLAT)
    ]
    longest = max(len(dq), len(dkv))
    pairs = [(dq[min(i, len(dq) - 1)], dkv[min(i, len(dkv) - 1)]) for i in range(longest)]
    crossed = [(dq[0], dkv[-1]), (dq[-1], dkv[0])]
    return list(dict.fromkeys(Config(*q, *kv) for q, kv in (*pairs, *crossed)))


def plan(w: ListedMask, call: AttentionCall, config: Config) -> Product:
    """Sort the lists and those of the transpose, and compile."""
    refuse_path(w, call, config.q_path, config.kv_path)
    shape, scale, mask, rows = call.shape, call.scale, w.mask, w.lists
    q, k, v, o, do = (by_head(x, shape) for x in matrices(call))
    lse = q.new_empty(shape.batch * shape.heads, shape.q_tokens, dtype=torch.float32)
    results = call.gradients(q, None)
    out, (dq, dk, dv) = results[0], results
    delta = torch.empty_like(lse)
    tile = config.dq
    box, kv_box = (tile.tokens, tile.pack), (tile.keys, 1)
    first = bound_kernel(
        _dq,
        query_tiles(shape, tile),
        (
            *(head_box(x, shape, box, tile.path) for x in (q, o, do)),
            *(head_box(x, shape, kv_box, tile.path) for x in (k, v)),
            *(dq, lse, delta),
        ),
        (rows, mask, shape, scale),
        *(tile, out),
        masked=rows.masked or shape.block[1] % tile.keys != 0,
    )
    tensors = q, do, k, v, dk, dv, lse, delta
    second = bound_dkv(w, call, config.dkv, tensors, out, before=first)
    template = Template([second], (q, k, v, o, lse, do), results)

    def run(*operands: Tensor, out: Tensor | None = None) -> list[Tensor]:
        if is_capturing(operands[0]):
            keep(template)
        return template(*operands, out=call.gradients(operands[0], out))

    return Product(run, code_of(second, mask.columns.device))


def bound_dkv(
    w: ListedMask,
    call: AttentionCall,
    tile: TileConfig,
    tensors: Sequence[Tensor],
    out: Tensor,
    before: BoundKernel | None = None,
) -> BoundKernel:
    """Return the kernel of dK and dV.

    tensors  q, do, k, v, dk, dv, lse and delta, which `before` may write
    """
    shape, lists = call.shape, w.transposed(call.shape.kv_heads)
    q, do, k, v, *rest = tensors
    box, kv_box = (tile.tokens, 1), (tile.keys, 1)
    tiles = triton.cdiv(min(shape.block[1], shape.kv_tokens), tile.keys)  # of a block
    return bound_kernel(
        _dkv,
        lists.order.numel() * tiles,
        (
            *(head_box(x, shape, box, tile.path) for x in (q, do)),
            *(head_box(x, shape, kv_box, tile.path) for x in (k, v)),
            *rest,
        ),
        (lists, w.mask, shape, call.scale),
        *(tile, out),
        masked=lists.masked or shape.block[0] % tile.tokens != 0,
        before=before,
    )


KERNEL = attention_engine(
    "attention_triton_backward", "attention_backward", choices, plan, unsupported, Config
)


@triton.jit  # type: ignore[untyped-decorator]
def _dq(  # type: ignore[no-untyped-def]
    q, o, do, k, v, dq, lse, delta,
    offsets, columns, fulls, order, slots, bits,
    q_tokens, kv_tokens, heads, kv_heads, lists, scale,
    D: tl.constexpr, DEPTH: tl.constexpr, Q_SIDE: tl.constexpr, KV_SIDE: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    TOKENS: tl.constexpr, PACK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    stacked, sequence, head, row, token, at, inside, place = rows_of(
        tl.program_id(0), order, q_tokens, heads, lists, D, Q_SIDE, TOKENS, PACK
    )
    kv_head = head // (heads // kv_heads)
    start, count, whole = list_of(offsets, columns, fulls, row, kv_tokens, KV_SIDE, KEYS)
    end = tl.cdiv(count * KV_SIDE, KEYS)
    depth = tl.arange(0, DEPTH)[None, :]
    stored = inside[:, None] & (depth < D)
    at_q = sequence, token, head, place, stored
    q_tile = load_rows(q, *at_q, DEPTH, TMA)
    o_tile = load_rows(o, *at_q, DEPTH, TMA)
    do_tile = load_rows(do, *at_q, DEPTH, TMA)
    lse_row = (stacked + tl.arange(0, TOKENS * PACK) % PACK).to(tl.int64) * q_tokens + at
    top = tl.load(lse + lse_row, inside, float("inf")) * LOG2
    sums = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + lse_row, sums, inside)

    total = tl.zeros((TOKENS * PACK, DEPTH), tl.float32)
    column = column_of(columns, start, count, 0, KV_SIDE, KEYS)
    for MASK in tl.static_range(MASKED + 1):
        for i in tl.range(whole if MASK else 0, end if MASK else whole, num_stages=STAGES):
            at_k = k, v, sequence, kv_tokens, kv_head, kv_heads, column, i
            k_tile, v_tile, key = load_step(*at_k, D, DEPTH, KV_SIDE, KEYS, TMA, not MASK)
            if MASK:
                at_mask = at[:, None], key[None, :], column, start, i, slots, bits, q_tokens
                allowed = mask_of(*at_mask, kv_tokens, Q_SIDE, KV_SIDE, KV_SIDE, KEYS, CAUSAL)
            column = column_of(columns, start, count, i + 1, KV_SIDE, KEYS)
            scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
            p = tl.exp2(scores * (scale * LOG2) - top[:, None])
            if MASK:
                p = tl.where(allowed, p, 0.0)
            ds = (p * (dp - sums[:, None])).to(k_tile.dtype)
            total = tl.dot(ds, k_tile, total, input_precision="ieee")
    tl.store(dq + place[:, None] + depth, (total * scale).to(dq.dtype.element_ty), stored)


@triton.jit  # type: ignore[untyped-decorator]
def _dkv(  # type: ignore[no-untyped-def]
    q, do, k, v, dk, dv, lse, delta,
    offsets, columns, fulls, order, slots, bits,
    q_tokens, kv_tokens, heads, kv_heads, lists, scale,
    D: tl.constexpr, DEPTH: tl.constexpr, Q_SIDE: tl.constexpr, KV_SIDE: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    TOKENS: tl.constexpr, PACK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # a program computes keys of one key head; each has an order of its own
    _, sequence, kv_head, _, key, keys, inside, place = rows_of(
        tl.program_id(0), order, kv_tokens, kv_heads, kv_heads, D, KV_SIDE, KEYS, PACK
    )
    depth = tl.arange(0, DEPTH)[None, :]
    stored = inside[:, None] & (depth < D)
    at_k = sequence, key, kv_head, place, stored
    k_tile = load_rows(k, *at_k, DEPTH, TMA)
    v_tile = load_rows(v, *at_k, DEPTH, TMA)

    dk_sum = tl.zeros((KEYS, DEPTH), tl.float32)
    dv_sum = tl.zeros((KEYS, DEPTH), tl.float32)
    group = heads // kv_heads
    for head in range(kv_head * group, (kv_head + 1) * group):
        list_ = sequence * lists + head * lists // heads
        row = list_ * tl.cdiv(kv_tokens, KV_SIDE) + key // KV_SIDE
        start, count, whole = list_of(offsets, columns, fulls, row, q_tokens, Q_SIDE, TOKENS)
        end = tl.cdiv(count * Q_SIDE, TOKENS)
        lse_row = (sequence * heads + head).to(tl.int64) * q_tokens
        column = column_of(columns, start, count, 0, Q_SIDE, TOKENS)
        for MASK in tl.static_range(MASKED + 1):
            for i in tl.range(whole if MASK else 0, end if MASK else whole, num_stages=STAGES):
                at_q = q, do, sequence, q_tokens, head, heads, column, i
                q_tile, do_tile, at = load_step(*at_q, D, DEPTH, Q_SIDE, TOKENS, TMA, False)
                real = (at >= 0) & (at < q_tokens) if MASK else at < q_tokens
                top = tl.load(lse + lse_row + at, real, float("inf")) * LOG2
                sums = tl.load(delta + lse_row + at, real, 0.0)
                if MASK:
                    at_mask = at[None, :], keys[:, None], column, start, i, slots, bits, q_tokens
                    allowed = mask_of(*at_mask, kv_tokens, Q_SIDE, KV_SIDE, Q_SIDE, TOKENS, CAUSAL)
                column = column_of(columns, start, count, i + 1, Q_SIDE, TOKENS)
                scores = tl.dot(k_tile, q_tile.T, input_precision="ieee")
                dp = tl.dot(v_tile, do_tile.T, input_precision="ieee")
                p = tl.exp2(scores * (scale * LOG2) - top[None, :])
                if MASK:
                    p = tl.where(allowed, p, 0.0)
                dv_sum = tl.dot(p.to(do_tile.dtype), do_tile, dv_sum, input_precision="ieee")
                ds = (p * (dp - sums[None, :])).to(q_tile.dtype)
                dk_sum = tl.dot(ds, q_tile, dk_sum, input_precision="ieee")
    tl.store(dk + place[:, None] + depth, (dk_sum * scale).to(dk.dtype.element_ty), stored)
    tl.store(dv + place[:, None] + depth, dv_sum.to(dv.dtype.element_ty), stored)
