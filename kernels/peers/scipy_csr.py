"""CSR on the CPU by scipy.sparse: one thread, fp32, one axpy of m elements for each non-zero.

Source: scipy/sparse/sparsetools/csr.h, csr_matvecs.
"""

from scipy import sparse

from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.transposed import dgrad_of
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _scipy


def prepare(operands: Operands) -> Launch:
    w = operands.weights["w"]
    assert isinstance(w, Csr)
    arrays = w.values.numpy(), w.columns.numpy(), w.offsets.numpy()
    return _scipy.launch(sparse.csr_array(arrays, shape=w.shape), operands)


KERNEL = Kernel("linear", "csr", "cpu", prepare, _scipy.unsupported)

DGRAD = dgrad_of(KERNEL)
"""Input gradient from CSR on the CPU by scipy.sparse."""
