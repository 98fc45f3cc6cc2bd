"""Gradient of a layer's input with weights in CSR: csr_cuda on W.T, packed in `prepare`.

dX[m, k] = dY[m, n] @ W[n, k] is a linear layer of W.T, whose CSR arrays are W by columns.
"""

from sparsebench.kernels._common.transposed import as_linear
from sparsebench.kernels._common.tuned_table import Tuned
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.csr import csr_cuda


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Multiply by W.T as csr_cuda does by W."""
    return csr_cuda.prepare(as_linear(operands), tuned=tuned)


KERNEL = Kernel("linear_dgrad", "csr", "cuda", prepare, csr_cuda.unsupported, tunes=True)
"""The entries of a table are csr_cuda's, of W.T."""
