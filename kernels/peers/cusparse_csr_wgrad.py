"""Weight gradient in CSR by cuSPARSE: cusparseSDDMM on CUDA cores, the fastest of its layouts.

Needs an NVIDIA GPU and nvmath-python. fp32 accumulation; 32-bit indices.
Source: docs.nvidia.com/cuda/cusparse, cusparseSDDMM, CUSPARSE_SDDMM_ALG_DEFAULT.
"""

from functools import partial

from sparsebench.formats.csr import Csr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _cusparse, _cusparse_sddmm, cusparse_csr


def prepare(operands: Operands) -> Launch:
    """Choose the fastest layouts."""
    w = operands.pattern
    assert isinstance(w, Csr)
    pattern = _cusparse_sddmm.Pattern(w, w.shape, partial(cusparse_csr.describe, w))
    return _cusparse_sddmm.prepare(pattern, operands)


KERNEL = Kernel("linear_wgrad", "csr", "cuda", prepare, _cusparse.unsupported)
