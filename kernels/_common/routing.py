"""Sort the tokens of a mixture by expert, and sum what their experts computed, in Triton.

    ids [m, top_k]          rows, sorted by expert          Y [m, h]
    token 0   2  0          0   token 0   expert 0          of token 0   w00 row 2 + w01 row 0
    token 1   2  1   ────>  1   token 1   expert 1   ────>  of token 1   w10 row 3 + w11 row 1
                            2   token 0   expert 2
                            3   token 1   expert 2          source 0 1 0 1   place 2 0 / 3 1
                                                            ends   1 2 4

`route` is one launch: the program of an expert counts smaller ids, which are the rows before its
own, and then numbers those equal to it. Ids that name none of the experts are sorted last: with
expert parallelism, they stand for experts of another GPU. Tokens keep their order within an expert,
sizes depend on the shapes alone, and the host waits for nothing.

`combine` sums in the order of a token's choices, in fp32, and rounds once. Both are deterministic.
A CPU runs the same in torch, where rows in fp64 are summed in fp64.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.triton import BoundKernel, Template

CHUNK = 4096  # ids that a program reads at a time; with 1,024, 32,768 ids took 70 us on an H200
IDS_OF_WARP = 256
FEATURES = 1024  # columns of Y that a program of `combine` writes
BOUND = 256  # launches of each kernel in a cache, one for each shape


class Route(NamedTuple):
    """Where the tokens of a mixture go.

    source  int32 [m top_k], the token of each row
    place   int32 [m, top_k], the row of each choice; -1 if its id is none of the experts
    ends    int32 [1, experts], where the rows of each expert end
    """

    source: Tensor
    place: Tensor
    ends: Tensor


def route(ids: Tensor, experts: int) -> Route:
    """Sort the choices of tokens, contiguous int64 or int32 [m, top_k], by expert.

    The ids start at a multiple of 16 bytes. Enqueues on the current stream.
    """
    if ids.is_cuda and ids.numel():
        return Route(*_routing(ids.shape, ids.dtype, experts, ids.device)(ids))
    flat = ids.flatten().long()
    numbers = flat.where((flat >= 0) & (flat < experts), experts)
    order = numbers.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    place = place.where(numbers < experts, -1).int().view(ids.shape)
    ends = torch.bincount(numbers, minlength=experts + 1)[:experts].cumsum(0)
    return Route((order // max(ids.shape[1], 1)).int(), place, ends.int()[None])


def combine(y: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """Return the sums [m, h] of a token's rows of Y [rows, h], times its weights [m, top_k].

    A place of -1 adds nothing, and no row is read for it. All tensors are contiguous and start at
    multiples of 16 bytes; the weights are floats of any size. Enqueues on the current stream.
    """
    if y.is_cuda and place.numel():
        layout = y.shape, y.dtype, place.shape, weights.dtype, y.device
        return _combining(*layout)(y, place, weights)[0]
    kind = torch.promote_types(y.dtype, torch.float32)
    total = torch.zeros(len(place), y.shape[1], dtype=kind, device=y.device)
    for rows, weight in zip(place.T.long(), weights.T.to(kind), strict=True):
        total += torch.where(rows[:, None] < 0, 0, y[rows].to(kind) * weight[:, None])
    return total.to(y.dtype)


def routing_of(ids: Tensor, experts: int) -> tuple[BoundKernel, Route]:
    """Return the kernel of `route`, and what it writes."""
    rows, top_k = ids.numel(), ids.shape[1]
    source, place, ends = (
        ids.new_empty(shape, dtype=torch.int32) for shape in (rows, ids.shape, (1, experts))
    )
    args = ids, source, place, ends, rows, top_k, experts
    ids_at_once = min(CHUNK, triton.next_power_of_2(rows))
    constants = {"IDS": ids_at_once, "num_warps": max(1, ids_at_once // IDS_OF_WARP)}
    return BoundKernel(_route, (experts + 1,), args, constants, source), Route(source, place, ends)


def combining_of(y: Tensor, place: Tensor, weights: Tensor) -> BoundKernel:
    """Return the kernel of `combine`."""
    (m, top_k), h = place.shape, y.shape[1]
    out = y.new_empty(m, h)
    columns = min(FEATURES, triton.next_power_of_2(h))
    args = y, place, weights, out, h
    constants = {"TOP_K": top_k, "COLUMNS": columns}
    return BoundKernel(_combine, (m * triton.cdiv(h, columns),), args, constants, out)


@lru_cache(BOUND)
def _routing(
    shape: tuple[int, int], dtype: torch.dtype, experts: int, device: torch.device
) -> Template:
    """Return the launch of `route`, which is bound once on each device."""
    ids = torch.empty(shape, dtype=dtype, device="meta")
    program, written = routing_of(ids, experts)
    return Template([program], (ids,), written)


@lru_cache(BOUND)
def _combining(
    shape: tuple[int, int],
    dtype: torch.dtype,
    choices: tuple[int, int],
    of_weights: torch.dtype,
    device: torch.device,
) -> Template:
    """Return the launch of `combine`, which is bound once on each device."""
    y = torch.empty(shape, dtype=dtype, device="meta")
    place = torch.empty(choices, dtype=torch.int32, device="meta")
    operands = y, place, torch.empty(choices, dtype=of_weights, device="meta")
    program = combining_of(*operands)
    return Template([program], operands, [program.out])


@triton.jit
def _numbers(ids, at, rows, experts):  # type: ignore[no-untyped-def]
    """Return ids as int32: `experts` for one that is no expert, and one more behind the last."""
    number = tl.load(ids + at, at < rows, 0)
    number = tl.where((number >= 0) & (number < experts), number, experts).to(tl.int32)
    return tl.where(at < rows, number, experts + 1)


@triton.jit  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def]
    ids, source, place, ends, rows, top_k, experts, IDS: tl.constexpr
):
    this, lane = tl.program_id(0), tl.arange(0, IDS)
    before = tl.zeros((IDS,), tl.int32)
    for first in range(0, rows, IDS):
        before += (_numbers(ids, first + lane, rows, experts) < this).to(tl.int32)
    row = tl.sum(before, 0)
    for first in range(0, rows, IDS):
        at = first + lane
        mine = _numbers(ids, at, rows, experts) == this
        here = row + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(source + here, at // top_k, mine)
        tl.store(place + at, tl.where(this < experts, here, -1), mine)
        row += tl.sum(mine.to(tl.int32), 0)
    tl.store(ends + this, row, this < experts)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    y, place, weights, out, h, TOP_K: tl.constexpr, COLUMNS: tl.constexpr
):
    tiles = tl.cdiv(h, COLUMNS)
    token = tl.program_id(0) // tiles
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(place + token * TOP_K + choice)
        weight = tl.load(weights + token * TOP_K + choice).to(tl.float32)
        there = (row >= 0) & (column < h)
        values = tl.load(y + row.to(tl.int64) * h + column, there, 0.0).to(tl.float32)
        total += tl.where(row >= 0, values * weight, 0.0)
    at = out + token.to(tl.int64) * h + column
    tl.store(at, total.to(out.dtype.element_ty), column < h)
