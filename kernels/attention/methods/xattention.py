"""XAttention: softmax weights of every `stride`-th antidiagonal, added up over blocks.

             keys of j        A strided query i has the tokens i s ... i s + s - 1, a strided key j
           +---------+        those from j s on. A logit adds up an antidiagonal of their products:
    tokens | . . . / |
    of i   | . . / . |        l[i, j] = f · sum over r of q[i s + s - 1 - r] · k[j s + r]
           | . / . . |        P       = softmax of l over the strided keys that i sees, in fp32
           | / . . . |        B[I, J] = sum of P over the strided tokens of two blocks
           +---------+        scores  = log B, so a `mass` is a share of a row of B

The factor f is scale / (s · norm).

With the causal rule, i sees j if its last token sees the first one of j. A token beyond the end
adds 0, and strided queries and keys without any token are left out. The first and the last block
of a row are kept whatever their weight, and count in the mass. Each query head has a list. A NaN in
a key makes every score NaN whose queries see it, so only these two blocks are kept.

Two kernels compute it. `_weigh` has a program for each tile of strided queries and keys. The tile
is a product whose depth is s D, and the program stores its log-sum-exp for each query and block of
keys. `_add_up` normalises these and adds them up over a block of queries.

Bounds, for H heads and S tokens, causal:
    FLOPs   H D S² / s: at 16k and 64k tokens, 32 heads of 128 and s = 16, 69 and 1100 GFLOP, so
            0.10 and 1.6 ms at 680 TFLOP/s
    bytes   a log-sum-exp for each strided query and block of keys, written and read:
            4 H S² / (s b), 17 and 268 MB each way, of which the first stays in L2
torch would copy Q and K into strided rows, 0.4 and 1.7 GB with K repeated for each query head, and
move the logits l four times, 0.5 and 8.6 GB: together 0.23 and 2.5 ms at 4.2 TB/s.
Source: arXiv 2503.16428, and xattn_estimate in xattn/src/Xattention.py of mit-han-lab/x-attention.
"""

from functools import lru_cache
from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import ALIGNMENT, aligned, is_traced
from sparsebench.kernels._common.triton import BoundKernel, Template
from sparsebench.kernels.attention._selecting import BOUND
from sparsebench.kernels.attention._shapes import LOG2_E
from sparsebench.kernels.attention.methods._method import Method, Scored

TILE = 128  # strided queries, and strided keys, of a program
BYTES = 128  # of a token in a step of the product
STAGES, WARPS = 3, 8  # 96 KB of shared memory, so two programs on an SM of an H100
WEIGHTS, BLOCKS = 2048, 128  # weights, and blocks of keys at most, that `_add_up` has at a time
LN_2 = tl.constexpr(log(2))


def score(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    block: int,
    causal: bool,
    bias: Tensor | None = None,
    stride: int = 16,
    norm: float = 1.0,
) -> Scored:
    """Return a list for each query head.

    stride  tokens between two antidiagonals, a divisor of the block
    norm    what the logits are divided by, besides the stride
    """
    if not (type(stride) is int and stride > 0 and block % stride == 0 and block <= TILE * stride):
        expected = f"a divisor of the block of {block}, from {-(-block // TILE)} on"
        raise Unsupported(f"xattention: stride: expected {expected}, found {stride!r}")
    if not 0 < norm < torch.inf:
        raise Unsupported(f"xattention: norm: expected a number above 0, found {norm!r}")
    operands = q.detach(), k.detach(), block, stride, causal, scale / (stride * norm)
    scores = (_operator if is_traced() else _scores)(*operands)
    return Scored(scores if bias is None else scores + bias, q, k, v)


def _scores(q: Tensor, k: Tensor, block: int, stride: int, causal: bool, factor: float) -> Tensor:
    """Return the scores of q [batch, S_q, H, D] and k [batch, S_kv, H_kv, D]."""
    if q.device.type != "cuda" and not triton.knobs.runtime.interpret:
        return _in_torch(q, k, block, stride, causal, factor)
    q, k = (x if x.stride(3) == 1 and not x.data_ptr() % ALIGNMENT else aligned(x) for x in (q, k))
    layouts = ((tuple(x.shape), tuple(x.stride())) for x in (q, k))
    template = _launch(*layouts, q.dtype, q.device, block, stride, causal, factor)
    return template.enqueue(q, k)[0]


