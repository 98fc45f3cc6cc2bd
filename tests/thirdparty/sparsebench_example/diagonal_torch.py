"""Diagonal product by broadcasting."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"], operands.activations["x"]
    return Launch(lambda: x * w.arrays()["values"])


KERNEL = Kernel(op="linear", consumes="diagonal", device="any", prepare=prepare)
