"""The step between the two products of an expert, and its derivative, in Triton.

    products [rows, 2 n] ──> + bias [experts, 2 n] of the row's expert ──> H [rows, n]
    and V [rows, n], share [rows] ──> dG and dU of dH = share V, share H, and V . H

    IN_TURN         8 columns of G, then 8 of U, and so on (spense_ffn.py); else G, then U
    bias            of G, then of U, whatever the order of the products
    clamped_swiglu  H = (U' + 1) * G' * sigmoid(1.702 G'), G' = min(G, 7), U' = U from -7 to 7,
                    as gpt-oss has it
    others          H = act(G) * U, as elementwise.py

A program finds the experts of its rows by their ends, which stay on the device. Each operand is
read once, and each result is rounded once. In torch H takes a dozen launches, which at 4,096 tokens
of gpt-oss-20b move ten times as many bytes.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.elementwise import (
    SWIGLU_ALPHA,
    activated,
    activated_with_slope,
)
from sparsebench.kernels._common.triton import BoundKernel, Template

CLAMPED, ALPHA, LIMIT = "clamped_swiglu", SWIGLU_ALPHA.value, 7.0
MOST = tl.constexpr(LIMIT)
ROWS, UNITS = 16, 128  # of H, in a program
BOUND = 256  # launches in the cache, one for each shape
WIDTH: tl.constexpr = tl.constexpr(8)  # columns of G, then of U (spense_ffn.TURN)


def gate_experts(
    products: Tensor, bias: Tensor | None, ends: Tensor, activation: str, *, in_turn: bool
) -> Tensor:
    """Return H [rows, n] of contiguous products [rows, 2 n], at least one row.

    bias        [experts, 2 n], G first; None without
    ends        int32 [1, experts], where the rows of each expert end; other rows have any bias
    activation  clamped_swiglu, silu, gelu_tanh or relu

    All operands start at multiples of 16 bytes. Enqueues on the current stream.
    """
    layout = products.shape, products.dtype, ends.shape[1], bias is not None
    launch = _launch(*layout, activation, in_turn, products.device)
    return launch(products, ends, *([] if bias is None else [bias]))[0]


def differentiate_gate(
    products: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    v: Tensor,
    share: Tensor,
    activation: str,
    *,
    in_turn: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dG and dU in the order of the products, share H [rows, n], and V . H, fp32 [rows].

    v      [rows, n], the gradient of H but for the share, contiguous
    share  fp32 [rows]
    """
    layout = products.shape, products.dtype, ends.shape[1], bias is not None
    launch = _launch(*layout, activation, in_turn, products.device, derivative=True)
    both, shared, dots = launch(products, ends, v, share, *([] if bias is None else [bias]))
    return both, shared, dots.sum(1)


