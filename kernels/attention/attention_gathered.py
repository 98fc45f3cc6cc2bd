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
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats._format import sides_of
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.triton import SM_BYTES, BoundKernel, Path, Template
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.attention import _shapes
from sparsebench.kernels.attention._call import AttentionCall, ListedMask, attention_engine
from sparsebench.kernels.attention._gathering import CHUNK, Gathered, bound_gathering
from sparsebench.kernels.attention._shapes import LOG2_E, Config, by_head, head_box
from sparsebench.kernels.attention._tiles import add_step
from sparsebench.kernels.attention.attention_triton import (
    LN_2,
    code_of,
    matrices,
    path_of,
    refuse_path,
)
from sparsebench.results.record import Problem

SECTION_BYTES = 1 << 30  # of parts at a time
MOST_BLOCKS = 8192  # of a list: a program has how many tiles each one has
WAVES = 6  # programs for each SM of a section, of which two or three run at once
MERGED = 1 << 15  # bytes of Q of a program of `merge`
UNROLL = 2  # parts of a row that are loaded at a time
COMMON = 16  # of 32 queries: 12, 16, 24, 32, none take 2.25, 2.24, 2.33, 2.34, 2.45 ms (NSA, 16k)
LARGE = 128  # keys of a block, from above which on only a block of all 32 saves time

