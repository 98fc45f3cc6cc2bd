"""Select blocks of keys on a GPU: pooled queries and keys, and lists of the highest scores.

    q [batch, S, H, D] ──> means of blocks ┐                         `means`, one launch each
    k [batch, S, H_kv, D] ─> means         ├─> scores ──> offsets, columns      `select`
                                           ┘ by torch     a program for each row of blocks,
                                                          or for several short ones
A row's scores stay in registers, 32 of them in each thread if there are many rows, so that a count
is a sum within threads. The lowest score that is selected lies between two scores: at least as many
blocks as there are places reach `low`, or those of the wanted mass, and fewer reach `high`. A round
halves the interval, and rounds end once `low` has as many blocks as there are places: 8 to 10 in
random rows. If few places are not forced, a round takes the next lower score instead. Blocks are
listed in their order, from a word of bits for each thread.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats import _selection
from sparsebench.formats._selection import SELECTORS, Selection
from sparsebench.kernels._common.capture import make_lasting
from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import (
    ALIGNMENT,
    aligned,
    is_traced,
    readable,
)
from sparsebench.kernels._common.triton import BoundKernel, Template
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.attention._lanes import (
    as_order,
    as_score,
    count_bits,
    count_of,
    largest_of,
    lowest_bits,
    smallest_of,
    sum_before,
    total_of,
    word_of,
)

BOUND = 256  # launches in a cache, one for each selection and layout
MOST_BLOCKS = 8192  # of a row, in registers: 524,288 keys in blocks of 64
ROWS, WARPS = 16, 4  # tokens that a program of `means` adds up at a time
MANY_ROWS = 1 << 15  # from which on a warp selects for several rows: lists of single queries
SCORES, MANY_SCORES = 512, 1024  # of a warp; with many rows, they need not wait for other warps
ROUNDS = 2  # between two tests whether every row of a program is done
FEW = 3  # places that rounds fill with one block after another
LINEAR = tl.constexpr(10)  # tests before rounds halve integers, which ends after 32 in any case
PARTIAL = tl.constexpr(_selection.PARTIAL)
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
MOST_LOGIT = tl.constexpr(_selection.MOST_LOGIT)


def select(scores: Tensor, sizes: list[int], mass: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return offsets and columns as formats/_selection.py defines them, in one launch.

    Raises Unsupported for rows of more than MOST_BLOCKS.
    """
    if (count := scores.shape[1]) > MOST_BLOCKS:
        refuse(f"expected at most {MOST_BLOCKS} blocks of keys, found {count}: take larger blocks")
    rows = readable(scores)
    template = _select_launch(tuple(sizes), mass, rows.stride(0), rows.dtype, rows.device)
    offsets, columns = template.enqueue(rows)
    return offsets, columns


SELECTORS["cuda"] = select


@lru_cache(BOUND)
def _select_launch(
    sizes: tuple[int, ...], mass: float, stride: int, dtype: torch.dtype, device: torch.device
) -> Template:
    """Return the launch of `select`, which is bound once on each device."""
    selection = Selection.of([*sizes])._replace(mass=mass)
    starts = make_lasting(lambda: selection.offsets().to(device, torch.int32), device)
    size = selection.rows, selection.grid[1]
    scores = torch.empty_strided(size, (stride, 1), dtype=dtype, device="meta")
    offsets = torch.empty(selection.rows + 1, dtype=torch.int32, device="meta")
    columns = torch.empty(selection.places, dtype=torch.int32, device="meta")
    program = bound_select(selection, scores, starts, offsets, columns)
    return Template([program], (scores,), [offsets, columns])


