"""BSR by cuSPARSE: cusparseSpMM on CUDA cores, the fastest of its layouts.

Needs an NVIDIA GPU and nvmath-python; square blocks of any size, for the gradient of W of 2, 4, 8,
16, 32, 64 or 128. fp16, bf16 and fp32; fp32 accumulation. Neither kernel has a tensor-core
instruction in cuSPARSE 12.6, so the GPU's fp32 rate limits all three types. If n or k is not a
multiple of the block, the launch copies X or dY and pads it with zeros; for the gradient of W also
if the number of tokens is none, because the library then refuses the product (12.6).
Source: docs.nvidia.com/cuda/cusparse, cusparseSpMM, CUSPARSE_SPMM_BSR_ALG1; cusparseSDDMM.
"""

from functools import partial

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _cusparse


def prepare(operands: Operands) -> Launch:
    w = operands.weights["w"]
    assert isinstance(w, Bsr)
    weight = _cusparse.CusparseWeight(padded(w), ("BSR_ALG1",), partial(describe, w))
    return _cusparse.prepare(weight, operands)


def padded(w: Bsr) -> tuple[int, int]:
    """Return n and k rounded up to whole blocks. Raises Unsupported unless blocks are square."""
    (n, k), (r, c) = w.shape, w.block
    if r != c:
        raise Unsupported(f"cuSPARSE expected square blocks, found {r}x{c}")
    return n + -n % r, k + -k % c


def describe(w: Bsr) -> int:
    """Return a new descriptor. The caller must keep the arrays alive."""
    from nvmath.bindings import cusparse

    (rows, columns), (r, c) = padded(w), w.block
    int32, base = cusparse.IndexType.INDEX_32I, cusparse.IndexBase.ZERO
    types = int32, int32, base, _cusparse.CUDA_TYPES[w.values.dtype]
    arrays = (a.data_ptr() for a in (w.offsets, w.columns, w.values))
    sizes = rows // r, columns // c, len(w.values), r, c
    return int(cusparse.create_bsr(*sizes, *arrays, *types, cusparse.Order.ROW))


def prepare_wgrad(operands: Operands) -> Launch:
    w = operands.pattern
    assert isinstance(w, Bsr)
    pattern = _cusparse.GradientPattern(w, padded(w), partial(describe, w), w.block[0])
    return _cusparse.prepare_wgrad(pattern, operands)


KERNEL = Kernel("linear", "bsr", "cuda", prepare, _cusparse.unsupported)

WGRAD = Kernel("linear_wgrad", "bsr", "cuda", prepare_wgrad, _cusparse.unsupported)
"""Weight gradient in BSR by cuSPARSE: cusparseSDDMM on CUDA cores, the fastest of its layouts."""