@lru_cache(BOUND)
def _launch(
    shape: tuple[int, int],
    dtype: torch.dtype,
    experts: int,
    has_bias: bool,
    activation: str,
    in_turn: bool,
    device: torch.device,
    derivative: bool = False,
) -> Template:
    """Return the launch for a shape, which is bound once on each device."""
    (rows, width), options = shape, dict[str, Any](dtype=dtype, device="meta")
    products = torch.empty(shape, **options)
    ends = torch.empty(1, experts, dtype=torch.int32, device="meta")
    bias = [torch.empty(experts, width, **options)] if has_bias else []
    first = products, bias[0] if bias else None, ends
    if not derivative:
        program = kernel_of(*first, activation, in_turn=in_turn)
        return Template([program], (products, ends, *bias), [program.out])
    v = torch.empty(rows, width // 2, **options)
    share = torch.empty(rows, dtype=torch.float32, device="meta")
    program, results = derivative_of(*first, v, share, activation, in_turn=in_turn)
    return Template([program], (products, ends, v, share, *bias), results)


def kernel_of(
    products: Tensor, bias: Tensor | None, ends: Tensor, activation: str, *, in_turn: bool
) -> BoundKernel:
    """Return the kernel of `gate_experts`."""
    h = products.new_empty(len(products), products.shape[1] // 2)
    args = products, ends if bias is None else bias, ends, h
    return _bound(_gate, args, h, activation, in_turn=in_turn, biased=bias is not None)


def derivative_of(
    products: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    v: Tensor,
    share: Tensor,
    activation: str,
    *,
    in_turn: bool,
) -> tuple[BoundKernel, list[Tensor]]:
    """Return the kernel of `differentiate_gate`, and what it writes: sums of each tile of units."""
    rows, n = v.shape
    dots = v.new_empty(rows, triton.cdiv(n, UNITS), dtype=torch.float32)
    results = [torch.empty_like(products), torch.empty_like(v), dots]
    args = products, ends if bias is None else bias, ends, v, share, *results
    options = {"in_turn": in_turn, "biased": bias is not None}
    return _bound(_differentiate, args, results[0], activation, **options), results


def _bound(
    kernel: Any, tensors: tuple[Tensor, ...], out: Tensor, activation: str, *,
    in_turn: bool, biased: bool,
) -> BoundKernel:  # fmt: skip
    (rows, width), experts = tensors[0].shape, tensors[2].shape[1]
    n = width // 2
    constants = {"ROWS": ROWS, "UNITS": UNITS, "EXPERTS": triton.next_power_of_2(experts)}
    constants |= {"IN_TURN": in_turn, "BIAS": biased, "ACTIVATION": activation}
    grid = (triton.cdiv(rows, ROWS) * triton.cdiv(n, UNITS),)
    return BoundKernel(kernel, grid, (*tensors, rows, n, experts), constants, out)


@triton.jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]
    products, bias, ends, rows, n, experts, ROWS: tl.constexpr, UNITS: tl.constexpr,
    EXPERTS: tl.constexpr, IN_TURN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return G and U of a program's tile after their bias, in 32 bits, and where they are.

    Also the rows [ROWS], the places of a tile of H, and which of them are inside. U is `apart`
    behind G in the products.
    """
    tiles = tl.cdiv(n, UNITS)
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    unit = tl.program_id(0) % tiles * UNITS + tl.arange(0, UNITS)[None, :]
    inside = (row < rows)[:, None] & (unit < n)
    column, apart = unit, n
    if IN_TURN:
        column, apart = unit // WIDTH * (2 * WIDTH) + unit % WIDTH, WIDTH
    at = row.to(tl.int64)[:, None] * (2 * n) + column
    gate = tl.load(products + at, inside, 0.0).to(tl.float32)
    up = tl.load(products + at + apart, inside, 0.0).to(tl.float32)
    if BIAS:
        every = tl.arange(0, EXPERTS)
        end = tl.load(ends + every, every < experts, 2147483647)
        number = tl.minimum(tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1), experts - 1)
        from_bias = bias + number.to(tl.int64)[:, None] * (2 * n) + unit
        gate += tl.load(from_bias, inside, 0.0).to(tl.float32)
        up += tl.load(from_bias + n, inside, 0.0).to(tl.float32)
    return gate, up, at, apart, row, row.to(tl.int64)[:, None] * n + unit, inside


@triton.jit
def _clamped(gate, up):  # type: ignore[no-untyped-def]
    """Return G' and U' + 1; NaN stays."""
    gate = tl.where(gate > MOST, MOST, gate)
    return gate, tl.where(up > MOST, MOST, tl.where(up < -MOST, -MOST, up)) + 1.0


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
    products, bias, ends, h, rows, n, experts,
    ROWS: tl.constexpr, UNITS: tl.constexpr, EXPERTS: tl.constexpr, IN_TURN: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    gate, up, _, _, _, to, inside = _read(
        products, bias, ends, rows, n, experts, ROWS, UNITS, EXPERTS, IN_TURN, BIAS
    )
    if ACTIVATION == "clamped_swiglu":
        gate, up = _clamped(gate, up)
    tl.store(h + to, (activated(gate, ACTIVATION) * up).to(h.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _differentiate(  # type: ignore[no-untyped-def]
    products, bias, ends, v, share, both, shared, dots, rows, n, experts,
    ROWS: tl.constexpr, UNITS: tl.constexpr, EXPERTS: tl.constexpr, IN_TURN: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    gate, up, at, apart, row, to, inside = _read(
        products, bias, ends, rows, n, experts, ROWS, UNITS, EXPERTS, IN_TURN, BIAS
    )
    dh = tl.load(v + to, inside, 0.0).to(tl.float32)
    part = tl.load(share + row, row < rows, 0.0)[:, None]
    of_gate, of_up = inside, inside  # G and U that are not clamped
    if ACTIVATION == "clamped_swiglu":
        of_gate, of_up = gate <= MOST, (up <= MOST) & (up >= -MOST)
        gate, up = _clamped(gate, up)
    act, slope = activated_with_slope(gate, ACTIVATION)
    h = act * up
    kind = both.dtype.element_ty
    tiles = tl.cdiv(n, UNITS)
    sums = dots + row.to(tl.int64) * tiles + tl.program_id(0) % tiles
    tl.store(sums, tl.sum(tl.where(inside, dh * h, 0.0), 1), row < rows)
    tl.store(shared + to, (part * h).to(kind), inside)
    dh *= part
    tl.store(both + at, tl.where(of_gate, dh * up * slope, 0.0).to(kind), inside)
    tl.store(both + at + apart, tl.where(of_up, dh * act, 0.0).to(kind), inside)
