"""Attention whose lists belong to single queries, in Triton: queries are gathered by block of keys.

    NSA: a list for each query and KV head, blocks of 64.  MoBA: for each query and head, 512.

    block of keys     its queries (_gathering.py)       parts [row, place, head, D], logs
    +-----+  K, V     | q1 | q4 | q5 | q9 | ...         O and LSE of one query and one block
    |  7  |  once      tile: their heads side by side ──> merge: 32 queries attend to the blocks
    +-----+                                               common to them, and add their parts

A tile of one query would have only the heads of a group as rows, and read a block for each: at 4
heads, 4 FLOPs a byte. Here a tile has 64 rows and more of any queries that selected the same block,
so a byte of K and V serves all of them. A pair of a query and a block costs its part instead: it is
written and read once, in the dtype of q. Blocks that many of 32 neighbours selected, such as their
own, need no parts: `merge` walks them with a bit for each query. Parts are divided by their sums:

    part = softmax(scale Q K.T) V over a block      log = its log-sum-exp, to the base 2
    O = sum of parts weighted by exp2(log - top) / sum of the weights

The tiles of all blocks are cut into runs of the same length, one for each program, wherever they
are: a block that all queries select is as good as any other. Parts are in sections of at most
SECTION_BYTES. Rows of a tile do not mix, so neither tiles nor sections change a bit of a result.
A mask whose blocks are selected on the device is gathered in each call.
On Hopper, _gathered_wgmma.py computes the parts of large blocks, if each head has its own list, and
O of rows that have all blocks they see.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.triton import BoundKernel, Program, Template
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.attention import _gathered_wgmma
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
from sparsebench.kernels.attention._shapes import LOG2_E, Config, by_head
from sparsebench.kernels.attention._tiles import add_step
from sparsebench.kernels.attention.attention_triton import LN_2, code_of, matrices, refuse_path

REGISTERS = 168  # of a tile with two stages and whole blocks: three programs run on an SM
# rows of queries, keys, warps and stages of a tile; the default first
TILES = [(64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2), (128, 128, 8, 2)]
SMALL_BLOCK = 64  # keys, a whole block of which is one step
SMALL_BLOCK_TILES = [TILES[2], TILES[0], TILES[1]]  # two stages: 2.22 instead of 2.38 ms (NSA, 16k)


def choices(w: ListedMask, call: AttentionCall) -> list[Config]:
    """Return the configurations to try, the default first. Raises Unsupported."""
    tiles = SMALL_BLOCK_TILES if call.shape.block[1] <= SMALL_BLOCK else TILES
    by_wgmma = [] if _gathered_wgmma.unsupported(w, call) else [_gathered_wgmma.CONFIG]
    return [*by_wgmma, *configurations(w, call, tiles, 1)]


def plan(w: ListedMask, call: AttentionCall, config: Config) -> Product:
    """Gather the queries, if the mask stays as it is, and compile.

    Launches of a plan with the path "wgmma" must not overlap. Raises Unsupported.
    """
    by_wgmma = config.path == "wgmma"
    refuse(_gathered_wgmma.unsupported(w, call) if by_wgmma else None)
    refuse_path(w, call, config.path)
    shape, device = call.shape, w.mask.columns.device
    q, k, v = inputs = [by_head(x, shape) for x in matrices(call)[:3]]
    o = torch.empty_like(matrices(call)[0])
    lse = q.new_empty(shape.batch * shape.heads, shape.q_tokens, dtype=torch.float32)
    gathered = gathered_plan(w, shape, config, q, k, v)
    tile, merged, gathering, parts, boxes, by_query, sections, sizes, most = gathered
    whole_blocks = config.keys >= shape.block[1]
    if whole_blocks and shape.itemsize == 2 and (config.stages, config.warps) == (2, 4):
        tile["maxnreg"] = REGISTERS
    merged["LOGS"] = triton.next_power_of_2(merged["PLACES"])
    logs, scale = parts.new_empty(len(parts), dtype=torch.float32), call.scale * LOG2_E
    programs: list[Program] = [*gathering]
    by_section: list[list[Program]] = []
    code: str | None
    if by_wgmma:
        by_section, code = _gathered_wgmma.bound_tiles(
            w, call, gathered, (q, k, v), (parts, logs, o, lse)
        )
    else:
        for section in sections:
            args = q, *boxes, parts, logs, *section.of_tiles, *sizes, scale
            attend = BoundKernel(_attend, (section.tiles,), args, tile, parts)
            by_section.append([attend])
        code = code_of(attend, device)
    for section, of_parts in zip(sections, by_section, strict=True):
        programs += of_parts
        args = q, *boxes, parts, logs, *by_query, o, lse, *section.of_groups, *sizes, most, scale
        programs.append(BoundKernel(_merge, (section.groups,), args, merged, o))
    template = Template(programs, inputs, [o, lse])

    def run(*operands: Tensor, out: Tensor | None = None) -> list[Tensor]:
        results = template(*operands, out=() if out is None else (out,))
        if is_capturing(results[0]):
            keep(template)
        return results

    return Product(run, code)


KERNEL = attention_engine("attention_gathered", "attention", choices, plan, unsupported, Config)


@triton.jit(do_not_specialize=SECTION)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, parts, logs, entries, starts, bases,
    first_unit, first_chunk, end_chunk, span, workers,
    q_tokens, kv_tokens, blocks, chunks, heads, kv_heads, lists, scale,
    D: tl.constexpr, DEPTH: tl.constexpr, SIDE: tl.constexpr, CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    TOKENS: tl.constexpr, PACK: tl.constexpr, KEYS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write the parts of a run of tiles of one unit: heads that share a list and a key head."""
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
        key, end_key = number * SIDE, tl.minimum((number + 1) * SIDE, kv_tokens)
        of_keys = k, v, sequence, kv_tokens, kv_head, kv_heads
        if KEYS >= SIDE:
            k_tile, v_tile = load_keys(*of_keys, key, end_key, D, DEPTH, KEYS, TMA)
        entry = tl.load(entries + at + which, at + which < high, -1)
        for i in tl.range(at, high, TOKENS, num_stages=STAGES if KEYS >= SIDE else 1):
            real, row, place = entry >= 0, entry // PLACES, entry % PLACES
            token = row - first_row
            line = ((sequence * q_tokens + token).to(tl.int64) * heads + head + member) * D
            stored = real[:, None] & (depth < D)
            q_tile = tl.load(q + line[:, None] + depth, stored, 0.0)
            entry = tl.load(entries + i + TOKENS + which, i + TOKENS + which < high, -1)
            limit = kv_tokens - 1 + tl.zeros_like(token)
            if CAUSAL:
                limit = tl.minimum(limit, token + (kv_tokens - q_tokens))
            if KEYS >= SIDE:
                scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
                column = tl.arange(0, KEYS)[None, :]
                allowed = (key + column <= limit[:, None]) & (column < SIDE)
                scores = tl.where(allowed, scores, -float("inf"))
                top = tl.max(scores, 1) * scale
                safe = tl.where(top == -float("inf"), 0.0, top)
                p = tl.exp2(scores * scale - safe[:, None])
                weight = tl.sum(p, 1)
                total = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
            else:
                top = tl.full((TOKENS * PACK,), -float("inf"), tl.float32)
                weight = tl.zeros((TOKENS * PACK,), tl.float32)
                total = tl.zeros((TOKENS * PACK, DEPTH), tl.float32)
                least = tl.min(tl.where(real, limit, kv_tokens), 0)  # below it, no key has a mask
                whole = tl.where(least >= key + SIDE - 1, tl.cdiv(SIDE, KEYS), 0)
                whole = tl.minimum(whole, SIDE // KEYS)
                for MASK in tl.static_range(2):
                    for step in tl.range(
                        whole if MASK else 0,
                        tl.cdiv(end_key - key, KEYS) if MASK else whole,
                        num_stages=STAGES,
                    ):
                        from_key = key + step * KEYS
                        k_tile, v_tile = load_keys(*of_keys, from_key, end_key, D, DEPTH, KEYS, TMA)
                        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
                        if MASK:
                            at_key = from_key + tl.arange(0, KEYS)[None, :]
                            allowed = (at_key <= limit[:, None]) & (at_key < end_key)
                            scores = tl.where(allowed, scores, -float("inf"))
                        top, weight, total = add_step(
                            scores, v_tile, scale, top, weight, total, True
                        )
            some = tl.where(weight != 0, weight, 1.0)  # a NaN stays
            to = ((row + of_unit) * PLACES + place).to(tl.int64) * PACK + member
            part = (total / some[:, None]).to(parts.dtype.element_ty)
            tl.store(parts + to[:, None] * D + depth, part, stored)
            tl.store(logs + to, top + tl.log2(weight), real)


@triton.jit(do_not_specialize=SECTION)  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    q, k, v, parts, logs, counts, words, common, commons, o, lse,
    first_unit, first_token, span,
    q_tokens, kv_tokens, blocks, chunks, heads, kv_heads, lists, most, scale,
    D: tl.constexpr, DEPTH: tl.constexpr, SIDE: tl.constexpr, CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, PACK: tl.constexpr,
    UNIT: tl.constexpr, KEYS: tl.constexpr, PLACES: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """Attend to the common blocks of a chunk, and add the parts of its queries."""
    ROWS: tl.constexpr = CHUNK * PACK
    STEPS: tl.constexpr = (SIDE + KEYS - 1) // KEYS
    unit, offset, first, tile = group_of(first_unit, span, CHUNK, PACK, UNIT)
    sequence, head, list_, kv_head = heads_of(first, heads, kv_heads, lists)
    lane = tl.arange(0, ROWS)
    local, member = tile * CHUNK + lane // PACK, lane % PACK
    inside, token = local < span, first_token + local
    depth = tl.arange(0, DEPTH)[None, :]
    line = ((sequence * q_tokens + token).to(tl.int64) * heads + head + member) * D
    stored = inside[:, None] & (depth < D)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    if commons is not None:
        q_tile = tl.load(q + line[:, None] + depth, stored, 0.0)
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
            scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            at_key = key + tl.arange(0, KEYS)[None, :]
            last = tl.where(selected == 1, tl.minimum(limit, end_key - 1), -1)
            scores = tl.where(at_key <= last[:, None], scores, -float("inf"))
            top, weight, total = add_step(scores, v_tile, scale, top, weight, total, True)

    count = tl.load(counts + list_ * q_tokens + token, inside, 0)
    inside = inside & (count >= 0)  # complete rows have O and the LSE
    stored = inside[:, None] & (depth < D)
    at = ((unit * span + local) * PLACES).to(tl.int64) * UNIT + offset + member
    place = tl.arange(0, LOGS)[None, :]
    log = tl.load(logs + at[:, None] + place * UNIT, place < count[:, None], -float("inf"))
    new = tl.maximum(top, tl.max(log, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)
    shrink = tl.exp2(top - safe)
    weight = weight * shrink + tl.sum(tl.exp2(log - safe[:, None]), 1)
    total = total * shrink[:, None]
    for i in tl.range(0, tl.max(count, 0), num_stages=3):
        present = i < count
        of_place = tl.load(logs + at + i * UNIT, present, -float("inf"))
        to = (at + i * UNIT) * D
        part = tl.load(parts + to[:, None] + depth, present[:, None] & (depth < D), 0.0)
        total += tl.exp2(of_place - safe)[:, None] * part.to(tl.float32)
    some = weight != 0  # also true for NaN
    weight = tl.where(some, weight, 1.0)
    tl.store(o + line[:, None] + depth, (total / weight[:, None]).to(o.dtype.element_ty), stored)
    natural = tl.where(some, (new + tl.log2(weight)) * LN_2, -float("inf"))
    tl.store(lse + (first + member).to(tl.int64) * q_tokens + token, natural, inside)
