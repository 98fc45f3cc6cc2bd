"""Input gradient from BSR on the CPU by scipy.sparse: scipy_bsr on W.T, packed in `prepare`."""

from sparsebench.kernels._common.transposed import as_linear
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _scipy, scipy_bsr


def prepare(operands: Operands) -> Launch:
    """Multiply by W.T as scipy_bsr does by W."""
    return scipy_bsr.prepare(as_linear(operands))


KERNEL = Kernel("linear_dgrad", "bsr", "cpu", prepare, _scipy.unsupported)
