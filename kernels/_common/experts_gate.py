"""The step between the two products of experts with biases or a clamped gate, in Triton.

    products [rows, 2 n] ──> + bias [experts, 2 n] of the row's expert ──> H [rows, n]

    IN_TURN         8 columns of G, then 8 of U, and so on (spense_ffn.py); else G, then U
    bias            of G, then of U, whatever the order of the products
    clamped_swiglu  H = (U' + 1) * G' * sigmoid(1.702 G'), G' = min(G, 7), U' = U from -7 to 7,
                    as gpt-oss has it
    others          H = act(G) * U, as elementwise.py

A program finds the experts of its rows by their ends, which stay on the device. Each product is
read once, and each element of H is rounded once. In torch the same takes a dozen launches, which
at 4,096 tokens of gpt-oss-20b move ten times as many bytes.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.elementwise import activated
from sparsebench.kernels._common.triton import BoundKernel, Template

CLAMPED, ALPHA, LIMIT = "clamped_swiglu", 1.702, 7.0
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


@lru_cache(BOUND)
def _launch(
    shape: tuple[int, int],
    dtype: torch.dtype,
    experts: int,
    has_bias: bool,
    activation: str,
    in_turn: bool,
    device: torch.device,
) -> Template:
    """Return the launch for a shape, which is bound once on each device."""
    products = torch.empty(shape, dtype=dtype, device="meta")
    ends = torch.empty(1, experts, dtype=torch.int32, device="meta")
    bias = torch.empty(experts, shape[1], dtype=dtype, device="meta") if has_bias else None
    program = kernel_of(products, bias, ends, activation, in_turn=in_turn)
    operands = products, ends, *([] if bias is None else [bias])
    return Template([program], operands, [program.out])


def kernel_of(
    products: Tensor, bias: Tensor | None, ends: Tensor, activation: str, *, in_turn: bool
) -> BoundKernel:
    """Return the kernel of `gate_experts`."""
    (rows, width), experts = products.shape, ends.shape[1]
    n = width // 2
    h = products.new_empty(rows, n)
    constants = {"ROWS": ROWS, "UNITS": UNITS, "EXPERTS": triton.next_power_of_2(experts)}
    constants |= {"IN_TURN": in_turn, "BIAS": bias is not None, "ACTIVATION": activation}
    args = products, ends if bias is None else bias, ends, h, rows, n, experts
    grid = (triton.cdiv(rows, ROWS) * triton.cdiv(n, UNITS),)
    return BoundKernel(_gate, grid, args, constants, h)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
    products, bias, ends, h, rows, n, experts,
    ROWS: tl.constexpr, UNITS: tl.constexpr, EXPERTS: tl.constexpr, IN_TURN: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n, UNITS)
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    unit = tl.program_id(0) % tiles * UNITS + tl.arange(0, UNITS)[None, :]
    inside = (row < rows)[:, None] & (unit < n)
    at = row.to(tl.int64)[:, None]
    column, apart = unit, n
    if IN_TURN:
        column, apart = unit // WIDTH * (2 * WIDTH) + unit % WIDTH, WIDTH
    from_gate = products + at * (2 * n) + column
    gate = tl.load(from_gate, inside, 0.0).to(tl.float32)
    up = tl.load(from_gate + apart, inside, 0.0).to(tl.float32)
    if BIAS:
        every = tl.arange(0, EXPERTS)
        end = tl.load(ends + every, every < experts, 2147483647)
        number = tl.minimum(tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1), experts - 1)
        from_bias = bias + number.to(tl.int64)[:, None] * (2 * n) + unit
        gate += tl.load(from_bias, inside, 0.0).to(tl.float32)
        up += tl.load(from_bias + n, inside, 0.0).to(tl.float32)

    if ACTIVATION == "clamped_swiglu":  # NaN stays
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        gate = gate / (1 + tl.exp(-1.702 * gate))
    else:
        gate = activated(gate, ACTIVATION)
    tl.store(h + at * n + unit, (gate * up).to(h.dtype.element_ty), inside)
