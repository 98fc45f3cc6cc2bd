"""Gradients of attention whose lists belong to single queries: dQ of queries gathered by block.

    dQ      tiles of queries that selected the same block (attention_gathered.py)
              S = Q K.T    P = exp2(scale S - LSE)    dP = dO V.T    dS = P (dP - delta)
              part = dS K                             delta = sum(O dO)
            32 queries add their parts, and dS K of the blocks that are common to them
    dK, dV  the kernel of attention_triton_backward.py, over the transposed lists

A tile of one query has the heads of a list as rows: one with MoBA, four with 32 and 8 heads. It
would read a block of K and V for each of its queries, 1.3 TB for MoBA with 12 blocks of 512 at 16k
tokens. Parts are added in the order of their places, so the same operands give the same bits.

Bounds, NSA at 16k tokens, 32/8 heads: the parts of dQ are 2.1 GB at most; writing and reading them
once takes 1.0 ms. The products are 14 D operations for each pair of a query and a key, 0.9 PFLOP,
which take 1.3 ms.
"""

from dataclasses import astuple
from itertools import zip_longest

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.triton import BoundKernel, Template
from sparsebench.kernels.attention import attention_triton_backward
from sparsebench.kernels.attention._call import AttentionCall, ListedMask, attention_engine
from sparsebench.kernels.attention._gathered_tiles import (
    SECTION,
    common_blocks,
    configurations,
    entries_of,
    gathered_plan,
    group_of,
    heads_of,
    load_common,
    load_keys,
    run_of,
    unsupported,
)
from sparsebench.kernels.attention._shapes import LOG2_E, by_head
from sparsebench.kernels.attention.attention_triton import code_of, matrices, refuse_path
from sparsebench.kernels.attention.attention_triton_backward import Config, bound_dkv

LOG2 = tl.constexpr(LOG2_E)  # log2(e): the LSE is natural, and the kernel takes exp2
TILES = [(64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2)]  # rows, keys, warps and stages of dQ
ROWS = 32  # of a program of `_deltas`


def choices(w: ListedMask, call: AttentionCall) -> list[Config]:
    """Return the configurations to try, the default first. Raises Unsupported."""
    dq = [astuple(config)[:6] for config in configurations(w, call, TILES, 2)]
    dkv = [astuple(config)[6:] for config in attention_triton_backward.choices(w, call)]
    pairs = zip_longest(dq, dict.fromkeys(dkv))
    return [Config(*(one or dq[0]), *(other or dkv[0])) for one, other in pairs]


def plan(w: ListedMask, call: AttentionCall, config: Config) -> Product:
    """Gather the queries, if the mask stays as it is, and compile. Raises Unsupported."""
    refuse_path(w, call, config.q_path, config.kv_path)
    shape, mask = call.shape, w.mask
    q, k, v, o, do = (by_head(x, shape) for x in matrices(call))
    lse = q.new_empty(shape.batch * shape.heads, shape.q_tokens, dtype=torch.float32)
    delta, results = torch.empty_like(lse), call.gradients(q, None)
    dq, dk, dv = results
    tile, merged, programs, parts, boxes, by_query, sections, sizes, most = gathered_plan(
        w, shape, config.dq, q, k, v
    )
    depth = {"D": shape.head_dim, "DEPTH": shape.depth}
    args = o, do, delta, delta.numel(), shape.q_tokens, shape.heads
    grid = (triton.cdiv(delta.numel(), ROWS),)
    programs.append(BoundKernel(_deltas, grid, args, {"ROWS": ROWS, **depth}, delta))
    of_rows = q, do, *boxes, lse, delta, parts
    for section in sections:
        args = *of_rows, *section.of_tiles, *sizes, call.scale
        programs.append(BoundKernel(_differentiate, (section.tiles,), args, tile, parts))
        args = *of_rows, dq, *by_query, *section.of_groups, *sizes, call.scale, most
        programs.append(BoundKernel(_merge_gradients, (section.groups,), args, merged, dq))
    programs.append(bound_dkv(w, call, config.dkv, (q, do, k, v, dk, dv, lse, delta), dk))
    template = Template(programs, (q, k, v, o, lse, do), results)

    def run(*operands: Tensor, out: Tensor | None = None) -> list[Tensor]:
        if is_capturing(operands[0]):
            keep(template)
        return template(*operands, out=call.gradients(operands[0], out))

    return Product(run, code_of(programs[-3], mask.columns.device))


