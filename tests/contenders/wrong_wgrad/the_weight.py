"""Returns the weight itself."""

from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    return Launch(lambda: operands.pattern)


KERNEL = Kernel(op="linear_wgrad", consumes="bsr", device="any", prepare=prepare)
