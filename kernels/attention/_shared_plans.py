"""Plans for masks whose blocks are selected on the device: all masks of the same sizes share them.

A plan holds the addresses of a mask's lists. So the plans of these masks are made for one mask, to
which the lists of each call are copied before its kernels read them:

    forward    columns ──> columns of that mask                                         `_copy`
    backward   columns ──> the same, and how many blocks of queries each key block has  `_count`
               columns ──> its transposed lists                                         `_transpose`

Nothing waits for the device, and no size depends on what is selected. The calls of one thread on
one stream, or in one captured graph, run one after the other. Each of these has plans of its own.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.capture import captured_into, is_capturing, keep, make_lasting
from sparsebench.kernels._common.operator import Operator
from sparsebench.kernels._common.triton import BoundKernel, Template

MOST_PLANS = 64  # that are kept: those used last
KEYS = 32  # blocks of keys of a program: the bits of a word
ELEMENTS = 1 << 12  # places, and bits, that a program has at a time
COPIED = 1024  # columns that a program copies
LOWEST = tl.constexpr(-(2**31))


@dataclass(eq=False)
class SharedPlans:
    """The plans of all masks of the same sizes.

    operator           plans of one mask, over whose lists `load` writes those of other masks
    forward, backward  launches that copy a mask's columns to these lists; backward transposes, too
    """

    operator: Operator
    forward: Template
    backward: Template

    def load(self, columns: Tensor, *, transposed: bool) -> None:
        """Enqueue the copy of a mask's columns, and of its transposed lists for gradients."""
        template = self.backward if transposed else self.forward
        template(columns)
        if is_capturing(columns):
            keep(template)


_PLANS: "OrderedDict[Any, SharedPlans]" = OrderedDict()


def shared_plans_of(mask: BlockMask, operator_of: Callable[[BlockMask], Operator]) -> SharedPlans:
    """Return the plans for masks of these sizes in this thread, on its current stream or graph."""
    device = mask.columns.device
    stream = graph = None
    if device.type == "cuda":
        stream, graph = torch._C._cuda_getCurrentRawStream(device.index), captured_into()
    sizes = mask.tokens, mask.block, mask.batch, mask.lists, mask.causal, mask.keep
    key = *sizes, device, get_ident(), stream, graph and graph[0]
    if (plans := _PLANS.pop(key, None)) is None:
        plans = make_lasting(lambda: make_shared_plans(mask, operator_of), device)
    _PLANS[key] = plans  # at the end; another thread may drop it at any time
    while len(_PLANS) > MOST_PLANS:
        _PLANS.popitem(last=False)
    return plans


def make_shared_plans(mask: BlockMask, operator_of: Callable[[BlockMask], Operator]) -> SharedPlans:
    """Return new plans, for a mask of random blocks: plans order their work by their lists."""
    device, keep_, count = mask.columns.device, mask.keep, len(mask.columns)
    draw = torch.Generator(device).manual_seed(0)
    grid = mask.batch, mask.lists, mask.q_blocks, mask.kv_blocks
    scores = torch.rand(grid, generator=draw, device=device)
    options: dict[str, Any] = {"block": [*mask.block], "tokens": [*mask.tokens]}
    first = BlockMask.from_scores(scores, keep_, causal=mask.causal, **options)
    room = first.columns.new_zeros(3, count + 1)  # kernels read one past the last
    columns, rows, places = (line[:count] for line in room)
    columns.copy_(first.columns)
    first = replace(first, columns=columns)
    lists = first.transposed
    rows[: len(lists.rows)], places[: len(lists.rows)] = lists.rows, lists.places
    first.__dict__["transposed"] = lists._replace(rows=rows, places=places)
    counts = lists.offsets.new_zeros(len(lists.offsets) - 1)
    return SharedPlans(operator_of(first), _copy_launch(first), _transpose_launch(first, counts))


def _source(mask: BlockMask) -> Tensor:
    return torch.empty(len(mask.columns), dtype=torch.int32, device="meta")


def _copy_launch(mask: BlockMask) -> Template:
    """Return the launch of the copy."""
    source, count = _source(mask), len(mask.columns)
    args = source, mask.columns, count, mask.kv_blocks
    grid = (triton.cdiv(count, COPIED),)
    program = BoundKernel(_copy, grid, args, {"COPIED": COPIED}, mask.columns)
    return Template([program], (source,), [])


