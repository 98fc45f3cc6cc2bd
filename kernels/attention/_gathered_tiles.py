"""What the kernels of lists of single queries share: their tiles, sections and common blocks.

    attention_gathered.py            O, the LSE
    attention_gathered_backward.py   dQ

Both run two kernels for each section of parts: one of tiles of queries that selected the same
block, and one of 32 neighbours, which adds their parts.
"""

from math import ceil
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats._format import sides_of
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.triton import SM_BYTES, BoundKernel, Path
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.attention import _shapes
from sparsebench.kernels.attention._call import AttentionCall, ListedMask
from sparsebench.kernels.attention._gathering import CHUNK, Gathered, bound_gathering
from sparsebench.kernels.attention._shapes import Config
from sparsebench.kernels.attention.attention_triton import path_of
from sparsebench.results.record import Problem

SECTION_BYTES = 1 << 30  # of parts at a time
MOST_BLOCKS = 8192  # of a list: a program has how many tiles each one has
MOST_ENTRIES = 2**31 - 2**13  # of all rows: int32, and tiles look up to 4,096 entries ahead
WAVES = 6  # programs for each SM of a section, of which two or three run at once
MERGE_BYTES = 1 << 14  # of Q of 32 queries; twice as many take 2.35 instead of 2.09 ms (NSA, 16k)
FEW_PLACES = 4  # for a head, 8 warps: 188 instead of 249 us with 3, 383 instead of 371 with 12
LEAST_COMMON = 16  # of 32: 12, 16, 24, 32, none take 2.25, 2.24, 2.33, 2.34, 2.45 ms (NSA, 16k)
LARGE = 128  # keys; a larger block saves time only if all 32 queries selected it

FP32 = [(32, 32, 8, 2), (16, 32, 4, 2)]
SMALLEST = 16
SECTION = "first_unit", "first_chunk", "end_chunk", "first_token", "span", "workers"
"""Arguments whose values must not specialize a kernel, so that all sections run the same code."""


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


