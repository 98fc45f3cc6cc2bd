"""Returns the whole product, a dense tensor: whoever stores blocks must gather them."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    dy, x = operands.activations["dy"], operands.activations["x"]
    return Launch(lambda: dy.t() @ x)


KERNEL = Kernel(op="linear_wgrad", consumes="bsr", device="any", prepare=prepare)