# rows of queries, keys, warps and stages of a tile; the default first
TILES = [(64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2), (128, 128, 8, 2)]
FP32 = [(32, 32, 8, 2), (16, 32, 4, 2)]
SMALLEST = 16
SECTION = "first_unit", "first_chunk", "end_chunk", "first_token", "span", "workers"  # one code


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run the problem here, or None."""
    return _shapes.unsupported(problem, device) or _unsupported_queries(problem["block"])


def _unsupported_queries(block: object) -> str | None:
    queries = sides_of(block)[0]
    expected = "expected a list for each query"
    return f"block: {expected}, found one for {queries} queries" if queries > 1 else None


def unsupported_mask(mask: BlockMask) -> str | None:
    """Return why the kernel cannot read a mask, or None."""
    if mask.bits is not None:
        return "expected a mask without bits, found bits"
    if mask.kv_blocks > MOST_BLOCKS:
        return f"expected at most {MOST_BLOCKS} blocks of keys, found {mask.kv_blocks}"
    return _unsupported_queries(mask.block)


def choices(w: ListedMask, call: AttentionCall) -> list[Config]:
    """Return the configurations to try, the default first. Raises Unsupported."""
    return fitting(w, call, TILES, 1)


def fitting(
    w: ListedMask, call: AttentionCall, tiles: list[_shapes.Tile], matrices: int
) -> list[Config]:
    """Return the tiles whose operands fit one SM, one at least. Raises Unsupported.

    tiles     of 16 bits; those of FP32 take their place
    matrices  that a tile gathers
    """
    refuse(unsupported_mask(w.mask))
    shape, shared, path = call.shape, w.shared(call.shape), path_of(w, call)
    side = max(SMALLEST, triton.next_power_of_2(shape.block[1]))
    sizes = FP32 if shape.itemsize == 4 else tiles
    near = [(rows, min(keys, side), *rest) for rows, keys, *rest in sizes]
    fit = [
        t
        for t in near
        if (matrices * t[0] * t[3] + 2 * t[1] * _buffers(t, side)) * shape.depth * shape.itemsize
        <= SM_BYTES
    ]
    return [_config(shape, shared, tile, path) for tile in dict.fromkeys(fit or near[-1:])]


def _buffers(tile: tuple[int, ...], side: int) -> int:
    """Return how many steps of K and V a program holds: one, if it is a whole block."""
    return 1 if tile[1] == side else tile[3]


def _config(
    shape: _shapes.AttentionShape, shared: int, tile: tuple[int, int, int, int], path: Path
) -> Config:
    rows, keys, warps, stages = tile
    pack = min(shared, rows)
    way = path if shape.block[1] % keys == 0 else "pointers"
    return Config(rows // pack, pack, keys, stages, warps, way)


def least_common(heads: int, side: int) -> int:
    """Return how many of 32 queries of some heads must have selected a block to share its loads.

    A single head would load 64 keys for 32 rows, where a gathered tile loads them for 64.
    """
    if heads == 1:
        return CHUNK + 1
    return COMMON if side <= LARGE else CHUNK


def sections_of(
    shape: _shapes.AttentionShape, pack: int, places: int
) -> tuple[int, list[tuple[int, int, int, int]]]:
    """Return the parts of a section, and of each: its first unit, units, first token and tokens."""
    of_row, units = places * pack, shape.batch * shape.heads // pack
    fitting = SECTION_BYTES // (of_row * shape.head_dim * shape.itemsize)  # queries
    span = min(shape.q_tokens, max(CHUNK, fitting // CHUNK * CHUNK))
    height = min(units, max(1, fitting // shape.q_tokens))
    sections = [
        (unit, min(height, units - unit), token, min(span, shape.q_tokens - token))
        for unit in range(0, units, height)
        for token in range(0, shape.q_tokens, span)
    ]
    return height * span * of_row, sections


def constants_of(
    shape: _shapes.AttentionShape, mask: BlockMask, config: Config, places: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the constants of the kernel of gathered tiles, and of the one of 32 queries."""
    both = {"SIDE": shape.block[1], "KEYS": config.keys, "TMA": config.path == "tma"}
    both |= {"D": shape.head_dim, "DEPTH": shape.depth, "CAUSAL": mask.causal}
    both |= {"CHUNK": CHUNK, "PLACES": places}
    tile = {"TOKENS": config.tokens, "PACK": config.pack, "STAGES": config.stages}
    tile |= {"BLOCKS": triton.next_power_of_2(mask.kv_blocks), "num_warps": config.warps}
    heads = max(1, min(config.pack, MERGED // (CHUNK * shape.depth * shape.itemsize)))
    merged = {"PACK": heads, "UNIT": config.pack, "STAGES": 2}
    return both | tile, both | merged | {"num_warps": 8 if heads * CHUNK >= 128 else 4}


def gathered_of(
    mask: BlockMask, places: int, merged: Mapping[str, Any]
) -> tuple[Gathered, list[BoundKernel]]:
    """Return the gathered queries, and what writes them in each call."""
    least = least_common(merged["PACK"], mask.block[1])
    if not mask.keep:
        return Gathered.of(mask, places, least), []
    gathered = Gathered.without_data(mask, places, least)
    return gathered, bound_gathering(mask, places, gathered, least)


def plan(w: ListedMask, call: AttentionCall, config: Config) -> Product:
    """Gather the queries, if the mask stays as it is, and compile. Raises Unsupported."""
    refuse(unsupported_mask(w.mask))
    refuse_path(w, call, config.path)
    shape, mask, device = call.shape, w.mask, w.mask.columns.device
    places = max(1, int(mask.counts.max()))
    q, k, v = inputs = [by_head(x, shape) for x in matrices(call)[:3]]
    o = torch.empty_like(matrices(call)[0])
    lse = q.new_empty(shape.batch * shape.heads, shape.q_tokens, dtype=torch.float32)
    tile, merged = constants_of(shape, mask, config, places)
    merged |= {"LOGS": triton.next_power_of_2(places), "UNROLL": UNROLL}
    gathered, programs = gathered_of(mask, places, merged)
    count, sections = sections_of(shape, config.pack, places)
    parts = q.new_empty(count, shape.head_dim)
    logs = parts.new_empty(len(parts), dtype=torch.float32)
    boxes = [head_box(x, shape, (config.keys, 1), config.path) for x in (k, v)]
    blocks, chunks = mask.kv_blocks, ceil(shape.q_tokens / CHUNK)
    sizes = *mask.tokens, blocks, chunks, shape.heads, shape.kv_heads, mask.lists
    for unit, count, token, width in sections:
        workers = max(1, WAVES * multiprocessors(device) // count)
        section = unit, token // CHUNK, ceil((token + width) / CHUNK), width, workers
        read = gathered.entries, gathered.starts, gathered.bases
        args = q, *boxes, parts, logs, *read, *section, *sizes, call.scale * LOG2_E
        programs.append(BoundKernel(_attend, (count * workers,), args, tile, parts))
        grid = (count * config.pack // merged["PACK"] * ceil(width / CHUNK),)
        listed = gathered.counts, gathered.words, gathered.common, gathered.commons
        args = q, *boxes, parts, logs, *listed, o, lse, unit, token, width
        args = *args, *sizes, gathered.common.shape[1], call.scale * LOG2_E
        programs.append(BoundKernel(_merge, grid, args, merged, o))
    template = Template(programs, inputs, [o, lse])

    def run(*operands: Tensor, out: Tensor | None = None) -> list[Tensor]:
        results = template(*operands, out=() if out is None else (out,))
        if is_capturing(results[0]):
            keep(template)
        return results

    return Product(run, code_of(programs[-2], device))


KERNEL = attention_engine("attention_gathered", "attention", choices, plan, unsupported, Config)


@triton.jit  # type: ignore[untyped-decorator]
def load_keys(  # type: ignore[no-untyped-def]
    k, v, sequence, tokens, head, heads, key, last,
    D: tl.constexpr, DEPTH: tl.constexpr, KEYS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return the tiles [KEYS, DEPTH] of K and V from a key on; zeros from key `last` on."""
    if TMA:
        k_tile = k.load([sequence, key, head, 0]).reshape(KEYS, DEPTH)
        v_tile = v.load([sequence, key, head, 0]).reshape(KEYS, DEPTH)
    else:
        at, depth = key + tl.arange(0, KEYS)[:, None], tl.arange(0, DEPTH)[None, :]
        line = ((sequence * tokens + at).to(tl.int64) * heads + head) * D
        inside = (at < last) & (depth < D)
        k_tile = tl.load(k + line + depth, inside, 0.0)
        v_tile = tl.load(v + line + depth, inside, 0.0)
    return k_tile, v_tile


@triton.jit  # type: ignore[untyped-decorator]
def run_of(  # type: ignore[no-untyped-def]
    bases, first_chunk, end_chunk, blocks, worker, workers,
    TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return a worker's first and last tile, their blocks, and the tiles before the first block."""
    block = tl.arange(0, BLOCKS)
    begin = tl.load(bases + first_chunk * blocks + block, block < blocks, 0)
    end = tl.load(bases + end_chunk * blocks + block, block < blocks, 0)
    tiles = tl.cdiv(end - begin, TOKENS)
    until = tl.cumsum(tiles, 0)
    every = tl.sum(tiles, 0).to(tl.int64)
    run = (worker * every // workers).to(tl.int32)
    stop = ((worker + 1) * every // workers).to(tl.int32)
    first_block = tl.sum((until <= run).to(tl.int32), 0)
    end_block = tl.where(run < stop, tl.sum((until < stop).to(tl.int32), 0) + 1, first_block)
    before = tl.sum(tl.where(block < first_block, tiles, 0), 0)
    return run, stop, first_block, end_block, before


@triton.jit  # type: ignore[untyped-decorator]
def entries_of(  # type: ignore[no-untyped-def]
    starts, bases, number, first_chunk, end_chunk, blocks, run, stop, before, TOKENS: tl.constexpr
):
    """Return the entries of a block in a worker's run, and the tiles before the next block."""
    start = tl.load(starts + number)
    low = start + tl.load(bases + first_chunk * blocks + number)
    high = start + tl.load(bases + end_chunk * blocks + number)
    at = low + (tl.maximum(run, before) - before) * TOKENS
    last = tl.minimum(high, low + (stop - before) * TOKENS)
    return at, last, before + tl.cdiv(high - low, TOKENS)


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
    stacked = (first_unit + unit) * PACK
    sequence, head = stacked // heads, stacked % heads
    list_, kv_head = sequence * lists + head * lists // heads, head // (heads // kv_heads)
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
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Attend to the common blocks of a chunk, and add the parts of its queries."""
    ROWS: tl.constexpr = CHUNK * PACK
    STEPS: tl.constexpr = (SIDE + KEYS - 1) // KEYS
    of_unit = tl.cdiv(span, CHUNK)
    packed, tile = tl.program_id(0) // of_unit, tl.program_id(0) % of_unit
    unit, offset = packed // (UNIT // PACK), packed % (UNIT // PACK) * PACK
    stacked = (first_unit + unit) * UNIT + offset
    sequence, head = stacked // heads, stacked % heads
    list_, kv_head = sequence * lists + head * lists // heads, head // (heads // kv_heads)
    lane = tl.arange(0, ROWS)
    local, member = tile * CHUNK + lane // PACK, lane % PACK
    inside, token = local < span, first_token + local
    depth = tl.arange(0, DEPTH)[None, :]
    line = ((sequence * q_tokens + token).to(tl.int64) * heads + head + member) * D
    stored = inside[:, None] & (depth < D)
    q_tile = tl.load(q + line[:, None] + depth, stored, 0.0)
    limit = kv_tokens - 1 + tl.zeros_like(token)
    if CAUSAL:
        limit = tl.minimum(limit, token + (kv_tokens - q_tokens))
    chunk = list_ * chunks + first_token // CHUNK + tile
    words += chunk.to(tl.int64) * blocks
    common += chunk.to(tl.int64) * most
    steps = tl.load(commons + chunk) * STEPS

    top = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    block = tl.load(common, steps > 0, 0)
    for i in tl.range(0, steps, num_stages=STAGES):
        key = block * SIDE + i % STEPS * KEYS
        end_key = tl.minimum((block + 1) * SIDE, kv_tokens)
        of_keys = k, v, sequence, kv_tokens, kv_head, kv_heads
        k_tile, v_tile = load_keys(*of_keys, key, end_key, D, DEPTH, KEYS, TMA)
        selected = (tl.load(words + block) >> (lane // PACK)) & 1
        block = tl.load(common + (i + 1) // STEPS, i + 1 < steps, 0)
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        at_key = key + tl.arange(0, KEYS)[None, :]
        last = tl.where(selected == 1, tl.minimum(limit, end_key - 1), -1)
        scores = tl.where(at_key <= last[:, None], scores, -float("inf"))
        top, weight, total = add_step(scores, v_tile, scale, top, weight, total, True)

    count = tl.load(counts + list_ * q_tokens + token, inside, 0)
    at = ((unit * span + local) * PLACES).to(tl.int64) * UNIT + offset + member
    place = tl.arange(0, LOGS)[None, :]
    log = tl.load(logs + at[:, None] + place * UNIT, place < count[:, None], -float("inf"))
    new = tl.maximum(top, tl.max(log, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)
    shrink = tl.exp2(top - safe)
    weight = weight * shrink + tl.sum(tl.exp2(log - safe[:, None]), 1)
    total = total * shrink[:, None]
    for i in tl.range(0, tl.max(count, 0), loop_unroll_factor=UNROLL):
        present = i < count
        of_place = tl.load(logs + at + i * UNIT, present, -float("inf"))
        to = (at + i * UNIT) * D
        part = tl.load(parts + to[:, None] + depth, present[:, None] & (depth < D), 0.0)
        total += tl.exp2(of_place - safe)[:, None] * part.to(tl.float32)
    some = weight != 0  # also true for NaN
    weight = tl.where(some, weight, 1.0)
    tl.store(o + line[:, None] + depth, (total / weight[:, None]).to(o.dtype.element_ty), stored)
    natural = tl.where(some, (new + tl.log2(weight)) * LN_2, -float("inf"))
    tl.store(lse + (stacked + member).to(tl.int64) * q_tokens + token, natural, inside)