KERNEL = attention_engine(
    "attention_gathered_backward", "attention_backward", choices, plan, unsupported, Config
)


@triton.jit  # type: ignore[untyped-decorator]
def _deltas(  # type: ignore[no-untyped-def]
    o, do, delta, rows, tokens, heads,
    D: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write sum(O dO) of each head and token."""
    row, depth = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)[None, :]
    at, stored = row.to(tl.int64)[:, None] * D + depth, (row < rows)[:, None] & (depth < D)
    o_tile, do_tile = tl.load(o + at, stored, 0.0), tl.load(do + at, stored, 0.0)
    token, head = row // heads, row % heads
    to = (token // tokens * heads + head) * tokens + token % tokens
    tl.store(delta + to, tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1), row < rows)


@triton.jit
def _add_keys(  # type: ignore[no-untyped-def]
    total, q_tile, do_tile, k_tile, v_tile, top, sums, allowed, scale
):
    """Return dQ, divided by the scale, after a step of keys."""
    scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
    p = tl.where(allowed, tl.exp2(scores * (scale * LOG2) - top[:, None]), 0.0)
    ds = (p * (dp - sums[:, None])).to(k_tile.dtype)
    return tl.dot(ds, k_tile, total, input_precision="ieee")


@triton.jit(do_not_specialize=SECTION)  # type: ignore[untyped-decorator]
def _differentiate(  # type: ignore[no-untyped-def]
    q, do, k, v, lse, delta, parts, entries, starts, bases,
    first_unit, first_chunk, end_chunk, span, workers,
    q_tokens, kv_tokens, blocks, chunks, heads, kv_heads, lists, scale,
    D: tl.constexpr, DEPTH: tl.constexpr, SIDE: tl.constexpr, CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    TOKENS: tl.constexpr, PACK: tl.constexpr, KEYS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write the parts of dQ of a run of tiles of one unit."""
    unit, worker = tl.program_id(0) // workers, tl.program_id(0) % workers
    first = (first_unit + unit) * PACK
    sequence, head, list_, kv_head = heads_of(first, heads, kv_heads, lists)
    starts += list_ * blocks
    bases += list_.to(tl.int64) * (chunks + 1) * blocks
    run, stop, first_block, end_block, before = run_of(
        bases, first_chunk, end_chunk, blocks, worker, workers, TOKENS, BLOCKS
    )
    lane = tl.arange(0, TOKENS * PACK)
    which, member = lane // PACK, lane % PACK
    depth = tl.arange(0, DEPTH)[None, :]
    first_row = list_ * q_tokens
    of_unit = unit * span - first_row - first_chunk * CHUNK  # row + of_unit: row of the section
    for number in range(first_block, end_block):
        at, high, before = entries_of(
            starts, bases, number, first_chunk, end_chunk, blocks, run, stop, before, TOKENS
        )
        end_key = tl.minimum((number + 1) * SIDE, kv_tokens)
        of_keys = k, v, sequence, kv_tokens, kv_head, kv_heads
        if KEYS >= SIDE:
            k_tile, v_tile = load_keys(*of_keys, number * SIDE, end_key, D, DEPTH, KEYS, TMA)
        entry = tl.load(entries + at + which, at + which < high, -1)
        for i in tl.range(at, high, TOKENS, num_stages=STAGES if KEYS >= SIDE else 1):
            real, row, place = entry >= 0, entry // PLACES, entry % PLACES
            token = row - first_row
            line = ((sequence * q_tokens + token).to(tl.int64) * heads + head + member) * D
            stored = real[:, None] & (depth < D)
            q_tile = tl.load(q + line[:, None] + depth, stored, 0.0)
            do_tile = tl.load(do + line[:, None] + depth, stored, 0.0)
            at_row = (first + member).to(tl.int64) * q_tokens + token
            top = tl.load(lse + at_row, real, float("inf")) * LOG2
            sums = tl.load(delta + at_row, real, 0.0)
            entry = tl.load(entries + i + TOKENS + which, i + TOKENS + which < high, -1)
            limit = end_key - 1 + tl.zeros_like(token)
            if CAUSAL:
                limit = tl.minimum(limit, token + (kv_tokens - q_tokens))
            total = tl.zeros((TOKENS * PACK, DEPTH), tl.float32)
            if KEYS >= SIDE:
                allowed = number * SIDE + tl.arange(0, KEYS)[None, :] <= limit[:, None]
                at_rows = q_tile, do_tile, k_tile, v_tile, top, sums, allowed
                total = _add_keys(total, *at_rows, scale)
            else:
                for key in tl.range(number * SIDE, end_key, KEYS, num_stages=STAGES):
                    k_tile, v_tile = load_keys(*of_keys, key, end_key, D, DEPTH, KEYS, TMA)
                    allowed = key + tl.arange(0, KEYS)[None, :] <= limit[:, None]
                    at_rows = q_tile, do_tile, k_tile, v_tile, top, sums, allowed
                    total = _add_keys(total, *at_rows, scale)
            to = ((row + of_unit) * PLACES + place).to(tl.int64) * PACK + member
            tl.store(parts + to[:, None] * D + depth, total.to(parts.dtype.element_ty), stored)


@triton.jit(do_not_specialize=SECTION)  # type: ignore[untyped-decorator]
def _merge_gradients(  # type: ignore[no-untyped-def]
    q, do, k, v, lse, delta, parts, dq, counts, words, common, commons,
    first_unit, first_token, span,
    q_tokens, kv_tokens, blocks, chunks, heads, kv_heads, lists, scale, most,
    D: tl.constexpr, DEPTH: tl.constexpr, SIDE: tl.constexpr, CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, PACK: tl.constexpr,
    UNIT: tl.constexpr, KEYS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write dQ of a chunk: of its common blocks, and the parts of its queries."""
    STEPS: tl.constexpr = (SIDE + KEYS - 1) // KEYS
    unit, offset, first, tile = group_of(first_unit, span, CHUNK, PACK, UNIT)
    sequence, head, list_, kv_head = heads_of(first, heads, kv_heads, lists)
    lane = tl.arange(0, CHUNK * PACK)
    local, member = tile * CHUNK + lane // PACK, lane % PACK
    inside, token = local < span, first_token + local
    depth = tl.arange(0, DEPTH)[None, :]
    line = ((sequence * q_tokens + token).to(tl.int64) * heads + head + member) * D
    stored = inside[:, None] & (depth < D)
    total = tl.zeros((CHUNK * PACK, DEPTH), tl.float32)
    if commons is not None:
        q_tile = tl.load(q + line[:, None] + depth, stored, 0.0)
        do_tile = tl.load(do + line[:, None] + depth, stored, 0.0)
        at_row = (first + member).to(tl.int64) * q_tokens + token
        top = tl.load(lse + at_row, inside, float("inf")) * LOG2
        sums = tl.load(delta + at_row, inside, 0.0)
        limit = kv_tokens - 1 + tl.zeros_like(token)
        if CAUSAL:
            limit = tl.minimum(limit, token + (kv_tokens - q_tokens))
        chunk = list_ * chunks + first_token // CHUNK + tile
        words, common, steps, block = common_blocks(
            words, common, commons, chunk, blocks, most, STEPS
        )
        for i in tl.range(0, steps, num_stages=STAGES):
            k_tile, v_tile, key, end_key, selected, block = load_common(
                k, v, sequence, kv_tokens, kv_head, kv_heads,
                words, common, block, i, steps, lane // PACK,
                D, DEPTH, SIDE, STEPS, KEYS, TMA,
            )  # fmt: skip
            last = tl.where(selected == 1, tl.minimum(limit, end_key - 1), -1)
            allowed = key + tl.arange(0, KEYS)[None, :] <= last[:, None]
            total = _add_keys(total, q_tile, do_tile, k_tile, v_tile, top, sums, allowed, scale)

    count = tl.load(counts + list_ * q_tokens + token, inside, 0)
    at = ((unit * span + local) * PLACES).to(tl.int64) * UNIT + offset + member
    for i in tl.range(0, tl.max(count, 0), num_stages=3):
        present = (i < count)[:, None] & (depth < D)
        total += tl.load(parts + (at + i * UNIT)[:, None] * D + depth, present, 0.0).to(tl.float32)
    tl.store(dq + line[:, None] + depth, (total * scale).to(dq.dtype.element_ty), stored)
