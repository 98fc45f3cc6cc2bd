"""Products over the active units alone: SDD and DSD with gathered rows, in Triton.

The names are those of STK: three letters say if output, left and right operand are sparse or dense.
An index (_index.py) lists the entries of the sparse matrix by row: the units of a token, or the
tokens of a unit. A program takes 8 or 16 rows, whose entries are adjacent in the list:

           entries, row by row    SDD: u[e] = X[row of e] . W[unit of e]

    row 0  | x x x . . . . . |    Gathered rows of W times all 8 rows of X, on tensor cores. An
    row 1  | . . . x x . . . |    entry keeps the one of its 8 products with its own row.
    row 2  | . . . . . . . . |
    ...    | . . . . . x x x |    DSD: Y[r] = sum of h[e] W[unit of e] over the entries of r

                                  h, laid out in 16 rows as drawn, times gathered rows of W.

7 of 8 (SDD) and 15 of 16 (DSD) of these operations are wasted, but they take less time than the
gathered rows take to arrive from L2. Rows of any length are treated alike, and short rows leave no
lane idle. A program of DSD takes 512 bytes of each row. All programs of the same columns run before
those of the next, so the columns of X and dY that they gather, 8 MB for 16,384 tokens, stay in L2.
If there are more entries than the capacity, programs return at once, and _overflow.py computes.

Sums run over the entries in their order, so they have the same bits at every call. h and the
gradients of gate and up are rounded to the dtype, as in dense layers, and then stored in fp32,
because an asynchronous copy moves at least 4 bytes. A gathered row that is not finite makes all 16
rows of its program NaN (zero times it is NaN). A dense product makes all rows NaN.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats.active_csr import ActiveCsr
from sparsebench.kernels._common.triton import BoundKernel, whole_tile

SDD_ROWS, SDD_ENTRIES, SDD_PARTS = 8, 64, 4  # entries a step, programs for a group of rows
SDD_DEPTH, SDD_STAGES = 64, 4  # columns a stage
DSD_ROWS, DSD_STAGES = 16, 4
DSD_ENTRIES, DSD_BYTES = 32, 512  # a stage's entries, and bytes of each gathered row

Kind = Literal["plain", "norms", "two_products", "two_outputs"]
"""The result of a DSD, with S sparse and W dense:

    plain           Y = S W
    norms           Y = S W, and the sum of |values| of each row of S
    two_products    Y = S0 W0 + S1 W1
    two_outputs     Y0 = S0 W and Y1 = S1 W

S0 and S1 have entries at the same places.
"""


def up(
    x: Tensor, wu: Tensor, active: ActiveCsr, *, squared: bool
) -> tuple[BoundKernel, Tensor, Tensor]:
    """Return the kernel that computes u and h of each entry; u in the dtype of x, h in fp32.

    x [m, k], wu [n, k]; u and h [capacity].
    """
    u, h = (active.values.new_empty(active.capacity, dtype=d) for d in (x.dtype, torch.float32))
    args = x, wu, active.offsets, active.columns, active.values, u, h
    return _sdd(_up, args, active, squared, u), u, h


def slopes(
    dy: Tensor, wd_t: Tensor, active: ActiveCsr, u: Tensor, dnorms: Tensor, *, squared: bool
) -> tuple[BoundKernel, tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Return the kernel that computes dG and dU by token, and dG, dU and H by unit; all fp32.

    dy [m, k], wd_t [n, k]; dnorms [m], fp32, is the gradient of each token's sum of |h|. Results
    have [capacity] entries.
    """
    dg, du, *by_unit = (dnorms.new_empty(active.capacity) for _ in range(5))
    lists = active.offsets, active.columns, active.values, u, active.places
    args = dy, wd_t, dnorms, *lists, dg, du, *by_unit
    return _sdd(_slopes, args, active, squared, dg), (dg, du), (*by_unit,)