def _sizes(q: Tensor, k: Tensor, block: int, stride: int, causal: bool, factor: float) -> Tensor:
    blocks = (-(-x.shape[1] // block) for x in (q, k))
    return q.new_empty(q.shape[0], q.shape[2], *blocks, dtype=torch.float32)


_operator = torch_operator("antidiagonal_scores", _scores, _sizes)


def _in_torch(q: Tensor, k: Tensor, block: int, stride: int, causal: bool, factor: float) -> Tensor:
    """Return the scores on a CPU, with every logit at once."""
    (_, queries, heads, _), keys = q.shape, k.shape[1]
    k = k.repeat_interleave(heads // k.shape[2], 2)
    pads = ((0, 0, 0, 0, 0, -x.shape[1] % block) for x in (q, k))
    q, k = (torch.nn.functional.pad(x.float(), pad) for x, pad in zip((q, k), pads, strict=True))
    rows, columns = (x.unflatten(1, (-1, stride)).permute(0, 3, 1, 2, 4) for x in (q, k))
    logits = rows.flip(3).flatten(3) @ columns.flatten(3).mT * factor
    first = torch.arange(0, k.shape[1], stride, device=k.device)
    row = torch.arange(0, q.shape[1], stride, device=q.device)
    reach = (row + stride).clamp(max=queries) - 1 + keys - queries if causal else row * 0 + keys - 1
    seen = (first < keys) & (first <= reach[:, None]) & (row < queries)[:, None]
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0)
    tiles = weights.unflatten(3, (-1, block // stride)).unflatten(2, (-1, block // stride))
    scores: Tensor = tiles.sum((3, 5)).log()
    return scores


@lru_cache(BOUND)
def _launch(
    of_q: tuple[tuple[int, ...], tuple[int, ...]],
    of_k: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    block: int,
    stride: int,
    causal: bool,
    factor: float,
) -> Template:
    """Return both launches, which are bound once on each device."""
    q, k = (torch.empty_strided(*layout, dtype=dtype, device="meta") for layout in (of_q, of_k))
    (batch, queries, heads, d), (keys, kv_heads) = q.shape, k.shape[1:3]
    out = _sizes(q, k, block, stride, causal, factor)
    per = block // stride  # strided tokens of a block
    width = triton.next_power_of_2(per)
    rows, blocks, short = triton.cdiv(queries, stride), out.shape[3], q.element_size() < 4
    tile = TILE if short else max(TILE // 2, width)  # larger ones spill on an A100
    tiles = triton.cdiv(rows, tile), triton.cdiv(blocks, tile // width)
    parts = q.new_empty(batch * heads, rows, blocks, dtype=torch.float32)
    depth = max(16, min(BYTES // q.element_size(), triton.next_power_of_2(d)))
    sizes = {"STRIDE": stride, "PER": per, "WIDTH": width, "CAUSAL": causal}
    constants = {**sizes, "D": d, "DEPTH": depth, "TILE": tile, "FACTOR": factor * LOG2_E}
    constants |= {"PRECISION": None if short else "tf32x3"}
    constants |= {"num_warps": WARPS if short else 4, "STAGES": STAGES}
    args = q, k, parts, queries, keys, heads, heads // kv_heads, rows, blocks, tiles[1]
    strides = *q.stride()[:3], *k.stride()[:3]
    grid = (batch * heads * tiles[0] * tiles[1],)
    weigh = BoundKernel(_weigh, grid, (*args, *strides), constants, parts)
    constants = {**sizes, "BLOCKS": min(BLOCKS, WEIGHTS // width), "num_warps": 4}
    sizes_of_rows = parts, out, queries, keys, rows, out.shape[2], blocks
    grid = (batch * heads * out.shape[2],)
    add_up = BoundKernel(_add_up, grid, sizes_of_rows, constants, out, weigh)
    return Template([add_up], (q, k), [out])


@triton.jit  # type: ignore[untyped-decorator]
def _reach(  # type: ignore[no-untyped-def]
    row, queries, keys, STRIDE: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return the last key that the last token of a strided query sees."""
    if CAUSAL:
        return tl.minimum((row + 1) * STRIDE, queries) - 1 + keys - queries
    return row * 0 + keys - 1


@triton.jit  # type: ignore[untyped-decorator]
def _weigh(  # type: ignore[no-untyped-def]
    q, k, parts, queries, keys, heads, group, rows, blocks, column_tiles,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    STRIDE: tl.constexpr, PER: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr, FACTOR: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the log-sum-exp of each strided query over the strided keys of a block, to base 2."""
    row_tiles = tl.cdiv(rows, TILE)
    column_tile = tl.program_id(0) % column_tiles
    row_tile = tl.program_id(0) // column_tiles % row_tiles
    head = tl.program_id(0) // column_tiles // row_tiles  # of all sequences
    lane = tl.arange(0, TILE)
    row, within = row_tile * TILE + lane, lane % WIDTH
    column = (column_tile * (TILE // WIDTH) + lane // WIDTH) * PER + within
    farthest = _reach(row_tile * TILE + TILE - 1, queries, keys, STRIDE, CAUSAL)
    if column_tile * (TILE // WIDTH) * PER * STRIDE <= farthest:
        sequence, d = (head // heads).to(tl.int64), tl.arange(0, DEPTH)
        q += sequence * q_batch + (head % heads).to(tl.int64) * q_head
        k += sequence * k_batch + (head % heads // group).to(tl.int64) * k_head
        of_row, of_column = row * STRIDE + STRIDE - 1, column * STRIDE
        q_at = q + of_row.to(tl.int64)[:, None] * q_token + d[None, :]
        k_at = k + of_column.to(tl.int64)[None, :] * k_token + d[:, None]
        steps: tl.constexpr = (D + DEPTH - 1) // DEPTH
        sums = tl.zeros((TILE, TILE), tl.float32)
        for step in tl.range(0, STRIDE * steps, num_stages=STAGES):
            token, part = step // steps, step % steps * DEPTH
            inside = d < D - part
            q_tile = tl.load(
                q_at - (token * q_token - part),
                (of_row - token < queries)[:, None] & inside[None, :],
                0.0,
            )
            k_tile = tl.load(
                k_at + (token * k_token + part),
                (of_column + token < keys)[None, :] & inside[:, None],
                0.0,
            )
            sums = tl.dot(q_tile, k_tile, sums, input_precision=PRECISION)
        seen = (within < PER) & (of_column < keys)
        seen = seen[None, :] & (
            of_column[None, :] <= _reach(row, queries, keys, STRIDE, CAUSAL)[:, None]
        )
        logits = tl.where(seen, sums * FACTOR, -float("inf"))
        of_blocks = tl.reshape(logits, (TILE, TILE // WIDTH, WIDTH))
        most = tl.max(of_blocks, 2)
        most = tl.where(most == -float("inf"), 0.0, most)
        part = most + tl.log2(tl.sum(tl.exp2(of_blocks - most[:, :, None]), 2))
        block = column_tile * (TILE // WIDTH) + tl.arange(0, TILE // WIDTH)
        to = parts + (head.to(tl.int64) * rows + row)[:, None] * blocks + block[None, :]
        tl.store(to, part, (row < rows)[:, None] & (block < blocks)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    parts, scores, queries, keys, rows, q_blocks, blocks,
    STRIDE: tl.constexpr, PER: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the logarithm of the weights of a block of queries, for each block of keys."""
    head, lane = tl.program_id(0) // q_blocks, tl.arange(0, WIDTH)
    row = tl.program_id(0) % q_blocks * PER + lane
    reach = _reach(row, queries, keys, STRIDE, CAUSAL)
    reach = tl.where((lane < PER) & (row < rows), reach, -1)
    parts += (head.to(tl.int64) * rows + row)[:, None] * blocks
    scores += tl.program_id(0).to(tl.int64) * blocks
    most = tl.full((WIDTH,), -float("inf"), tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)[None, :]
        seen = (block < blocks) & (block * (PER * STRIDE) <= reach[:, None])
        part = tl.load(parts + block, seen, -float("inf"))
        new = tl.maximum(most, tl.max(part, 1))
        base = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp2(most - base) + tl.sum(tl.exp2(part - base[:, None]), 1)
        most = new
    whole = tl.where(most == -float("inf"), 0.0, most) + tl.log2(total)
    whole = tl.where(whole == -float("inf"), 0.0, whole)  # of a query that sees no key
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        seen = (block < blocks)[None, :] & ((block * (PER * STRIDE))[None, :] <= reach[:, None])
        part = tl.load(parts + block[None, :], seen, -float("inf"))
        weight = tl.sum(tl.exp2(part - whole[:, None]), 0)
        tl.store(scores + block, tl.log2(weight) * LN_2, block < blocks)


METHOD = Method(score, launches=True)
