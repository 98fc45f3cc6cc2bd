"""Block-sparse attention as in 2017, in three kernels with the scores in memory, in Triton.

    scores   S = scale Q K.T    a program computes a block that is present: "SDD" of blocksparse
    softmax  P = softmax(S)     a program normalises a row of blocks, in place
    output   O = P V            a program computes a block of O from a row of blocks: "DSD"

This is the algorithm of OpenAI's blocksparse and of DeepSpeed's sparse attention, in today's
Triton, to show the gain of fusion. As in those, the scores have the dtype of q, so 8 bytes move per
element.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats._format import rows_of, sides_of
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common import triton as launching
from sparsebench.kernels._common.search import fastest_choice
from sparsebench.kernels._common.triton import SMALLEST_TILE
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense._sdpa import by_token
from sparsebench.kernels.peers._attention import mask_of
from sparsebench.results.record import Problem

LARGEST_TILE = 128
WARPS = 4, 2  # of each kernel


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if reason := launching.unsupported(problem, device):
        return reason
    for side in (*sides_of(problem["block"]), problem["head_dim"]):
        if side & (side - 1) or not SMALLEST_TILE <= side <= LARGEST_TILE:
            expected = f"powers of two from {SMALLEST_TILE} to {LARGEST_TILE}"
            return f"block and head_dim: expected {expected}, found {side}"
    return None


def prepare(operands: Operands) -> Launch:
    problem, mask = operands.problem, mask_of(operands)
    q, k, v = by_token(operands, "q", "k", "v")
    scale = problem["head_dim"] ** -0.5 if problem["scale"] is None else problem["scale"]
    run = partial(attend, q, k, v, mask, scale, scratch_of(mask, problem["heads"], q))
    return fastest_choice(run, [{"warps": warps} for warps in WARPS], operands)


def scratch_of(mask: BlockMask, heads: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the list row of each block, int32, and memory for the scores of all heads."""
    rows = rows_of(mask.offsets).to(torch.int32)
    blocks = max(1, len(rows)) * (heads // mask.lists)
    return rows, q.new_empty(blocks, *mask.block)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    scale: float,
    scratch: tuple[Tensor, Tensor],
    warps: int,
) -> Tensor:
    """Return O [batch * S_q, H * D] of q [batch, S_q, H, D] and k, v [batch, S_kv, H_kv, D]."""
    rows, scores = scratch
    o = torch.empty_like(q)
    heads, share = q.shape[2], q.shape[2] // mask.lists
    sizes = (*mask.tokens, heads, k.shape[2], mask.lists)
    sides: dict[str, Any] = {"B_Q": mask.block[0], "B_K": mask.block[1]}
    launched = sides | {"num_warps": warps}
    bits = mask.offsets if mask.bits is None else mask.bits
    slots = mask.offsets if mask.slots is None else mask.slots
    if len(rows):
        _scores[(len(rows) * share,)](
            *(q, k, scores, rows, mask.columns, slots, bits, *sizes, scale),
            D=q.shape[3],
            CAUSAL=mask.causal,
            BITS=mask.bits is not None,
            **launched,
        )
    grid = (len(mask.offsets[1:]) * share,)
    _softmax[grid](scores, mask.offsets, share, **launched)
    _output[grid](scores, v, o, mask.offsets, mask.columns, *sizes, D=q.shape[3], **launched)
    return o.flatten(2).flatten(0, 1)


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)