def _transpose_launch(mask: BlockMask, counts: Tensor) -> Template:
    """Return both launches that transpose the lists."""
    source, lists = _source(mask), mask.transposed
    programs = mask.batch * mask.lists * triton.cdiv(mask.kv_blocks, KEYS)
    places = triton.next_power_of_2(mask.keep)
    rows = min(max(ELEMENTS // max(places, KEYS), 2), triton.next_power_of_2(mask.q_blocks))
    constants = {"PLACES": places, "ROWS": rows}
    sizes = mask.q_blocks, mask.kv_blocks
    count_args = source, mask.offsets, mask.columns, counts, *sizes
    first = BoundKernel(_count, (programs,), count_args, constants, counts)
    transpose_args = source, mask.offsets, counts, lists.offsets, lists.rows, lists.places, *sizes
    second = BoundKernel(_transpose, (programs,), transpose_args, constants, lists.rows, first)
    return Template([second], (source,), [])


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, columns, count, empty, COPIED: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * COPIED + tl.arange(0, COPIED)
    column = tl.load(source + at, at < count, 0)
    tl.store(columns + at, _inside(column, empty), at < count)


@triton.jit
def _inside(column, empty):  # type: ignore[no-untyped-def]
    """Return a column, or that of an empty place if it is no block."""
    return tl.where((column & 0x7FFFFFFF) < empty, column, empty | LOWEST)


@triton.jit  # type: ignore[untyped-decorator]
def _words(  # type: ignore[no-untyped-def]
    source, offsets, list_, first_row, part, q_blocks, kv_blocks,
    PLACES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the places of ROWS rows [ROWS, PLACES], their columns, and which of them are there.

    Also a bit for each of 32 key blocks [ROWS]: whether the row has it, and whether it is partial;
    and the place of the first one. Columns ascend, so those of a word lie side by side.
    """
    row = first_row + tl.arange(0, ROWS)
    start = tl.load(offsets + list_ * q_blocks + row, row < q_blocks, 0)
    end = tl.load(offsets + list_ * q_blocks + row + 1, row < q_blocks, 0)
    at = start[:, None] + tl.arange(0, PLACES)[None, :]
    inside = at < end[:, None]
    column = tl.load(source + at, inside, -1)
    block = column & 0x7FFFFFFF
    real = inside & (block < kv_blocks)
    bit = tl.where(real & (block // 32 == part), 1 << (block % 32), 0)
    has, partly = tl.sum(bit, 1), tl.sum(tl.where(column < 0, bit, 0), 1)
    place = start + tl.sum((real & (block // 32 < part)).to(tl.int32), 1)
    return at, inside, column, has, partly, place


@triton.jit  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    source, offsets, columns, counts, q_blocks, kv_blocks, PLACES: tl.constexpr, ROWS: tl.constexpr
):
    """Count the blocks of queries of 32 key blocks of a list, and copy a part of its columns."""
    programs = tl.cdiv(kv_blocks, 32)
    list_, part = tl.program_id(0) // programs, tl.program_id(0) % programs
    lane = tl.arange(0, 32)
    total = tl.zeros((32,), tl.int32)
    for step in range(tl.cdiv(q_blocks, ROWS)):
        of_rows = source, offsets, list_, step * ROWS, part, q_blocks, kv_blocks
        at, inside, column, has, _, _ = _words(*of_rows, PLACES, ROWS)
        total += tl.sum((has[:, None] >> lane[None, :]) & 1, 0)
        tl.store(columns + at, _inside(column, kv_blocks), inside & (step % programs == part))
    key = part * 32 + lane
    tl.store(counts + list_ * kv_blocks + key, total, key < kv_blocks)


@triton.jit  # type: ignore[untyped-decorator]
def _transpose(  # type: ignore[no-untyped-def]
    source, offsets, counts, starts, rows, places, q_blocks, kv_blocks,
    PLACES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write where 32 key blocks of a list start, and their blocks of queries, ascending."""
    programs = tl.cdiv(kv_blocks, 32)
    list_, part = tl.program_id(0) // programs, tl.program_id(0) % programs
    lane, many = tl.arange(0, 32), tl.arange(0, 1024)
    key, first = part * 32 + lane, list_ * kv_blocks + part * 32
    before = tl.zeros((1024,), tl.int32)
    for i in range(0, first, 1024):
        before += tl.load(counts + i + many, i + many < first, 0)
    count = tl.load(counts + first + lane, key < kv_blocks, 0)
    end = tl.sum(before, 0) + tl.cumsum(count, 0)
    to = end - count
    tl.store(starts + first + lane, to, key < kv_blocks)
    tl.store(starts + first + lane + 1, end, key < kv_blocks)  # the next one's start
    for step in range(tl.cdiv(q_blocks, ROWS)):
        of_rows = source, offsets, list_, step * ROWS, part, q_blocks, kv_blocks
        _, _, _, has, partly, place = _words(*of_rows, PLACES, ROWS)
        here = (has[:, None] >> lane[None, :]) & 1
        flag = (partly[:, None] >> lane[None, :]) & 1
        row = (step * ROWS + tl.arange(0, ROWS))[:, None]
        slot = to[None, :] + tl.cumsum(here, 0) - here
        tl.store(rows + slot, tl.where(flag > 0, row | LOWEST, row), here > 0)
        tl.store(places + slot, place[:, None] + tl.cumsum(here, 1) - here, here > 0)
        to += tl.sum(here, 0)
