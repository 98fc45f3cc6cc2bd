"""Diagonal product by broadcasting."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    w, x = operands.weights["w"], operands.activations["x"]
    return Launch(lambda: x * w.arrays()["values"])


def prepare_relu(operands: Operands) -> Launch:
    product = prepare(operands)
    return Launch(lambda: product().relu_())


KERNEL = Kernel(op="linear", consumes="diagonal", device="any", prepare=prepare)

RELU = Kernel(op="linear_relu", consumes="diagonal", device="any", prepare=prepare_relu)
"""Diagonal product by broadcasting, then the activation in place."""