@triton.jit  # type: ignore[untyped-decorator]
def _place(row, head_in_list, q_tokens, heads, kv_heads, lists, B_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return sequence, head, key head and first query of a list row."""
    q_blocks = tl.cdiv(q_tokens, B_Q)
    list_, block = row // q_blocks, row % q_blocks
    sequence = list_ // lists
    head = list_ % lists * (heads // lists) + head_in_list
    return sequence, head, head // (heads // kv_heads), block * B_Q


@triton.jit  # type: ignore[untyped-decorator]
def _tile(matrix, sequence, token, tokens, head, heads, SIDE: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile [SIDE, D] of one head; zeros behind the last token."""
    at = token + tl.arange(0, SIDE)
    place = ((sequence * tokens + at).to(tl.int64) * heads + head) * D
    return tl.load(matrix + place[:, None] + tl.arange(0, D)[None, :], (at < tokens)[:, None], 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(  # type: ignore[no-untyped-def]
    q,
    k,
    scores,
    rows,
    columns,
    slots,
    bits,
    q_tokens,
    kv_tokens,
    heads,
    kv_heads,
    lists,
    scale,
    B_Q: tl.constexpr,
    B_K: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BITS: tl.constexpr,
):
    share = heads // lists
    entry, head_in_list = tl.program_id(0) // share, tl.program_id(0) % share
    flagged = tl.load(columns + entry)
    sequence, head, kv_head, token = _place(
        tl.load(rows + entry), head_in_list, q_tokens, heads, kv_heads, lists, B_Q
    )
    key = (flagged & 0x7FFFFFFF) * B_K
    q_tile = _tile(q, sequence, token, q_tokens, head, heads, B_Q, D)
    k_tile = _tile(k, sequence, key, kv_tokens, kv_head, kv_heads, B_K, D)
    block = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale
    i, j = tl.arange(0, B_Q)[:, None], tl.arange(0, B_K)[None, :]
    allowed = (key + j < kv_tokens) & (i >= 0)
    if CAUSAL:
        allowed = allowed & ((key + j <= token + i + kv_tokens - q_tokens) | (flagged >= 0))
    if BITS:
        slot = tl.load(slots + entry)
        at = bits + slot.to(tl.int64) * (B_Q * ((B_K + 7) // 8)) + i * ((B_K + 7) // 8) + j // 8
        byte = tl.load(at, allowed & (slot >= 0), 255).to(tl.int32)
        allowed = allowed & (((byte >> (j % 8)) & 1) == 1)
    block = tl.where(allowed, block, -float("inf"))
    place = scores + tl.program_id(0).to(tl.int64) * (B_Q * B_K) + i * B_K + j
    tl.store(place, block.to(scores.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _softmax(scores, offsets, share, B_Q: tl.constexpr, B_K: tl.constexpr):  # type: ignore[no-untyped-def]
    row, head_in_list = tl.program_id(0) // share, tl.program_id(0) % share
    start, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    inner = tl.arange(0, B_Q)[:, None] * B_K + tl.arange(0, B_K)[None, :]
    top = tl.full((B_Q,), -float("inf"), tl.float32)
    total = tl.zeros((B_Q,), tl.float32)
    for entry in range(start, end):
        place = (entry * share + head_in_list).to(tl.int64) * (B_Q * B_K)
        block = tl.load(scores + place + inner).to(tl.float32)
        new = tl.maximum(top, tl.max(block, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(block - safe[:, None]), 1)
        top = new
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.where(total != 0, total, 1.0)
    for entry in range(start, end):
        place = (entry * share + head_in_list).to(tl.int64) * (B_Q * B_K)
        block = tl.load(scores + place + inner).to(tl.float32)
        block = tl.exp(block - top[:, None]) / total[:, None]
        tl.store(scores + place + inner, block.to(scores.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _output(  # type: ignore[no-untyped-def]
    scores,
    v,
    o,
    offsets,
    columns,
    q_tokens,
    kv_tokens,
    heads,
    kv_heads,
    lists,
    B_Q: tl.constexpr,
    B_K: tl.constexpr,
    D: tl.constexpr,
):
    share = heads // lists
    row, head_in_list = tl.program_id(0) // share, tl.program_id(0) % share
    sequence, head, kv_head, token = _place(
        row, head_in_list, q_tokens, heads, kv_heads, lists, B_Q
    )
    inner = tl.arange(0, B_Q)[:, None] * B_K + tl.arange(0, B_K)[None, :]
    total = tl.zeros((B_Q, D), tl.float32)
    for entry in range(tl.load(offsets + row), tl.load(offsets + row + 1)):
        place = (entry * share + head_in_list).to(tl.int64) * (B_Q * B_K)
        key = (tl.load(columns + entry) & 0x7FFFFFFF) * B_K
        v_tile = _tile(v, sequence, key, kv_tokens, kv_head, kv_heads, B_K, D)
        p = tl.load(scores + place + inner)
        total = tl.dot(p, v_tile, total, input_precision="ieee")
    at = token + tl.arange(0, B_Q)
    place = ((sequence * q_tokens + at).to(tl.int64) * heads + head) * D
    inside = (at < q_tokens)[:, None]
    total = total.to(o.dtype.element_ty)
    tl.store(o + place[:, None] + tl.arange(0, D)[None, :], total, inside)
