"""Weight gradient in BSR by cuSPARSE: cusparseSDDMM on CUDA cores, the fastest of its layouts.

Needs an NVIDIA GPU and nvmath-python; square blocks of 2, 4, 8, 16, 32, 64 or 128. Sums in fp32. In
cuSPARSE 12.6 none of its kernels holds a tensor-core instruction. Where n or k is no multiple of
the block the launch copies dY or X, zero-padded.
Source: docs.nvidia.com/cuda/cusparse, cusparseSDDMM, CUSPARSE_SDDMM_ALG_DEFAULT.
"""

from functools import partial

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _cusparse, _cusparse_sddmm, cusparse_bsr


def prepare(operands: Operands) -> Launch:
    """Choose layouts by trying."""
    w = operands.pattern
    assert isinstance(w, Bsr)
    shape = cusparse_bsr.padded(w)
    pattern = _cusparse_sddmm.Pattern(w, shape, partial(cusparse_bsr.describe, w))
    return _cusparse_sddmm.prepare(pattern, operands)


KERNEL = Kernel("linear_wgrad", "bsr", "cuda", prepare, _cusparse.unsupported)
