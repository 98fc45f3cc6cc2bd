"""Kernels whose error the format's bound allows in bf16, but the usual error does not."""

import torch
from declare import kernel, weight_and_input
from torch import Tensor

from sparsebench.kernels._kernel import OUTPUTS, Launch, Operands

BITS = 5


@kernel()
def five_bits(operands: Operands) -> Launch:
    """Round W to 5 bits of mantissa beside the leading one."""
    w, x = weight_and_input(operands)
    w, dtype = w.double(), OUTPUTS[operands.problem["dtype"]]
    part, exponent = torch.frexp(w)
    w = torch.ldexp((part * 2 ** (BITS + 1)).round(), exponent - BITS - 1)
    return Launch(lambda: (x.double() @ w.T).to(dtype))


@kernel()
def int8_weights(operands: Operands) -> Launch:
    """Round W to 8-bit integers, with one scale per output feature."""
    w, x = weight_and_input(operands)
    w, dtype = w.double(), OUTPUTS[operands.problem["dtype"]]
    scale = w.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    w = (w / scale).round() * scale
    return Launch(lambda: (x.double() @ w.T).to(dtype))


@kernel()
def scaled(operands: Operands) -> Launch:
    """Make every output 0.7 % too large."""
    w, x = weight_and_input(operands)
    w, dtype = w.double(), OUTPUTS[operands.problem["dtype"]]
    return Launch(lambda: (x.double() @ w.T * 1.007).to(dtype))


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


@kernel()
def without_small_weights(operands: Operands) -> Launch:
    """Leave out the smallest 3.5 % of the non-zero weights."""
    w, x = weight_and_input(operands)
    w, dtype = w.double(), OUTPUTS[operands.problem["dtype"]]
    sizes = w[w != 0].abs().sort().values
    w = w.where(w.abs() > sizes[int(PART * len(sizes))], 0)
    return Launch(lambda: (x.double() @ w.T).to(dtype))
