"""Native sparse attention, NSA: its compressed branch, and the scores by which it selects blocks.

    K, V     block | block | block | block      mean of each block    keys, values [n, D]
    query t     complete: ends at t or before ──┐
                                                ├─> O of the compressed branch: softmax over them
    p of each head of a group over these blocks ┘─> score of a block: sum of p over the group

A program has some queries of all heads of a KV head. It walks the complete blocks twice: first for
O and the sums, then, with the sums, for p. So no p of a head is stored, and the scores are written
once, fp32 [batch, H_kv, S, n]. The block that is not complete yet has the score 0.

    select     the highest scores, by _selecting.py: the first block, a query's own and the one
               before always stay (FORCED), and all count in `keep`

Bounds: the scores' bytes, 4 S H_kv n; FLOPs, 3 products of S H queries and n / 2 keys.

Source: Yuan et al. 2025 (arXiv 2502.11089); with means, and blocks of one size for compressing and
selecting, as fla's parallel_nsa computes it. The paper learns the compression, of overlapping parts
of blocks.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import aligned, is_traced
from sparsebench.kernels._common.triton import SMALLEST_TILE, BoundKernel, Template
from sparsebench.kernels.attention._selecting import BOUND, means
from sparsebench.kernels.attention._shapes import LOG2_E
from sparsebench.kernels.attention._tiles import add_step

FORCED = {"first": 1, "last": 2}
"""Blocks that a query keeps in any case, as BlockMask.from_scores takes them."""
ROWS, STEP, WARPS = 64, 32, 4  # of a tile: queries times heads, and blocks of a step
FEW_ROWS = 32  # in fp32, and for heads of more than 128 elements


def compress(
    q: Tensor, k: Tensor, v: Tensor, block: int, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return O of the compressed branch, like q, and the scores of blocks [batch, H_kv, S, n].

    q, k, v  [batch, tokens, heads, D] of one dtype; the last query is at the last key
    bias     fp32, added to the scores of the blocks that a query sees; other scores are undefined

    A query without a complete block has O = 0. There is no gradient.
    """
    groups = k.shape[2]
    keys, values = (means(x, block, groups, q.dtype) for x in (k, v))
    operands = q, keys, values, block, k.shape[1], scale, bias
    results: tuple[Tensor, Tensor] = (_operator if is_traced() else _compress)(*operands)
    return results


