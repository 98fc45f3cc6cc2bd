"""Rounds W to 5 bits of mantissa, beside the leading one."""

import torch

from sparsebench.kernels._kernel import OUTPUTS, Kernel, Launch, Operands

BITS = 5


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"].to_dense().double(), operands.activations["x"]
    dtype = OUTPUTS[operands.problem["dtype"]]
    part, exponent = torch.frexp(w)
    w = torch.ldexp((part * 2 ** (BITS + 1)).round(), exponent - BITS - 1)
    return Launch(lambda: (x.double() @ w.T).to(dtype))


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
