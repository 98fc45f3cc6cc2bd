"""Kernels that are as inexact as a rounding to bf16 or a few of them."""

from collections.abc import Callable

import torch
from declare import kernel, weight_and_input
from torch import Tensor

from sparsebench.kernels._kernel import OUTPUTS, Kernel, Launch, Operands

BITS = 5


def with_weight(change: Callable[[Tensor], Tensor]) -> Kernel:
    """Return a kernel that multiplies by a changed W, given in fp64."""

    def prepare(operands: Operands) -> Launch:
        w, x = weight_and_input(operands)
        w, dtype = change(w.double()), OUTPUTS[operands.problem["dtype"]]
        return Launch(lambda: (x.double() @ w.T).to(dtype))

    return kernel()(prepare)


@with_weight
def five_bits(w: Tensor) -> Tensor:
    """Round W to 5 bits of mantissa beside the leading one."""
    part, exponent = torch.frexp(w)
    return torch.ldexp((part * 2 ** (BITS + 1)).round(), exponent - BITS - 1)


@with_weight
def int8_weights(w: Tensor) -> Tensor:
    """Round W to 8-bit integers, with one scale per output feature."""
    scale = w.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (w / scale).round() * scale


@with_weight
def scaled(w: Tensor) -> Tensor:
    """Make every output 0.7 % too large."""
    return w * 1.007


TILE = 128


@kernel()
def sums_in_bf16(operands: Operands) -> Launch:
    """Keep sums in bf16 between tiles of 128 along k."""
    w, x = operands.weights["w"].to_dense().float(), operands.activations["x"]
    dtype = OUTPUTS[operands.problem["dtype"]]

    def run() -> Tensor:
        total = torch.zeros(len(x), len(w), dtype=torch.bfloat16, device=x.device)
        for x_tile, w_tile in zip(x.float().split(TILE, 1), w.split(TILE, 1), strict=True):
            total = (total.float() + x_tile @ w_tile.T).bfloat16()
        return total.to(dtype)

    return Launch(run)


PART = 0.035


@with_weight
def without_small_weights(w: Tensor) -> Tensor:
    """Leave out the smallest 3.5 % of the non-zero weights."""
    sizes = w[w != 0].abs().sort().values
    return w.where(w.abs() > sizes[int(PART * len(sizes))], 0)