def _compress(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block: int,
    tokens: int,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if q.device.type != "cuda" and not triton.knobs.runtime.interpret:
        with torch.autocast("cpu", enabled=False):  # scores are fp32
            return _in_torch(q, keys, values, block, tokens, scale, bias)
    q = aligned(q.contiguous())
    sizes = tuple(q.shape), tuple(keys.shape), q.dtype, q.device, block, tokens
    template = _launch(*sizes, scale, bias is not None)
    o, scores = template.enqueue(q, keys, values, *(() if bias is None else (bias,)))
    return o, scores


def _results(q: Tensor, keys: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, groups, blocks = keys.shape[:3]
    scores = q.new_empty(batch, groups, q.shape[1], blocks, dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), scores


_operator = torch_operator("nsa_compress", _compress, _results)


def _in_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block: int,
    tokens: int,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, queries, _, depth = q.shape
    groups, blocks = keys.shape[1:3]
    grouped = q.float().view(batch, queries, groups, -1, depth)
    scores = torch.einsum("bshgd,bhnd->bhgsn", grouped, keys.float()) * scale
    ends = torch.arange(1, blocks + 1, device=q.device) * block
    position = torch.arange(queries, device=q.device) + tokens - queries
    p = scores.masked_fill(ends > position[:, None] + 1, -torch.inf).softmax(-1)
    p = p.masked_fill((position + 1 < block)[:, None], 0)
    o = torch.einsum("bhgsn,bhnd->bshgd", p, values.float()).reshape(q.shape).to(q.dtype)
    total = p.sum(2)
    return o, total if bias is None else total + bias


@lru_cache(BOUND)
def _launch(
    shape: tuple[int, ...],
    pooled: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    block: int,
    tokens: int,
    scale: float,
    biased: bool,
) -> Template:
    """Return the launch of `compress`, which is bound once on each device."""
    q, keys = (torch.empty(size, dtype=dtype, device="meta") for size in (shape, pooled))
    values, (o, scores) = torch.empty_like(keys), _results(q, keys)
    bias = torch.empty_like(scores) if biased else None
    batch, queries, heads, d = shape
    group, depth = heads // pooled[1], triton.next_power_of_2(max(SMALLEST_TILE, d))
    large = depth * dtype.itemsize <= 256
    pack = triton.next_power_of_2(group)
    rows = max(pack, ROWS if large else FEW_ROWS)
    sizes = queries, tokens, pooled[2], heads, pooled[1], scale * LOG2_E
    constants = {"D": d, "DEPTH": depth, "SIDE": block, "STEP": STEP, "GROUP": group}
    constants |= {"PACK": pack, "TOKENS": rows // pack, "num_warps": WARPS}
    grid = (batch * pooled[1] * triton.cdiv(queries, rows // pack),)
    args = q, keys, values, bias, o, scores, *sizes
    operands = (q, keys, values) if bias is None else (q, keys, values, bias)
    return Template([BoundKernel(_walk, grid, args, constants, o)], operands, [o, scores])


@triton.jit  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    q, keys, values, bias, o, scores, queries, tokens, blocks, heads, kv_heads, scale,
    D: tl.constexpr, DEPTH: tl.constexpr, SIDE: tl.constexpr, STEP: tl.constexpr,
    GROUP: tl.constexpr, PACK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write O and the scores of some queries of a KV head; those that see most start first."""
    ROWS: tl.constexpr = TOKENS * PACK
    tiles = tl.cdiv(queries, TOKENS)
    unit, tile = tl.program_id(0) // tiles, tiles - 1 - tl.program_id(0) % tiles
    sequence, kv_head = unit // kv_heads, unit % kv_heads
    lane = tl.arange(0, ROWS)
    token, member = tile * TOKENS + lane // PACK, lane % PACK
    inside = (token < queries) & (member < GROUP)
    shift = tokens - queries
    complete = tl.maximum(token + shift + 1, 0) // SIDE
    last = tl.minimum((tile + 1) * TOKENS, queries) - 1 + shift  # key of the last query
    most = tl.maximum(last + 1, 0) // SIDE
    depth = tl.arange(0, DEPTH)[None, :]
    line = ((sequence * queries + token).to(tl.int64) * heads + kv_head * GROUP + member) * D
    stored = inside[:, None] & (depth < D)
    q_tile = tl.load(q + line[:, None] + depth, stored, 0.0)
    lane = tl.arange(0, STEP)
    keys += (unit * blocks).to(tl.int64) * D
    values += (unit * blocks).to(tl.int64) * D

    top = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for first in tl.range(0, most, STEP, num_stages=2):
        block = first + lane
        at, there = block[:, None] * D + depth, (block < blocks)[:, None] & (depth < D)
        k_tile, v_tile = tl.load(keys + at, there, 0.0), tl.load(values + at, there, 0.0)
        products = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        products = tl.where(block[None, :] < complete[:, None], products, -float("inf"))
        top, weight, total = add_step(products, v_tile, scale, top, weight, total, True)
    some = weight != 0  # also true for NaN
    weight = tl.where(some, weight, 1.0)
    tl.store(o + line[:, None] + depth, (total / weight[:, None]).to(o.dtype.element_ty), stored)

    log = tl.where(some, top + tl.log2(weight), 0.0)
    query = tile * TOKENS + tl.arange(0, TOKENS)
    row = (unit * queries + query).to(tl.int64) * blocks
    end = tl.minimum(tl.maximum(last + SIDE, 0) // SIDE, blocks)  # blocks that the last query sees
    for first in tl.range(0, end, STEP, num_stages=2):
        block = first + lane
        there = (block < blocks)[:, None] & (depth < D)
        k_tile = tl.load(keys + block[:, None] * D + depth, there, 0.0)
        products = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        usable = (block[None, :] < complete[:, None]) & inside[:, None]
        p = tl.where(usable, tl.exp2(products * scale - log[:, None]), 0.0)
        score = tl.sum(tl.reshape(p, (TOKENS, PACK, STEP)), 1)
        to = row[:, None] + block[None, :]
        seen = (query < queries)[:, None] & (block < end)[None, :]
        if bias is not None:
            score += tl.load(bias + to, seen, 0.0)
        tl.store(scores + to, score, seen)
