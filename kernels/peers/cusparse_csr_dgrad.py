"""Input gradient from CSR by cuSPARSE: cusparse_csr on W.T, packed in `prepare`."""

from sparsebench.kernels._common.transposed import as_linear
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _cusparse, cusparse_csr


def prepare(operands: Operands) -> Launch:
    """Multiply by W.T as cusparse_csr does by W."""
    return cusparse_csr.prepare(as_linear(operands))


KERNEL = Kernel("linear_dgrad", "csr", "cuda", prepare, _cusparse.unsupported)
