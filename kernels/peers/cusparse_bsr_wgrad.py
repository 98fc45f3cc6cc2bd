"""Weight gradient in BSR by cuSPARSE: cusparseSDDMM on CUDA cores, the fastest of its layouts.

Needs an NVIDIA GPU and nvmath-python; square blocks of 2, 4, 8, 16, 32, 64 or 128. fp32
accumulation. No kernel of it in cuSPARSE 12.6 has a tensor-core instruction. If n or k is not a
multiple of the block, the launch copies dY or X and pads it with zeros.
Source: docs.nvidia.com/cuda/cusparse, cusparseSDDMM, CUSPARSE_SDDMM_ALG_DEFAULT.
"""

from functools import partial

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _cusparse, _cusparse_sddmm, cusparse_bsr


def prepare(operands: Operands) -> Launch:
    """Choose the fastest layouts."""
    w = operands.pattern
    assert isinstance(w, Bsr)
    shape = cusparse_bsr.padded(w)
    pattern = _cusparse_sddmm.Pattern(w, shape, partial(cusparse_bsr.describe, w))
    return _cusparse_sddmm.prepare(pattern, operands)


KERNEL = Kernel("linear_wgrad", "bsr", "cuda", prepare, _cusparse.unsupported)
