"""The steps between the products of a decoding step, in Triton: norms and attention.

    normed     S = S + D                        D: the layer's output; none at first
               Z = S / rms(S) * gain            one program per sequence

    attended   q, k = turned(unit(q)), turned(unit(k))
               O = attention(q, [keys, k], [values, v])

               One program per sequence, head of the cache and part of its tokens; it holds all
               query heads that read this head. The first part has the token of the step, whose
               key and value it writes to `page`, where the cache of a server would grow.

                   1 part     O
                   parts      sums, their largest score and weight ─> a second kernel: O

Z and O are in 16 bits, or in e4m3 at a scale of 1. Sums are in fp32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import e, log2
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.search import search
from sparsebench.kernels._common.triton import COMPILE_THREADS, BoundKernel, whole_tile

NORM_ELEMENTS = 16  # per thread
PROGRAMS = 1, 2, 4, 8  # programs of attention per multiprocessor
SHAPES = (64, 4, 3), (64, 4, 2), (64, 8, 3), (128, 4, 3), (128, 4, 2), (128, 8, 3), (32, 4, 4)


@dataclass(frozen=True)
class Config:
    """One way to run attention: parts of the cache, tokens of a step, warps, stages."""

    parts: int
    tokens: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Attention:
    """The operands of attention beside the projected rows.

    keys, values  [m, kv_heads, cache, head_dim], contiguous
    turn          fp32 [2, head_dim / 2]: cosine and sine of each pair at the token's position
    epsilon       of the RMS norm of each head
    """

    heads: int
    keys: Tensor
    values: Tensor
    turn: Tensor
    epsilon: float


def normed(
    stream: Tensor, added: Tensor | None, gain: Tensor, epsilon: float, out: Tensor, z: Tensor
) -> BoundKernel:
    """Return the kernel that writes the stream after a sum to `out`, and its norm to `z`.

    stream, added, out, z  [m, hidden], contiguous; out may be the stream itself
    """
    m, hidden = stream.shape
    columns = triton.next_power_of_2(hidden)
    warps = min(max(columns // (32 * NORM_ELEMENTS), 1), 16)
    constants = {"EPSILON": epsilon, "COLUMNS": columns, "ADDED": added is not None}
    args = stream, stream if added is None else added, gain, out, z, hidden
    return BoundKernel(_norm, (m,), args, constants | {"num_warps": warps}, z)


def configurations(about: Attention) -> list[Config]:
    """Return the configurations to time; on a CPU, one."""
    (m, kv_heads, cache, _), device = about.keys.shape, about.keys.device
    configs: dict[Config, None] = {}
    for tokens, warps, stages in SHAPES:
        tokens = min(tokens, whole_tile(cache))
        for programs in PROGRAMS:
            programs_per_head = programs * multiprocessors(device) / (m * kv_heads)
            parts = min(max(1, 2 ** round(log2(programs_per_head))), triton.cdiv(cache, tokens))
            configs[Config(parts, tokens, warps, stages)] = None
    return [*configs]


def attended(
    projected: Tensor, about: Attention, out: Tensor, config: Config, page: Sequence[Tensor]
) -> BoundKernel:
    """Return the kernel that writes O [m, heads * head_dim] to `out`, from rows q | k | v.

    page  keys and values [m, kv_heads, head_dim], contiguous, which get those of the token
    """
    m, kv_heads, cache, width = about.keys.shape
    group = about.heads // kv_heads
    rows = whole_tile(group)
    each = triton.cdiv(triton.cdiv(cache, config.parts), config.tokens) * config.tokens
    parts = triton.cdiv(cache, each)
    shape = {"GROUP": group, "ROWS": rows, "HALF": width // 2, "PADDED": whole_tile(width // 2)}
    whole = parts == 1
    sums = out if whole else out.new_empty(m, kv_heads, parts, rows, width, dtype=torch.float32)
    weights = out.new_empty(m, kv_heads, parts, rows, 2, dtype=torch.float32)
    args = projected, about.keys, about.values, about.turn, *page, sums, weights
    constants = {
        **shape,
        "EPSILON": about.epsilon,
        "TOKENS": config.tokens,
        "WHOLE": whole,
        "STAGES": config.stages,
        "TO_LOG2": log2(e) / width**0.5,
        "PRECISION": "ieee",
    }
    first = BoundKernel(
        _attend,
        (m * kv_heads * parts,),
        (*args, cache, kv_heads, parts, each),
        constants | {"num_warps": config.warps},
        out,
    )
    if whole:
        return first
    joined = {**shape, "PADDED_PARTS": triton.next_power_of_2(parts), "num_warps": 2}
    to_join = sums, weights, out, parts
    return BoundKernel(_join, (m * about.heads,), to_join, joined, out, before=first)


def fastest_attention(
    projected: Tensor,
    about: Attention,
    out: Tensor,
    page: Sequence[Tensor],
    pinned: Mapping[str, Any] | None,
) -> tuple[Config, list[dict[str, Any]]]:
    """Return the fastest or the pinned configuration, and the timed candidates."""
    if pinned:
        return Config(**pinned), []
    configs = configurations(about)
    calls = [attended(projected, about, out, config, page) for config in configs]
    result = search(calls, out.device, COMPILE_THREADS)
    return configs[result.best], result.lines(
        [asdict(config) for config in configs], of="attention"
    )


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    stream,
    added,
    gain,
    out,
    z,
    hidden,
    EPSILON: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDED: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    inside, at = column < hidden, tl.program_id(0) * hidden + column
    by = tl.load(gain + column, inside, 0.0).to(tl.float32)
    s = tl.load(stream + at, inside, 0.0).to(tl.float32)
    if ADDED:
        s += tl.load(added + at, inside, 0.0).to(tl.float32)
    tl.store(out + at, s.to(out.dtype.element_ty), inside)
    scale = tl.rsqrt(tl.sum(s * s) / hidden + EPSILON)
    tl.store(z + at, (s * scale * by).to(z.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _turned_unit(a, b, cos, sin, HALF: tl.constexpr, EPSILON: tl.constexpr):  # type: ignore[no-untyped-def]
    """Norm each row a | b of a head, then turn its pairs."""
    scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + EPSILON)[:, None]
    return (a * cos - b * sin) * scale, (b * cos + a * sin) * scale


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    projected,
    keys,
    values,
    turn,
    new_keys,
    new_values,
    sums,
    weights,
    cache,
    kv_heads,
    parts,
    each,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    EPSILON: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    TO_LOG2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    part, pair = tl.program_id(0) % parts, tl.program_id(0) // parts
    sequence, of_cache = pair // kv_heads, pair % kv_heads
    WIDTH: tl.constexpr = 2 * HALF
    dtype = keys.dtype.element_ty
    row, half = tl.arange(0, ROWS), tl.arange(0, PADDED)
    own, inside = row < GROUP, half < HALF
    heads = kv_heads * GROUP
    start = projected + sequence.to(tl.int64) * (heads + 2 * kv_heads) * WIDTH
    cos = tl.load(turn + half, inside, 0.0)[None, :]
    sin = tl.load(turn + HALF + half, inside, 0.0)[None, :]

    at = start + (of_cache * GROUP + row)[:, None] * WIDTH + half[None, :]
    there = own[:, None] & inside[None, :]
    a = tl.load(at, there, 0.0).to(tl.float32)
    b = tl.load(at + HALF, there, 0.0).to(tl.float32)
    a, b = _turned_unit(a, b, cos, sin, HALF, EPSILON)
    qa, qb = a.to(dtype), b.to(dtype)

    at = start + (heads + of_cache) * WIDTH + half[None, :]
    a = tl.load(at, inside[None, :], 0.0).to(tl.float32)
    b = tl.load(at + HALF, inside[None, :], 0.0).to(tl.float32)
    a, b = _turned_unit(a, b, cos, sin, HALF, EPSILON)
    ka, kb = a.to(dtype), b.to(dtype)
    at += kv_heads * WIDTH
    va, vb = tl.load(at, inside[None, :], 0.0), tl.load(at + HALF, inside[None, :], 0.0)
    if part == 0:
        place = pair.to(tl.int64) * WIDTH + half[None, :]
        tl.store(new_keys + place, ka, inside[None, :])
        tl.store(new_keys + place + HALF, kb, inside[None, :])
        tl.store(new_values + place, va, inside[None, :])
        tl.store(new_values + place + HALF, vb, inside[None, :])

    score = tl.sum(qa.to(tl.float32) * ka.to(tl.float32), 1)
    score += tl.sum(qb.to(tl.float32) * kb.to(tl.float32), 1)
    first = part == 0
    most = tl.where(first, score * TO_LOG2, float("-inf"))
    weight = tl.where(first, 1.0, 0.0) + tl.zeros([ROWS], tl.float32)
    oa = tl.where(first, va.to(tl.float32), 0.0) + tl.zeros([ROWS, PADDED], tl.float32)
    ob = tl.where(first, vb.to(tl.float32), 0.0) + tl.zeros([ROWS, PADDED], tl.float32)

    begin = pair.to(tl.int64) * cache
    last = tl.minimum((part + 1) * each, cache)
    for done in tl.range(part * each, last, TOKENS, num_stages=STAGES):
        token = done + tl.arange(0, TOKENS)
        known = (token < last)[:, None] & inside[None, :]
        box = (begin + token)[:, None] * WIDTH + half[None, :]
        left, right = tl.load(keys + box, known, 0.0), tl.load(keys + box + HALF, known, 0.0)
        scores = tl.dot(qa, tl.trans(left), input_precision=PRECISION)
        scores = tl.dot(qb, tl.trans(right), scores, input_precision=PRECISION) * TO_LOG2
        scores = tl.where((token < last)[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrunk = tl.exp2(most - higher)
        most, weight = higher, weight * shrunk + tl.sum(p, 1)
        left, right = tl.load(values + box, known, 0.0), tl.load(values + box + HALF, known, 0.0)
        oa = tl.dot(p.to(dtype), left, oa * shrunk[:, None], input_precision=PRECISION)
        ob = tl.dot(p.to(dtype), right, ob * shrunk[:, None], input_precision=PRECISION)

    if WHOLE:
        to = sums + (sequence.to(tl.int64) * heads + of_cache * GROUP + row)[:, None] * WIDTH
        oa, ob = oa / weight[:, None], ob / weight[:, None]
        tl.store(to + half[None, :], oa.to(sums.dtype.element_ty), there)
        tl.store(to + HALF + half[None, :], ob.to(sums.dtype.element_ty), there)
    else:
        line = tl.program_id(0).to(tl.int64) * ROWS + row  # parts of a pair are neighbours
        to = sums + line[:, None] * WIDTH + half[None, :]
        tl.store(to, oa, there)
        tl.store(to + HALF, ob, there)
        tl.store(weights + 2 * line, most, own)
        tl.store(weights + 2 * line + 1, weight, own)


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    sums,
    weights,
    out,
    parts,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):
    head = tl.program_id(0)
    part, column = tl.arange(0, PADDED_PARTS), tl.arange(0, 2 * PADDED)
    WIDTH: tl.constexpr = 2 * HALF
    known, inside = part < parts, column < WIDTH
    place = ((head // GROUP).to(tl.int64) * parts + part) * ROWS + head % GROUP
    most = tl.load(weights + 2 * place, known, float("-inf"))
    weight = tl.load(weights + 2 * place + 1, known, 0.0)
    factor = tl.exp2(most - tl.max(most, 0))
    at = sums + place[:, None] * WIDTH + column[None, :]
    each = tl.load(at, known[:, None] & inside[None, :], 0.0)
    total = tl.sum(each * factor[:, None], 0) / tl.sum(weight * factor, 0)
    tl.store(out + head.to(tl.int64) * WIDTH + column, total.to(out.dtype.element_ty), inside)