def configurations(
    w: ListedMask, call: AttentionCall, tiles: list[_shapes.Tile], matrices: int
) -> list[Config]:
    """Return the tiles whose operands fit one SM, one at least. Raises Unsupported.

    tiles     rows of queries, keys, warps and stages, for 16 bits; in fp32, FP32 replaces them
    matrices  matrices of queries that a tile gathers: Q, or Q and dO
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
    """Return how many of 32 neighbouring queries must have selected a block to share its loads.

    heads  of a query that share the list; a single head would load 64 keys for 32 rows, where a
           gathered tile loads them for 64, so no block is common
    side   keys of a block
    """
    if heads == 1:
        return CHUNK + 1
    return LEAST_COMMON if side <= LARGE else CHUNK


def sections_of(
    shape: _shapes.AttentionShape, pack: int, places: int
) -> tuple[int, list[tuple[int, int, int, int]]]:
    """Return how many parts the largest section has, and all sections.

    A section is its first unit, its number of units, its first token and its number of tokens.
    """
    of_row, units = places * pack, shape.batch * shape.heads // pack
    queries = SECTION_BYTES // (of_row * shape.head_dim * shape.itemsize)
    span = min(shape.q_tokens, max(CHUNK, queries // CHUNK * CHUNK))
    height = min(units, max(1, queries // shape.q_tokens))
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
    heads = max(1, min(config.pack, MERGE_BYTES // (CHUNK * shape.depth * shape.itemsize)))
    merged = {"PACK": heads, "UNIT": config.pack, "STAGES": 2}
    wide = heads * CHUNK >= 128 or (heads == 1 and places <= FEW_PLACES)
    return both | tile, both | merged | {"num_warps": 8 if wide else 4}


class Section(NamedTuple):
    """The two launches of a section of parts.

    tiles, of_tiles      programs of gathered tiles; their arguments from `entries` to `workers`
    groups, of_groups    programs of 32 queries; their first unit and token, and number of tokens
    """

    tiles: int
    of_tiles: tuple[Any, ...]
    groups: int
    of_groups: tuple[int, int, int]


class GatheredPlan(NamedTuple):
    """What the plans of both passes share.

    tile, merged   constants of the kernel of gathered tiles, and of the one of 32 queries
    programs       kernels that gather the queries, in each call; none if the mask stays as it is
    parts          [parts of the largest section, D], in the dtype of Q
    boxes          K and V, or boxes of them
    by_query       counts, words, common and commons of `Gathered`; None for the last three if no
                   block is common: compiled without products, more programs fit an SM
    sizes          tokens, columns of `Gathered`, chunks, heads and lists, as both kernels take them
    most           common blocks of a chunk
    """

    tile: dict[str, Any]
    merged: dict[str, Any]
    programs: list[BoundKernel]
    parts: Tensor
    boxes: list[Any]
    by_query: tuple[Tensor | None, ...]
    sections: list[Section]
    sizes: tuple[int, ...]
    most: int


def gathered_plan(
    w: ListedMask, shape: _shapes.AttentionShape, config: Config, q: Tensor, k: Tensor, v: Tensor
) -> GatheredPlan:
    """Gather the queries, if the mask stays as it is, and cut the parts into sections.

    q, k, v  [batch, tokens, heads, D]. Raises Unsupported.
    """
    refuse(unsupported_mask(w.mask))
    mask, device = w.mask, w.mask.columns.device
    places = max(1, int(mask.counts.max()))
    if mask.shape[0] * places > MOST_ENTRIES:
        expected = f"expected at most {MOST_ENTRIES} places of all queries"
        refuse(f"{expected}, found {places} for each of {mask.shape[0]}")
    tile, merged = constants_of(shape, mask, config, places)
    options = places, least_common(merged["PACK"], shape.block[1]), config.path == "wgmma"
    if mask.keep:
        gathered = Gathered.without_data(mask, *options)
        programs = bound_gathering(mask, gathered, *options)
    else:
        gathered, programs = Gathered.of(mask, *options), []
    common = gathered.words, gathered.common, gathered.commons
    count, sections = sections_of(shape, config.pack, places)
    launches, read = [], (gathered.entries, gathered.starts, gathered.bases)
    for unit, units, token, width in sections:
        workers = max(1, WAVES * multiprocessors(device) // units)
        of_tiles = *read, unit, token // CHUNK, ceil((token + width) / CHUNK), width, workers
        groups = units * config.pack // merged["PACK"] * ceil(width / CHUNK)
        launches.append(Section(units * workers, of_tiles, groups, (unit, token, width)))
    heads = shape.heads, shape.kv_heads, mask.lists
    return GatheredPlan(
        tile,
        merged,
        programs,
        q.new_empty(count, shape.head_dim),
        [_shapes.head_box(x, shape, (config.keys, 1), config.path) for x in (k, v)],
        (gathered.counts, *((None,) * 3 if options[1] > CHUNK else common)),
        launches,
        (*mask.tokens, gathered.starts.shape[1], ceil(shape.q_tokens / CHUNK), *heads),
        gathered.common.shape[1],
    )


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


@triton.jit
def heads_of(first, heads, kv_heads, lists):  # type: ignore[no-untyped-def]
    """Return the sequence, head, list and key head of a head of all sequences."""
    sequence, head = first // heads, first % heads
    return sequence, head, sequence * lists + head * lists // heads, head // (heads // kv_heads)


@triton.jit  # type: ignore[untyped-decorator]
def group_of(  # type: ignore[no-untyped-def]
    first_unit, span, CHUNK: tl.constexpr, PACK: tl.constexpr, UNIT: tl.constexpr
):
    """Return a program's unit, first head in it and of all, and chunk: 32 queries, PACK heads."""
    of_unit = tl.cdiv(span, CHUNK)
    packed, tile = tl.program_id(0) // of_unit, tl.program_id(0) % of_unit
    unit, offset = packed // (UNIT // PACK), packed % (UNIT // PACK) * PACK
    return unit, offset, (first_unit + unit) * UNIT + offset, tile


@triton.jit  # type: ignore[untyped-decorator]
def common_blocks(  # type: ignore[no-untyped-def]
    words, common, commons, chunk, blocks, most, STEPS: tl.constexpr
):
    """Return where a chunk's words and common blocks begin, their steps, and the first block."""
    words += chunk.to(tl.int64) * blocks
    common += chunk.to(tl.int64) * most
    steps = tl.load(commons + chunk) * STEPS
    return words, common, steps, tl.load(common, steps > 0, 0)


@triton.jit  # type: ignore[untyped-decorator]
def load_common(  # type: ignore[no-untyped-def]
    k, v, sequence, tokens, head, heads, words, common, block, step, steps, which,
    D: tl.constexpr, DEPTH: tl.constexpr, SIDE: tl.constexpr, STEPS: tl.constexpr,
    KEYS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return a step of a common block: K, V, first and end key, who selected it; the next block."""
    key, end_key = block * SIDE + step % STEPS * KEYS, tl.minimum((block + 1) * SIDE, tokens)
    of_keys = k, v, sequence, tokens, head, heads
    k_tile, v_tile = load_keys(*of_keys, key, end_key, D, DEPTH, KEYS, TMA)
    selected = (tl.load(words + block) >> which) & 1
    block = tl.load(common + (step + 1) // STEPS, step + 1 < steps, 0)
    return k_tile, v_tile, key, end_key, selected, block