def bound_select(
    selection: Selection,
    scores: Tensor,
    starts: Tensor,
    offsets: Tensor,
    columns: Tensor,
    partial: Tensor | None = None,
    slots: Tensor | None = None,
) -> BoundKernel:
    """Return the kernel that selects.

    starts   offsets, which it copies
    partial  uint8 like the scores: which blocks have only some of their elements
    slots    for each place, the number of its block in the grid, row by row
    """
    (height, count), (b_q, b_k) = selection.grid, selection.block
    blocks = triton.next_power_of_2(count)
    many = selection.rows >= MANY_ROWS
    several = min(max(MANY_SCORES // blocks, 1), 32) if many else 1
    warps = min(max(blocks // (MANY_SCORES if many else SCORES), 1), 8)
    vector = 1 if scores.stride(0) % 4 or count % 4 else 4
    lanes = min(32 * warps // several, blocks // vector)
    few = selection.keep - selection.first - selection.last <= FEW and selection.mass == 1
    sizes = selection.rows, height, count, *selection.tokens
    numbers = *sizes, selection.keep, selection.last
    mass = max(1, round(selection.mass * 2**24)) if selection.mass < 1 else None
    tensors = scores, starts, partial, offsets, columns, slots
    args = *tensors, scores.stride(0), *numbers, mass  # whole numbers, for Raw
    constants = {"B_Q": b_q, "B_K": b_k, "CAUSAL": selection.causal, "BLOCKS": blocks}
    constants |= {"ROWS": several, "LANES": lanes, "VECTOR": vector, "num_warps": warps}
    constants |= {"FIRST": selection.first, "FEW": few, "ROUNDS": ROUNDS}
    constants["PLACES"] = triton.next_power_of_2(min(selection.keep, count))
    grid = (triton.cdiv(selection.rows, several),)
    return BoundKernel(_select_rows, grid, args, constants, columns)


def _means(x: Tensor, block: int, groups: int, dtype: torch.dtype) -> Tensor:
    batch, tokens, heads, depth = x.shape
    if x.device.type != "cuda" and not triton.knobs.runtime.interpret:
        sums = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -tokens % block))
        sums = sums.view(batch, -1, block, groups, heads // groups, depth).sum((2, 4))
        first = torch.arange(0, tokens, block, device=x.device)
        real = (tokens - first).clamp(max=block) * (heads // groups)
        return (sums / real[:, None, None]).transpose(1, 2).contiguous().to(dtype)
    x = x if x.stride(3) == 1 and not x.data_ptr() % ALIGNMENT else aligned(x)
    layout = tuple(x.shape), tuple(x.stride()), x.dtype
    return _means_launch(*layout, x.device, block, groups, dtype).enqueue(x)[0]


def _means_sizes(x: Tensor, block: int, groups: int, dtype: torch.dtype) -> Tensor:
    batch, tokens, _, depth = x.shape
    return x.new_empty(batch, groups, -(-tokens // block), depth, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.block, ctx.groups, _ = inputs
    ctx.like = x.shape, x.dtype


def _spread(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    """Return the gradient of x: each element has its part of the mean's."""
    (_, tokens, heads, _), dtype = ctx.like
    first = torch.arange(0, tokens, ctx.block, device=gradient.device)
    pack = heads // ctx.groups
    real = (tokens - first).clamp(max=ctx.block) * pack
    parts = (gradient / real[:, None]).to(dtype).transpose(1, 2)
    whole = parts.repeat_interleave(pack, 2).repeat_interleave(ctx.block, 1)
    return whole[:, :tokens], None, None, None


_operator = torch_operator("means_of_blocks", _means, _means_sizes, save=_save, backward=_spread)


def means(x: Tensor, block: int, groups: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the mean of each block of tokens and group of heads [batch, groups, blocks, D].

    x      [batch, tokens, heads, D], heads a multiple of the groups; gradients flow to it
    dtype  of the means, which are rounded once
    """
    traced = is_traced() or (x.requires_grad and torch.is_grad_enabled())
    result: Tensor = (_operator if traced else _means)(x, block, groups, dtype)
    return result


@lru_cache(BOUND)
def _means_launch(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    block: int,
    groups: int,
    of_means: torch.dtype,
) -> Template:
    """Return the launch of `means`, which is bound once on each device."""
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    out = _means_sizes(x, block, groups, of_means)
    tokens, pack, depth = shape[1], shape[2] // groups, shape[3]
    args = x, out, tokens, groups, out.shape[2], pack, *strides[:3]
    constants = {"BLOCK": block, "D": depth, "DEPTH": triton.next_power_of_2(depth)}
    constants |= {"PACK": triton.next_power_of_2(pack), "ROWS": ROWS, "num_warps": WARPS}
    grid = (shape[0] * groups * out.shape[2],)
    return Template([BoundKernel(_add_up, grid, args, constants, out)], (x,), [out])


@triton.jit  # type: ignore[untyped-decorator]
def _select_rows(  # type: ignore[no-untyped-def]
    scores, starts, parts, offsets, columns, slots, stride, rows, q_blocks, count, queries, keys,
    places, last, mass,
    B_Q: tl.constexpr, B_K: tl.constexpr, CAUSAL: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, PLACES: tl.constexpr,
    FIRST: tl.constexpr, FEW: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Write the places of ROWS rows of blocks, and where they start; _lanes.py shows its tiles."""
    SIDE: tl.constexpr = BLOCKS // LANES  # blocks of a lane: at most 32, the bits of a word
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :, None, None]
    lane = tl.arange(0, LANES)[None, None, :, None]
    step = tl.arange(0, SIDE // VECTOR)[:, None, None, None] * VECTOR
    place = step + tl.arange(0, VECTOR)[None, None, None, :]  # in a lane
    block = lane * SIDE + place
    visible = tl.where(row < rows, count, 0)
    whole = tl.full((1, ROWS, 1, 1), BLOCKS, tl.int32)  # blocks before the first that is partial
    if CAUSAL:
        query, shift = row % q_blocks * B_Q, keys - queries
        limit = tl.minimum(query + B_Q, queries) - 1 + shift + B_K  # below B_K: sees no key
        visible = tl.minimum(tl.maximum(limit, 0) // B_K, visible)
        complete = tl.maximum(query + shift + 1, 0) // B_K  # for the first query of the row
        whole = tl.where(query + 1 < queries, complete, BLOCKS)
    start = tl.load(starts + row, row < rows, 0)
    places = tl.minimum(places, visible)

    read = (visible + VECTOR - 1) // VECTOR * VECTOR
    at = scores + row.to(tl.int64) * stride + block
    # The hint gives threads to rows and lanes before steps, so a lane's steps are in one thread.
    # Masks keep it from widening a load.
    at = tl.max_contiguous(at, [1, 2, 2, VECTOR])
    score = tl.load(at, block < read, 0.0).to(tl.float32)
    in_sight, forced = block < visible, (block < FIRST) | (block >= visible - last)
    weight, goal, forced_weight = None, None, None
    if mass is not None:
        usable = in_sight & (score > -float("inf"))  # False for NaN
        logit = tl.minimum(tl.maximum(score, -MOST_LOGIT), MOST_LOGIT)
        logit = tl.where(usable, logit, -MOST_LOGIT)
        weight = tl.where(usable, tl.exp(logit - largest_of(logit)), 0.0)
        goal = total_of(weight) * mass * 2**-24
        forced_weight = total_of(tl.where(forced, weight, 0.0))

    # The lowest score that is selected is at `low` or above it, and below `high`. `low_count` reach
    # `low`; `high_count` reach the last trial that was too high. Forced blocks are infinite.
    score = tl.where(in_sight & (forced == 0), score, float("nan"))
    high = largest_of(score)
    score = tl.where(in_sight & forced, float("inf"), score)
    low = smallest_of(score)
    if tl.max(tl.maximum(high, -low)) == float("inf"):
        low = smallest_of(tl.where(score == -float("inf"), float("inf"), score))
        enough = count_of(score == float("inf")) >= places
        if goal is not None:
            weighed = total_of(tl.where(score == float("inf"), weight, 0.0))
            enough = enough | (weighed >= goal)
        low = tl.where(enough, float("inf"), low)
        finite = largest_of(tl.where(score == float("inf"), -float("inf"), score))
        high = tl.where(enough, LARGEST, finite)
    high = as_score(as_order(high + 0.0) + 1)  # the next one; -0.0 and 0.0 are equal
    low_count, high_count = count_of(score >= low), tl.zeros((1, ROWS, 1, 1), tl.int32)
    excess, enough, going, tests = low_count, low_count < 0, 1, 0
    while going > 0:
        for _ in tl.static_range(ROUNDS):
            if FEW:
                trial = tl.maximum(largest_of(tl.where(score < high, score, low)), low)
            elif tests < LINEAR:
                trial = 0.5 * low + 0.5 * high
            else:
                least, most = as_order(low), as_order(high)
                trial = as_score((least & most) + ((least ^ most) >> 1))
            inside = score >= trial
            trial_count = count_of(inside)
            enough = trial_count >= places
            if goal is not None:
                enough = enough | (total_of(tl.where(inside, weight, 0.0)) >= goal)
            low, high = tl.where(enough, trial, low), tl.where(enough, high, trial)
            low_count = tl.where(enough, trial_count, low_count)
            high_count = tl.where(enough, high_count, trial_count)
        excess = low_count - places if goal is None else low_count - high_count - 1
        done = enough if FEW else as_order(high) - 1 <= as_order(low)
        going = tl.max(((excess > 0) & (done == 0)).to(tl.int32))
        tests += 1

    word = word_of(score >= low, place)
    if goal is not None or tl.max(excess) > 0:
        lane_first = lane * SIDE
        ends = lowest_bits(visible - lane_first, SIDE) & ~lowest_bits(
            visible - last - lane_first, SIDE
        )
        always = ends | lowest_bits(tl.minimum(FIRST, visible) - lane_first, SIDE)
        word = word_of(score > low, place)
        ties = word_of(score == low, place) & ~always
        word = tl.where(low == float("inf"), 0, word) | always
        rest = places - tl.sum(count_bits(word), 2, keep_dims=True)
        if goal is not None:
            missing = goal - total_of(tl.where(score > low, weight, 0.0))
            missing -= tl.where(low == float("inf"), forced_weight, 0.0)
            more = tl.ceil(missing / largest_of(tl.where(score == low, weight, 0.0)))
            more = tl.where(missing > 0, tl.minimum(more, BLOCKS), 0.0)
            rest = tl.minimum(rest, more.to(tl.int32))
        lane_count = count_bits(ties)
        lane_count = tl.minimum(lane_count, rest - sum_before(lane_count))
        for i in tl.range(0, tl.max(lane_count)):
            word, ties = tl.where(i < lane_count, word | (ties & -ties), word), ties & (ties - 1)

    lane_count = count_bits(word)
    place = start + sum_before(lane_count)
    for _ in tl.range(0, tl.max(lane_count)):
        lowest = (word & -word).to(tl.float32).to(tl.int32, bitcast=True)
        column, some = lane * SIDE + ((lowest >> 23) & 0xFF) - 127, word != 0
        number, partial = row.to(tl.int64) * count + column, column >= whole
        if parts is not None:
            partial = partial | (tl.load(parts + number, some, 0) != 0)
        tl.store(columns + place, tl.where(partial, column | PARTIAL, column), some)
        if slots is not None:
            tl.store(slots + place, number.to(tl.int32), some)
        word, place = word & (word - 1), place + 1

    length, place = tl.sum(lane_count, 2, keep_dims=True), tl.arange(0, PLACES)[None, None, :, None]
    empty = (place >= length) & (place < places)
    tl.store(columns + start + place, count | PARTIAL, empty)
    tl.store(offsets + row, start, row < rows)
    tl.store(offsets + row + 1, start + places, row < rows)  # the next row's start


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    x, out, tokens, groups, blocks, pack, batch_stride, token_stride, head_stride,
    BLOCK: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, PACK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write the mean of a block of tokens of a group of heads."""
    program = tl.program_id(0)
    block, group, sequence = (
        program % blocks,
        program // blocks % groups,
        program // blocks // groups,
    )
    lane = tl.arange(0, PACK * DEPTH)
    head, depth = lane // DEPTH, lane % DEPTH
    stored = (head < pack) & (depth < D)
    from_head = (group * pack + head).to(tl.int64) * head_stride  # beyond 2^31 from 520k tokens on
    at = x + sequence.to(tl.int64) * batch_stride + from_head + depth
    end = tl.minimum((block + 1) * BLOCK, tokens)
    sums = tl.zeros((ROWS, PACK * DEPTH), tl.float32)
    for first in tl.static_range(0, BLOCK, ROWS):
        token = (block * BLOCK + first + tl.arange(0, ROWS))[:, None].to(tl.int64)
        tile = tl.load(at[None, :] + token * token_stride, stored[None, :] & (token < end), 0.0)
        sums += tile.to(tl.float32)
    total = tl.sum(tl.reshape(tl.sum(sums, 0), (PACK, DEPTH)), 0) / ((end - block * BLOCK) * pack)
    depth = tl.arange(0, DEPTH)
    at, mean = out + program.to(tl.int64) * D + depth, total.to(out.dtype.element_ty)
    tl.store(at, mean, depth < D)
