"""BSR by cuSPARSE: cusparseSpMM on CUDA cores, the fastest of its layouts.

Needs an NVIDIA GPU and nvmath-python; square blocks of any size. fp16, bf16 and fp32; sums in fp32.
In cuSPARSE 12.6 none of its kernels holds a tensor-core instruction, so a GPU's fp32 rate
bounds all three types. Where k is no multiple of the block the launch copies X, zero-padded.
Source: docs.nvidia.com/cuda/cusparse, cusparseSpMM, CUSPARSE_SPMM_BSR_ALG1.
"""

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels import _cusparse
from sparsebench.kernels._kernel import Kernel, Launch, Operands, Unsupported


def prepare(operands: Operands) -> Launch:
    """Choose layouts by trying."""
    from nvmath.bindings import cusparse

    w = operands.weights["w"]
    assert isinstance(w, Bsr)
    (n, k), (r, c) = w.shape, w.block
    if r != c:
        raise Unsupported(f"cuSPARSE expected square blocks, found {r}x{c}")
    blocks = -(-n // r), -(-k // c)
    int32, base = cusparse.IndexType.INDEX_32I, cusparse.IndexBase.ZERO
    types = int32, int32, base, _cusparse.CUDA_TYPES[w.values.dtype]

    def describe() -> int:
        arrays = (a.data_ptr() for a in (w.offsets, w.columns, w.values))
        sizes = *blocks, len(w.values), r, c
        return int(cusparse.create_bsr(*sizes, *arrays, *types, cusparse.Order.ROW))

    padded = blocks[0] * r, blocks[1] * c
    return _cusparse.prepare(_cusparse.Weight(padded, ("BSR_ALG1",), describe), operands)


KERNEL = Kernel("linear", "bsr", "cuda", prepare, _cusparse.supports)