def dsd(
    kind: Kind,
    lists: tuple[Tensor, Tensor],
    values: tuple[Tensor, ...],
    matrices: tuple[Tensor, ...],
    out: tuple[Tensor, ...],
) -> BoundKernel:
    """Return the kernel that computes out[r] = sum of values[e] matrix[index[e]], e of row r.

    lists are offsets [rows + 1] and index [capacity]; values fp32 [capacity], matrices [any, k],
    out [rows, k]; the second output of `norms` is fp32 [rows].
    """
    (rows, k), size = out[0].shape, out[0].element_size()
    width = min(DSD_BYTES // size, whole_tile(k))
    grid = -(-rows // DSD_ROWS), -(-k // width)
    args = *lists, values[0], values[-1], matrices[0], matrices[-1], out[0], out[-1]
    constants = {"ROWS": DSD_ROWS, "ENTRIES": DSD_ENTRIES, "WIDTH": width, "STAGES": DSD_STAGES}
    constants |= {"num_warps": 4 if size == 2 else 8}
    sizes = rows, k // 8, len(lists[1])
    return BoundKernel(_sum, grid, (*args, *sizes), {**constants, "KIND": kind}, out[0])


def _sdd(
    kernel: triton.JITFunction,
    args: tuple[Tensor, ...],
    active: ActiveCsr,
    squared: bool,
    out: Tensor,
) -> BoundKernel:
    m, k = args[0].shape
    constants = {"ROWS": SDD_ROWS, "ENTRIES": SDD_ENTRIES, "PARTS": SDD_PARTS, "DEPTH": SDD_DEPTH}
    constants |= {"STAGES": SDD_STAGES, "SQUARED": squared, "num_warps": 4}
    grid = (-(-m // SDD_ROWS) * SDD_PARTS,)  # programs that share rows of X are neighbours
    return BoundKernel(kernel, grid, (*args, m, k // 8, active.capacity), constants, out)


@triton.jit  # type: ignore[untyped-decorator]
def act(z, SQUARED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return relu(z), or its square; keeps NaN."""
    on = tl.where(z <= 0, 0.0, z)
    return on * on if SQUARED else on


@triton.jit
def sign(h):  # type: ignore[no-untyped-def]
    """Return the sign of h: 1, 0 or -1; keeps NaN."""
    return tl.where(h > 0, 1.0, tl.where(h < 0, -1.0, h))


@triton.jit
def rounded(value, pointer):  # type: ignore[no-untyped-def]
    """Return a value in fp32 as one of the pointer's dtype."""
    return value.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _rows(offsets, group, count, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a group's rows, first and last entry of each, and of all of them together."""
    first = group * ROWS
    rows = first + tl.arange(0, ROWS)
    starts = tl.load(offsets + tl.minimum(rows, count))
    ends = tl.load(offsets + tl.minimum(rows + 1, count))
    return (
        rows,
        starts,
        ends,
        tl.load(offsets + first),
        tl.load(offsets + tl.minimum(first + ROWS, count)),
    )


@triton.jit
def _index(index, entries, end):  # type: ignore[no-untyped-def]
    """Return the unit or token of each entry; 16 bits are unsigned."""
    of = tl.load(index + entries, entries < end, 0)
    if index.dtype.element_ty == tl.int16:
        return of.to(tl.int32) & 0xFFFF
    else:  # noqa: RET505 (Triton needs it)
        return of


@triton.jit  # type: ignore[untyped-decorator]
def _dots(  # type: ignore[no-untyped-def]
    left,
    right,
    of,
    there,
    rows,
    mine,
    m,
    k,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the product of each entry's row of `left` and row of `right`, fp32 [ENTRIES]."""
    lanes = tl.arange(0, DEPTH)
    total = tl.zeros((ENTRIES, ROWS), tl.float32)
    for depth in tl.range(0, k, DEPTH, num_stages=STAGES):
        inside = (lanes < k - depth)[None, :]
        at = (depth + lanes)[None, :]
        weights = tl.load(right + of[:, None] * k + at, there[:, None] & inside, 0.0)
        tokens = tl.load(left + rows[:, None] * k + at, (rows < m)[:, None] & inside, 0.0)
        total = tl.dot(weights, tokens.T, total, input_precision="ieee")
    return tl.sum(tl.where(mine, total, 0.0), 1)


@triton.jit(do_not_specialize=("m", "eights", "capacity"))  # type: ignore[untyped-decorator]
def _up(  # type: ignore[no-untyped-def]
    x,
    wu,
    offsets,
    columns,
    gates,
    u,
    h,
    m,
    eights,
    capacity,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    SQUARED: tl.constexpr,
):
    if tl.load(offsets + m) <= capacity:
        rows, starts, ends, begin, end = _rows(offsets, tl.program_id(0) // PARTS, m, ROWS)
        own = begin + ENTRIES * (tl.program_id(0) % PARTS)
        for first in range(own, end, ENTRIES * PARTS):
            e = first + tl.arange(0, ENTRIES)
            there = e < end
            mine = (e[:, None] >= starts[None, :]) & (e[:, None] < ends[None, :])
            of = _index(columns, e, end)
            dots = _dots(x, wu, of, there, rows, mine, m, eights * 8, ROWS, ENTRIES, DEPTH, STAGES)
            ups = rounded(dots, u)
            hidden = rounded(act(tl.load(gates + e, there, 0.0).to(tl.float32), SQUARED) * ups, u)
            tl.store(u + e, ups.to(u.dtype.element_ty), there)
            tl.store(h + e, hidden, there)


@triton.jit(do_not_specialize=("m", "eights", "capacity"))  # type: ignore[untyped-decorator]
def _slopes(  # type: ignore[no-untyped-def]
    dy,
    wd_t,
    dnorms,
    offsets,
    columns,
    gates,
    u,
    places,
    dg_by_token,
    du_by_token,
    dg_by_unit,
    du_by_unit,
    h_by_unit,
    m,
    eights,
    capacity,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    SQUARED: tl.constexpr,
):
    if tl.load(offsets + m) <= capacity:
        rows, starts, ends, begin, end = _rows(offsets, tl.program_id(0) // PARTS, m, ROWS)
        dnorm = tl.load(dnorms + rows, rows < m, 0.0)
        own = begin + ENTRIES * (tl.program_id(0) % PARTS)
        for first in range(own, end, ENTRIES * PARTS):
            e = first + tl.arange(0, ENTRIES)
            there = e < end
            mine = (e[:, None] >= starts[None, :]) & (e[:, None] < ends[None, :])
            of = _index(columns, e, end)
            dh = _dots(dy, wd_t, of, there, rows, mine, m, eights * 8, ROWS, ENTRIES, DEPTH, STAGES)
            gate = tl.load(gates + e, there, 0.0).to(tl.float32)
            ups = tl.load(u + e, there, 0.0).to(tl.float32)
            hidden = rounded(act(gate, SQUARED) * ups, u)
            weight = tl.sum(tl.where(mine, dnorm[None, :], 0.0), 1)
            dh += tl.where(weight == 0, 0.0, weight * sign(hidden))
            dg = rounded(dh * ups * (2 * gate if SQUARED else 1.0), u)
            du = rounded(dh * act(gate, SQUARED), u)
            place = tl.load(places + e, there, 0)
            tl.store(dg_by_token + e, dg, there)
            tl.store(du_by_token + e, du, there)
            tl.store(dg_by_unit + place, dg, there)
            tl.store(du_by_unit + place, du, there)
            tl.store(h_by_unit + place, hidden, there)


@triton.jit(do_not_specialize=("count", "eights", "capacity"))  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    offsets,
    index,
    values0,
    values1,
    matrix0,
    matrix1,
    out0,
    out1,
    count,
    eights,
    capacity,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
):
    if tl.load(offsets + count) <= capacity:
        rows, starts, ends, begin, end = _rows(offsets, tl.program_id(0), count, ROWS)
        k = eights * 8
        at = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
        lanes = tl.arange(0, ENTRIES)
        sum0 = tl.zeros((ROWS, WIDTH), tl.float32)
        sum1 = tl.zeros((ROWS, WIDTH), tl.float32)
        norms = tl.zeros((ROWS, ENTRIES), tl.float32)
        of = _index(index, begin + lanes, end)
        for first in tl.range(begin, end, ENTRIES, num_stages=STAGES):
            e = first + lanes
            there = e < end
            mine = (e[None, :] >= starts[:, None]) & (e[None, :] < ends[:, None])
            weights = tl.load(values0 + e, there, 0.0)
            gathered = tl.load(matrix0 + of[:, None] * k + at, there[:, None] & (at < k), 0.0)
            spread = tl.where(mine, weights[None, :], 0.0)
            if KIND == "norms":
                norms += tl.abs(spread)
            spread = spread.to(gathered.dtype)
            sum0 = tl.dot(spread, gathered, sum0, input_precision="ieee")
            if KIND == "two_products" or KIND == "two_outputs":
                weights = tl.load(values1 + e, there, 0.0)
                spread = tl.where(mine, weights[None, :], 0.0).to(gathered.dtype)
            if KIND == "two_products":
                gathered = tl.load(matrix1 + of[:, None] * k + at, there[:, None] & (at < k), 0.0)
                sum0 = tl.dot(spread, gathered, sum0, input_precision="ieee")
            if KIND == "two_outputs":
                sum1 = tl.dot(spread, gathered, sum1, input_precision="ieee")
            # Loaded one step ahead, in a register: in the same step it would take half the stages.
            of = _index(index, e + ENTRIES, end)
        to = rows[:, None] * k + at
        mask = (rows < count)[:, None] & (at < k)
        tl.store(out0 + to, sum0.to(out0.dtype.element_ty), mask)
        if KIND == "norms":
            first = tl.program_id(1) == 0
            tl.store(out1 + rows, tl.sum(norms, 1), (rows < count) & first)
        if KIND == "two_outputs":
            tl.store(out1 + to, sum1.to(out1.dtype.element_ty), mask)
