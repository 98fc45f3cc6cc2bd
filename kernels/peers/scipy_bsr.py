"""BSR on the CPU by scipy.sparse: one thread, fp32, one small unblocked GEMM a block.

scipy wants a matrix of whole blocks, so the product is of the padded one: X.T gets rows of zeros
up to the last block's edge and Y loses the rows beyond n.
Source: scipy/sparse/sparsetools/bsr.h, bsr_matvecs.
"""

from scipy import sparse

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _scipy


def prepare(operands: Operands) -> Launch:
    """Hand scipy the format's own arrays, without a copy."""
    w = operands.weights["w"]
    assert isinstance(w, Bsr)
    (n, k), (r, c) = w.shape, w.block
    arrays = w.values.numpy(), w.columns.numpy(), w.offsets.numpy()
    padded = n + -n % r, k + -k % c
    return _scipy.launch(sparse.bsr_array(arrays, shape=padded), operands)


KERNEL = Kernel("linear", "bsr", "cpu", prepare, _scipy.unsupported)
