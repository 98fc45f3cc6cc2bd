"""BSR on the CPU by scipy.sparse: one thread, fp32, one small unblocked GEMM for each block.

scipy needs a matrix of whole blocks, so W is padded: X.T gets rows of zeros up to the edge of the
last block, and the rows of Y past n are cut off.
Source: scipy/sparse/sparsetools/bsr.h, bsr_matvecs.
"""

from scipy import sparse

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.transposed import dgrad_of
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import scipy_csr


def prepare(operands: Operands) -> Launch:
    w = operands.weights["w"]
    assert isinstance(w, Bsr)
    (n, k), (r, c) = w.shape, w.block
    arrays = w.values.numpy(), w.columns.numpy(), w.offsets.numpy()
    padded = n + -n % r, k + -k % c
    return scipy_csr.launch(sparse.bsr_array(arrays, shape=padded), operands)


KERNEL = Kernel("linear", "bsr", "cpu", prepare, scipy_csr.unsupported)

DGRAD = dgrad_of(KERNEL)
"""Input gradient from BSR on the CPU by scipy.sparse."""
