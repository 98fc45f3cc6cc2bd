"""Input gradient from CSR on the CPU by scipy.sparse: scipy_csr on W.T, packed in `prepare`."""

from sparsebench.kernels._common.transposed import as_linear
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _scipy, scipy_csr


def prepare(operands: Operands) -> Launch:
    """Multiply by W.T as scipy_csr does by W."""
    return scipy_csr.prepare(as_linear(operands))


KERNEL = Kernel("linear_dgrad", "csr", "cpu", prepare, _scipy.unsupported)
