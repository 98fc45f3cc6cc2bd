"""Plans for masks whose blocks are listed on the device: all masks of the same sizes share them.

A plan holds the addresses of a mask's lists. So the plans of these masks are made for one mask, to
which the lists of each call are written before its kernels read them:

    forward    columns ──> columns of that mask                                         `_copy`
    backward   columns ──> the same, and how many blocks of queries each key block has  `_count`
               columns ──> its transposed lists                                         `_transpose`
    bits       bits of the key blocks ──> the same; the slot of a place is its column
    elements   elements ──> columns and bits of that mask, and for gradients its transposed lists
                                                                                     _listing.py

Nothing waits for the device, and no size depends on what is selected. The calls of one thread on
one stream, or in one captured graph, run one after the other. Each of these has plans of its own.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats._blocks import blocks_of
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.capture import captured_into, is_capturing, keep, make_lasting
from sparsebench.kernels._common.operator import Operator
from sparsebench.kernels._common.triton import BoundKernel, Template
from sparsebench.kernels.attention._listing import bound_listing, empty_bits

MOST_PLANS, MOST_BYTES = 64, 1 << 30  # of plans that are kept, and of their bits: those used last
KEYS = 32  # blocks of keys of a program: the bits of a word
ELEMENTS = 1 << 12  # places, and bits, that a program has at a time
COPIED = 1024  # columns that a program copies
LOWEST = tl.constexpr(-(2**31))


@dataclass(eq=False)
class SharedPlans:
    """The plans of all masks of the same sizes.

    operator           plans of one mask, over whose lists `load` writes those of other masks
    forward, backward  launches that write these lists from a mask's columns, or from elements;
                       backward transposes, too
    bits               of the key blocks of that mask, if it has them
    stamp              of the mask or the elements that they were written from last
    transposed         whether the transposed lists were written, too
    """

    operator: Operator
    forward: Template
    backward: Template
    bits: Tensor | None = None
    stamp: Hashable = None
    transposed: bool = False

    def load(
        self,
        source: Tensor,
        *,
        transposed: bool,
        stamp: Hashable = None,
        bits: Tensor | None = None,
    ) -> None:
        """Enqueue the launches that write the lists, and the transposed ones for gradients.

        bits   of the key blocks of a mask that has them
        stamp  of the source as it is now: lists that have it are not written again
        """
        if stamp is not None and stamp == self.stamp and self.transposed >= transposed:
            return
        template = self.backward if transposed else self.forward
        template(source)
        if bits is not None and self.bits is not None:
            self.bits.copy_(bits)
        self.stamp, self.transposed = stamp, transposed
        if is_capturing(source):
            keep(template)


class Sizes(NamedTuple):
    """Sizes of a mask: all that its plans depend on.

    elements  shape, strides and dtype of the elements that it is listed from
    has_bits  whether a mask whose blocks are selected has bits, those of its key blocks
    """

    device: torch.device
    tokens: tuple[int, int]
    block: tuple[int, int]
    batch: int
    lists: int
    causal: bool
    keep: int
    elements: tuple[Any, ...] | None = None
    has_bits: bool = False

    @property
    def bytes_of_bits(self) -> int:
        """Return the bytes of a bit for each query and key; 0 without elements."""
        return (
            self.batch * self.lists * self.tokens[0] * self.tokens[1] // 8 if self.elements else 0
        )

    @classmethod
    def of(cls, mask: BlockMask) -> "Sizes":
        """Return the sizes of a mask whose blocks are selected."""
        grid = mask.batch, mask.lists, mask.causal, mask.keep
        has_bits = mask.bits is not None
        return cls(mask.columns.device, mask.tokens, mask.block, *grid, has_bits=has_bits)

    @classmethod
    def of_elements(cls, elements: Tensor, block: tuple[int, int]) -> "Sizes":
        """Return the sizes of the mask of elements [batch, lists, S_q, S_kv]."""
        batch, lists, s_q, s_kv = elements.shape
        grid = batch, lists, False, blocks_of((s_q, s_kv), block)[1]
        layout = tuple(elements.shape), elements.stride(), elements.dtype
        return cls(elements.device, (s_q, s_kv), block, *grid, layout)


_PLANS: "OrderedDict[Any, SharedPlans]" = OrderedDict()


def shared_plans_of(sizes: Sizes, operator_of: Callable[[BlockMask], Operator]) -> SharedPlans:
    """Return the plans for masks of these sizes in this thread, on its current stream or graph."""
    device, stream, graph = sizes.device, None, None
    if device.type == "cuda":
        stream, graph = torch._C._cuda_getCurrentRawStream(device.index), captured_into()
    key = sizes, get_ident(), stream, graph and graph[0]
    if (plans := _PLANS.pop(key, None)) is None:
        plans = make_lasting(lambda: make_shared_plans(sizes, operator_of), device)
        keys = [*_PLANS, key]
        while len(keys) > 1 and (
            len(keys) > MOST_PLANS or sum(at[0].bytes_of_bits for at in keys) > MOST_BYTES
        ):
            _PLANS.pop(keys.pop(0), None)
    _PLANS[key] = plans  # at the end; another thread may drop it at any time
    return plans


def make_shared_plans(sizes: Sizes, operator_of: Callable[[BlockMask], Operator]) -> SharedPlans:
    """Return new plans, for a mask of random blocks: plans order their work by their lists."""
    device, tokens, block, batch, lists_, causal, keep_, elements, has_bits = sizes
    draw = torch.Generator(device).manual_seed(0)
    scores = torch.rand(batch, lists_, *blocks_of(tokens, block), generator=draw, device=device)
    options: dict[str, Any] = {"block": [*block], "tokens": [*tokens], "causal": causal}
    first = BlockMask.from_scores(scores, keep_, **options)
    count, slots, by_key = len(first.columns), None, None
    room = first.columns.new_zeros(5, count + 1)  # kernels read one past the last
    columns, rows, places, *rest = (line[:count] for line in room)
    columns.copy_(first.columns)
    if elements or has_bits:
        slots, by_key = rest
        bits = empty_bits(first, first.shape[0] if elements else 1)
        first = replace(first, bits=bits, slots=slots)
    first = replace(first, columns=columns)
    lists = first.transposed
    rows[: len(lists.rows)], places[: len(lists.rows)] = lists.rows, lists.places
    first.__dict__["transposed"] = lists._replace(rows=rows, places=places, slots=by_key)
    counts = lists.offsets.new_zeros(len(lists.offsets) - 1)
    if elements:
        shape, strides, dtype = elements
        source = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        programs = bound_listing(source, first)
        both = [*programs, _bound_transpose(first, columns, counts)]
    else:
        source = torch.empty(count, dtype=torch.int32, device="meta")
        programs, both = [_bound_copy(first, source)], [_bound_transpose(first, source, counts)]
    forward, backward = (Template(each, (source,), []) for each in (programs, both))
    return SharedPlans(operator_of(first), forward, backward, first.bits if has_bits else None)


def _bound_copy(mask: BlockMask, source: Tensor) -> BoundKernel:
    """Return the kernel that copies columns, and writes the slots of bits by column."""
    args = source, mask.columns, mask.slots, len(source), mask.kv_blocks
    return BoundKernel(
        _copy, (triton.cdiv(len(source), COPIED),), args, {"COPIED": COPIED}, mask.columns
    )


def _bound_transpose(mask: BlockMask, source: Tensor, counts: Tensor) -> BoundKernel:
    """Return both kernels that transpose the lists; the first one copies columns, too."""
    lists = mask.transposed
    programs = mask.batch * mask.lists * triton.cdiv(mask.kv_blocks, KEYS)
    places = triton.next_power_of_2(mask.keep)
    by_column = mask.bits is not None and len(mask.bits) == mask.kv_blocks
    room = ELEMENTS // 4 if by_column else ELEMENTS  # more would spill on a B200
    rows = min(max(room // max(places, KEYS), 2), triton.next_power_of_2(mask.q_blocks))
    constants = {"PLACES": places, "ROWS": rows}
    sizes = mask.q_blocks, mask.kv_blocks
    slots = mask.slots if by_column else None
    count_args = source, mask.offsets, mask.columns, slots, counts, *sizes
    first = BoundKernel(_count, (programs,), count_args, constants, counts)
    written = lists.offsets, lists.rows, lists.places, lists.slots
    transpose_args = source, mask.offsets, counts, *written, *sizes
    constants = {**constants, "BY_COLUMN": by_column}
    return BoundKernel(_transpose, (programs,), transpose_args, constants, lists.rows, first)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, columns, slots, count, empty, COPIED: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * COPIED + tl.arange(0, COPIED)
    column = tl.load(source + at, at < count, 0)
    tl.store(columns + at, _inside(column, empty), at < count)
    if slots is not None:
        tl.store(slots + at, column & 0x7FFFFFFF, at < count)


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
    source, offsets, columns, slots, counts, q_blocks, kv_blocks,
    PLACES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Count the blocks of queries of 32 key blocks of a list, and copy a part of its columns."""
    programs = tl.cdiv(kv_blocks, 32)
    list_, part = tl.program_id(0) // programs, tl.program_id(0) % programs
    lane = tl.arange(0, 32)
    total = tl.zeros((32,), tl.int32)
    for step in range(tl.cdiv(q_blocks, ROWS)):
        of_rows = source, offsets, list_, step * ROWS, part, q_blocks, kv_blocks
        at, inside, column, has, _, _ = _words(*of_rows, PLACES, ROWS)
        total += tl.sum((has[:, None] >> lane[None, :]) & 1, 0)
        mine = inside & (step % programs == part)
        tl.store(columns + at, _inside(column, kv_blocks), mine)
        if slots is not None:
            tl.store(slots + at, column & 0x7FFFFFFF, mine)
    key = part * 32 + lane
    tl.store(counts + list_ * kv_blocks + key, total, key < kv_blocks)


@triton.jit  # type: ignore[untyped-decorator]
def _transpose(  # type: ignore[no-untyped-def]
    source, offsets, counts, starts, rows, places, slots, q_blocks, kv_blocks,
    PLACES: tl.constexpr, ROWS: tl.constexpr, BY_COLUMN: tl.constexpr,
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
        at = to[None, :] + tl.cumsum(here, 0) - here
        tl.store(rows + at, tl.where(flag > 0, row | LOWEST, row), here > 0)
        tl.store(places + at, place[:, None] + tl.cumsum(here, 1) - here, here > 0)
        if slots is not None:
            in_grid = 0 if BY_COLUMN else (list_ * q_blocks + row) * kv_blocks
            tl.store(slots + at, in_grid + key[None, :], here > 0)
        to += tl.sum(here, 0)
