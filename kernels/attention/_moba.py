"""Mixture of block attention, MoBA: the scores by which each query and head selects blocks.

    score of query t, head h, block j = q[t, h] . mean of k over block j     fp32 [batch, H, S, n]

    select     the highest scores, by _selecting.py: a query's own block always stays (FORCED) and
               counts in `keep`; blocks behind it are not seen

The means are rounded to the dtype of q, as MoBA's own code rounds them, and products are summed in
fp32. The last block has the mean of its real tokens.

Bound: the scores' bytes, 4 S H n.

Source: Lu et al. 2025 (arXiv 2502.13189), moba/moba_naive.py of MoonshotAI/MoBA.
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

FORCED = {"first": 0, "last": 1}
"""Blocks that a query keeps in any case, as BlockMask.from_scores takes them."""
TOKENS, STEP, WARPS = 64, 128, 4  # queries of a tile, and blocks of a step
TILES, PROGRAMS = 4, 2048  # most tiles of a program, and programs that must remain


def score_blocks(q: Tensor, k: Tensor, block: int, bias: Tensor | None = None) -> Tensor:
    """Return the scores of blocks, fp32 [batch, H, S, n].

    q, k  [batch, tokens, heads, D] of one dtype; the last query is at the last key
    bias  fp32, added to the scores of the blocks that a query sees; other scores are undefined

    There is no gradient.
    """
    keys = means(k, block, k.shape[2], q.dtype)
    operands = q, keys, block, k.shape[1], bias
    scores: Tensor = (_operator if is_traced() else _score_blocks)(*operands)
    return scores


def _score_blocks(q: Tensor, keys: Tensor, block: int, tokens: int, bias: Tensor | None) -> Tensor:
    if q.device.type != "cuda" and not triton.knobs.runtime.interpret:
        grouped = q.float().unflatten(2, (keys.shape[1], -1))
        with torch.autocast("cpu", enabled=False):  # scores are fp32
            products = torch.einsum("bshgd,bhnd->bhgsn", grouped, keys.float()).flatten(1, 2)
        return products if bias is None else products + bias
    q = aligned(q.contiguous())
    sizes = tuple(q.shape), tuple(keys.shape), q.dtype, q.device, block, tokens
    template = _launch(*sizes, bias is not None)
    return template.enqueue(q, keys, *(() if bias is None else (bias,)))[0]


def _scores(q: Tensor, keys: Tensor, *_: object) -> Tensor:
    batch, queries, heads = q.shape[:3]
    return q.new_empty(batch, heads, queries, keys.shape[2], dtype=torch.float32)


_operator = torch_operator("moba_scores", _score_blocks, _scores)


@lru_cache(BOUND)
def _launch(
    shape: tuple[int, ...],
    pooled: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    block: int,
    tokens: int,
    biased: bool,
) -> Template:
    """Return the launch of `score_blocks`, which is bound once on each device."""
    q, keys = (torch.empty(size, dtype=dtype, device="meta") for size in (shape, pooled))
    scores = _scores(q, keys)
    bias = torch.empty_like(scores) if biased else None
    batch, queries, heads, d = shape
    depth = triton.next_power_of_2(max(SMALLEST_TILE, d))
    step = min(STEP, max(SMALLEST_TILE, triton.next_power_of_2(pooled[2])))
    step = step if depth * dtype.itemsize <= 256 else min(step, STEP // 4)
    tiles = triton.cdiv(queries, TOKENS)
    span = min(max(batch * heads * tiles // PROGRAMS, 1), TILES)
    sizes = queries, tokens, pooled[2], heads, pooled[1]
    constants = {"D": d, "DEPTH": depth, "SIDE": block, "STEP": step}
    constants |= {"TOKENS": TOKENS, "TILES": span, "num_warps": WARPS}
    grid = (batch * heads * triton.cdiv(tiles, span),)
    program = BoundKernel(_score, grid, (q, keys, bias, scores, *sizes), constants, scores)
    return Template([program], (q, keys) if bias is None else (q, keys, bias), [scores])


@triton.jit  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def]
    q, keys, bias, scores, queries, tokens, blocks, heads, kv_heads,
    D: tl.constexpr, DEPTH: tl.constexpr, SIDE: tl.constexpr, STEP: tl.constexpr,
    TOKENS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the scores of TILES tiles of queries of a head, of the blocks that each tile sees."""
    spans = tl.cdiv(queries, TOKENS * TILES)
    unit, span = tl.program_id(0) // spans, tl.program_id(0) % spans
    sequence, head = unit // heads, unit % heads
    depth, shift = tl.arange(0, DEPTH)[None, :], tokens - queries
    of_head = (sequence * kv_heads + head // (heads // kv_heads)) * blocks
    keys += of_head.to(tl.int64) * D
    begin, end = span * TILES, tl.minimum((span + 1) * TILES, tl.cdiv(queries, TOKENS))
    last = tl.minimum(end * TOKENS, queries) - 1 + shift
    most = tl.minimum(tl.maximum(last + SIDE, 0) // SIDE, blocks)
    for first in tl.range(0, most, STEP):
        block = first + tl.arange(0, STEP)
        there = (block < blocks)[:, None] & (depth < D)
        k_tile = tl.load(keys + block[:, None] * D + depth, there, 0.0)
        # the first tile whose last query sees a block of this step
        sees = tl.maximum(begin, tl.maximum(first * SIDE - shift, 0) // TOKENS)
        for tile in tl.range(sees, end, num_stages=3):
            query = tile * TOKENS + tl.arange(0, TOKENS)
            inside = query < queries
            line = ((sequence * queries + query).to(tl.int64) * heads + head) * D
            q_tile = tl.load(q + line[:, None] + depth, inside[:, None] & (depth < D), 0.0)
            score = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            last = tl.minimum((tile + 1) * TOKENS, queries) - 1 + shift
            seen = inside[:, None] & (block < tl.maximum(last + SIDE, 0) // SIDE)[None, :]
            seen = seen & (block < blocks)[None, :]
            to = (unit * queries + query).to(tl.int64)[:, None] * blocks + block[None, :]
            if bias is not None:
                score += tl.load(bias + to, seen, 0.0)
            tl.store(scores + to, score, seen)
