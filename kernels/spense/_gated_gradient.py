"""Differentiate H = act(G) * U, whose products G and U are interleaved (spense_ffn.py), in Triton.

    products [m, 2 n]   8 columns of G, then 8 of U, and so on
    dH [m, n]
    result [m, 2 n]     dG = dH * U * act'(G) and dU = dH * act(G), interleaved as the products are

Each element is read once and written once: 10 bytes for each of m n units in 16 bits. The same in
torch takes six launches, which read and write 28 bytes.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.triton import BoundKernel, Template
from sparsebench.kernels.spense.spense_ffn import TURN

GROUPS = 256  # of 8 units, of a program
BOUND = 256  # launches in the cache, one for each number of elements
WIDTH: tl.constexpr = tl.constexpr(TURN)


def gated_gradient(products: Tensor, dh: Tensor, activation: str) -> Tensor:
    """Return dG and dU [m, 2 n] of contiguous products [m, 2 n] and dH [m, n].

    activation  silu, gelu_tanh (GELU in its tanh approximation) or relu

    Both operands start at multiples of 16 bytes. Enqueues on the current stream.
    """
    return _launch(products.shape, products.dtype, activation, products.device)(products, dh)[0]


@lru_cache(BOUND)
def _launch(
    shape: tuple[int, int], dtype: torch.dtype, activation: str, device: torch.device
) -> Template:
    """Return the launch for a shape, which is bound once on each device."""
    m, width = shape
    products, result = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(2))
    dh = torch.empty(m, width // 2, dtype=dtype, device="meta")
    groups = m * width // (2 * TURN)
    constants = {"GROUPS": GROUPS, "ACTIVATION": activation}
    args, grid = (products, dh, result, groups), (triton.cdiv(groups, GROUPS),)
    return Template([BoundKernel(_write, grid, args, constants, result)], (products, dh), [result])


@triton.jit  # type: ignore[untyped-decorator]
def _write(products, dh, result, groups, GROUPS: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    inside, unit = group < groups, tl.arange(0, WIDTH)[None, :]
    at = group * (2 * WIDTH) + unit
    gate = tl.load(products + at, inside, 0.0).to(tl.float32)
    up = tl.load(products + at + WIDTH, inside, 0.0).to(tl.float32)
    gradient = tl.load(dh + group * WIDTH + unit, inside, 0.0).to(tl.float32)

    if ACTIVATION == "relu":
        act = tl.where(gate <= 0, 0.0, gate)  # NaN stays
        slope = tl.where(gate <= 0, 0.0, 1.0)
    else:  # act = gate * sigmoid(z)
        z, dz = gate, 1.0
        if ACTIVATION == "gelu_tanh":
            square = 0.044715 * gate * gate
            z, dz = 1.5957691216057308 * gate * (1 + square), 1.5957691216057308 * (1 + 3 * square)
        sigmoid = 1 / (1 + tl.exp(-z))
        act = gate * sigmoid
        slope = sigmoid + act * (1 - sigmoid) * dz
    kind = result.dtype.element_ty
    tl.store(result + at, (gradient * up * slope).to(kind), inside)
    tl.store(result + at + WIDTH, (gradient * act).to(kind), inside)
