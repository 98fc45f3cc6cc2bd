"""Select blocks of keys on a GPU: pooled queries and keys, and lists of the highest scores.

    q [batch, S, H, D] ──> means of blocks ┐                         `means`, one launch each
    k [batch, S, H_kv, D] ─> means         ├─> scores ──> offsets, columns      `select_row`
                                           ┘ by torch     a program for each row of blocks,
                                                          or for several short ones
A row's scores stay in registers. The smallest score that is selected is found bit by bit: of the
integers that are ordered as the scores are, t is the largest that as many reach as the row has
places and usable scores, or that blocks of the wanted mass reach. 32 rounds of a comparison and a
sum need no sort, and blocks are listed in their order. Without a mass, rounds end once as many
reach it.
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

BOUND = 256  # launches in a cache, one for each selection and layout
MOST_BLOCKS = 8192  # of a row, in registers: 524,288 keys in blocks of 64
ROWS, WARPS = 16, 4  # tokens that a program of `means` adds up at a time
MANY_ROWS = 1 << 16  # from which on a warp selects for several rows: lists of single queries
SCORES, MANY_SCORES = 512, 1024  # of a warp; with many rows, they need not wait for other warps
ROUNDS = tl.constexpr(4)  # from one test whether the smallest scores are known to the next
LOWEST, MOST_LOGIT = tl.constexpr(-(2**31)), tl.constexpr(_selection.MOST_LOGIT)


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
    several = min(max(MANY_SCORES // blocks, 1), 16) if many else 1
    warps = min(max(blocks // (MANY_SCORES if many else SCORES), 1), 8)
    sizes = selection.rows, height, count, *selection.tokens
    numbers = *sizes, selection.keep, selection.first, selection.last
    wanted = max(1, round(selection.mass * 2**24)) if selection.mass < 1 else None
    tensors = scores, starts, partial, offsets, columns, slots
    args = *tensors, scores.stride(0), *numbers, wanted  # whole numbers, for Raw
    constants = {"B_Q": b_q, "B_K": b_k, "CAUSAL": selection.causal, "BLOCKS": blocks}
    constants |= {"ROWS": several, "num_warps": warps}
    constants["PLACES"] = triton.next_power_of_2(min(selection.keep, count))
    grid = (triton.cdiv(selection.rows, several),)
    return BoundKernel(_select_rows, grid, args, constants, columns)


def _means(x: Tensor, block: int, groups: int) -> Tensor:
    batch, tokens, heads, depth = x.shape
    if x.device.type != "cuda" and not triton.knobs.runtime.interpret:
        sums = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -tokens % block))
        sums = sums.view(batch, -1, block, groups, heads // groups, depth).sum((2, 4))
        first = torch.arange(0, tokens, block, device=x.device)
        real = (tokens - first).clamp(max=block) * (heads // groups)
        return (sums / real[:, None, None]).transpose(1, 2).contiguous()
    x = x if x.stride(3) == 1 and not x.data_ptr() % ALIGNMENT else aligned(x)
    template = _means_launch(tuple(x.shape), tuple(x.stride()), x.dtype, x.device, block, groups)
    return template.enqueue(x)[0]


def _means_sizes(x: Tensor, block: int, groups: int) -> Tensor:
    batch, tokens, _, depth = x.shape
    return x.new_empty(batch, groups, -(-tokens // block), depth, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.block, ctx.groups = inputs
    ctx.like = x.shape, x.dtype


def _spread(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    """Return the gradient of x: each element has its part of the mean's."""
    (_, tokens, heads, _), dtype = ctx.like
    first = torch.arange(0, tokens, ctx.block, device=gradient.device)
    pack = heads // ctx.groups
    real = (tokens - first).clamp(max=ctx.block) * pack
    parts = (gradient / real[:, None]).to(dtype).transpose(1, 2)
    whole = parts.repeat_interleave(pack, 2).repeat_interleave(ctx.block, 1)
    return whole[:, :tokens], None, None


_operator = torch_operator("means_of_blocks", _means, _means_sizes, save=_save, backward=_spread)


def means(x: Tensor, block: int, groups: int) -> Tensor:
    """Return the mean of each block of tokens and group of heads, fp32 [batch, groups, blocks, D].

    x  [batch, tokens, heads, D], heads a multiple of the groups; gradients flow to it
    """
    traced = is_traced() or (x.requires_grad and torch.is_grad_enabled())
    result: Tensor = (_operator if traced else _means)(x, block, groups)
    return result


@lru_cache(BOUND)
def _means_launch(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    block: int,
    groups: int,
) -> Template:
    """Return the launch of `means`, which is bound once on each device."""
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    out = _means_sizes(x, block, groups)
    tokens, pack, depth = shape[1], shape[2] // groups, shape[3]
    args = x, out, tokens, groups, out.shape[2], pack, *strides[:3]
    constants = {"BLOCK": block, "D": depth, "DEPTH": triton.next_power_of_2(depth)}
    constants |= {"PACK": triton.next_power_of_2(pack), "ROWS": ROWS, "num_warps": WARPS}
    grid = (shape[0] * groups * out.shape[2],)
    return Template([BoundKernel(_add_up, grid, args, constants, out)], (x,), [out])


