"""CSR by cuSPARSE: cusparseSpMM on CUDA cores, the fastest of its algorithms and layouts.

Needs an NVIDIA GPU and nvmath-python. fp16, bf16 and fp32; fp32 accumulation; 32-bit indices.
Source: docs.nvidia.com/cuda/cusparse, cusparseSpMM, CUSPARSE_SPMM_CSR_ALG1 to ALG3; cusparseSDDMM.
"""

from functools import partial

from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.transposed import dgrad_of
from sparsebench.kernels._kernel import Kernel, Launch, Lossy, Operands
from sparsebench.kernels.peers import _cusparse

ALGORITHMS = "CSR_ALG1", "CSR_ALG2", "CSR_ALG3"


def prepare(operands: Operands) -> Launch:
    w = operands.weights["w"]
    assert isinstance(w, Csr)
    return _cusparse.prepare(
        _cusparse.CusparseWeight(w.shape, ALGORITHMS, partial(describe, w)), operands
    )


def describe(w: Csr) -> int:
    """Return a new descriptor. The caller must keep the arrays alive."""
    from nvmath.bindings import cusparse

    int32, base = cusparse.IndexType.INDEX_32I, cusparse.IndexBase.ZERO
    types = int32, int32, base, _cusparse.CUDA_TYPES[w.values.dtype]
    arrays = (a.data_ptr() for a in (w.offsets, w.columns, w.values))
    return int(cusparse.create_csr(*w.shape, len(w.values), *arrays, *types))


def prepare_wgrad(operands: Operands) -> Launch:
    w = operands.pattern
    assert isinstance(w, Csr)
    pattern = _cusparse.GradientPattern(w, w.shape, partial(describe, w))
    return _cusparse.prepare_wgrad(pattern, operands)


LOSSY = Lossy({"fp16": 0.001, "bf16": 0.008}, "cuSPARSE keeps some sums in 16 bits")
KERNEL = Kernel("linear", "csr", "cuda", prepare, _cusparse.unsupported, lossy=LOSSY)

DGRAD = dgrad_of(KERNEL)
"""Input gradient from CSR by cuSPARSE."""

WGRAD = Kernel("linear_wgrad", "csr", "cuda", prepare_wgrad, _cusparse.unsupported)
"""Weight gradient in CSR by cuSPARSE: cusparseSDDMM on CUDA cores, the fastest of its layouts."""