@triton.jit  # type: ignore[untyped-decorator]
def _select_rows(  # type: ignore[no-untyped-def]
    scores, starts, parts, offsets, columns, slots, stride, rows, q_blocks, count, queries, keys,
    places, first, last, mass,
    B_Q: tl.constexpr, B_K: tl.constexpr, CAUSAL: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write the places of ROWS rows of blocks, and where they start."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    block, q_block = tl.arange(0, BLOCKS)[None, :], row % q_blocks
    inside = (row < rows) & (block < count)
    visible = tl.full((ROWS, 1), count, tl.int32)
    last_key = tl.minimum((block + 1) * B_K, keys) - 1
    partial = last_key + row < 0  # of no block
    if CAUSAL:
        last_query = tl.minimum((q_block + 1) * B_Q, queries) - 1
        limit = last_query + keys - queries + B_K  # below B_K if the row sees no key
        visible = tl.minimum(tl.maximum(limit, 0) // B_K, count)
        partial = last_key > q_block * B_Q + keys - queries

    number = row.to(tl.int64) * count + block  # in the grid
    if parts is not None:
        partial = partial | (tl.load(parts + number, inside, 0) != 0)
    score = tl.load(scores + row.to(tl.int64) * stride + block, inside, 0.0).to(tl.float32)
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where((score != score) | (score == -float("inf")), LOWEST, order)
    order = tl.where((block < first) | (block >= visible - last), 0x7FFFFFFF, order)
    order = tl.where((block >= visible) | (row >= rows), LOWEST, order)

    places, weight, goal = tl.minimum(places, visible), None, None
    most = tl.minimum(places, tl.sum((order != LOWEST).to(tl.int32), 1, keep_dims=True))
    if mass is not None:
        usable = (score > -float("inf")) & (block < visible)
        logit = tl.where(
            usable, tl.minimum(tl.maximum(score, -MOST_LOGIT), MOST_LOGIT), -MOST_LOGIT
        )
        weight = tl.where(usable, tl.exp(logit - tl.max(logit, 1, keep_dims=True)), 0.0)
        goal = tl.sum(weight, 1, keep_dims=True) * mass * 2**-24
    least, one = tl.full((ROWS, 1), LOWEST, tl.int32), tl.full((ROWS, 1), 1, tl.int32)
    bit, enough = 32, 0
    while (bit > 0) & (enough == 0):
        for _ in tl.static_range(ROUNDS):
            bit -= 1
            trial = least ^ (one << bit)  # 0 in the first round
            least = tl.where(_suffice(order >= trial, most, weight, goal), trial, least)
        if goal is None:
            taken = tl.sum((order >= least).to(tl.int32), 1, keep_dims=True)
            enough = tl.min((taken == most).to(tl.int32))
    chosen = order >= least
    if enough == 0:
        above, equal = order > least, order == least
        rest = most - tl.sum(above.to(tl.int32), 1, keep_dims=True)
        stays = tl.cumsum(equal.to(tl.int32), 1) <= rest
        if mass is not None:
            before = tl.sum(tl.where(above, weight, 0.0), 1, keep_dims=True) - weight
            before += tl.cumsum(tl.where(equal, weight, 0.0), 1)
            stays = stays & ((before < goal) | (order == 0x7FFFFFFF))
        chosen = above | (equal & stays)
    chosen = chosen & (order != LOWEST)

    start = tl.load(starts + row, row < rows, 0)
    taken = tl.sum(chosen.to(tl.int32), 1, keep_dims=True)
    place = tl.cumsum(chosen.to(tl.int32), 1) - 1
    tl.store(columns + start + place, tl.where(partial, block | LOWEST, block), chosen)
    lane = tl.arange(0, PLACES)[None, :]
    empty = (lane >= taken) & (lane < places) & (row < rows)
    tl.store(columns + start + lane, count | LOWEST, empty)
    if slots is not None:
        tl.store(slots + start + place, number.to(tl.int32), chosen)
    tl.store(offsets + row, start, row < rows)
    tl.store(offsets + row + 1, start + places, row < rows)  # the next row's start


@triton.jit
def _suffice(inside, most, weight, goal):  # type: ignore[no-untyped-def]
    """Return whether `most` blocks are inside, or weigh as much as is wanted."""
    enough = tl.sum(inside.to(tl.int32), 1, keep_dims=True) >= most
    if goal is not None:
        weighed = tl.sum(tl.where(inside, weight, 0.0), 1, keep_dims=True)
        enough = enough | (weighed >= goal)
    return enough


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
    tl.store(out + program.to(tl.int64) * D + depth, total, depth < D)
