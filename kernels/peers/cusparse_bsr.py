"""BSR by cuSPARSE: cusparseSpMM on CUDA cores, the fastest of its layouts.

Needs an NVIDIA GPU and nvmath-python; square blocks of any size. fp16, bf16 and fp32; sums in fp32.
In cuSPARSE 12.6 none of its kernels holds a tensor-core instruction, so a GPU's fp32 rate
bounds all three types. Where k is no multiple of the block the launch copies X, zero-padded.
Source: docs.nvidia.com/cuda/cusparse, cusparseSpMM, CUSPARSE_SPMM_BSR_ALG1.
"""

from functools import partial

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _cusparse


def prepare(operands: Operands) -> Launch:
    """Choose layouts by trying."""
    w = operands.weights["w"]
    assert isinstance(w, Bsr)
    weight = _cusparse.Weight(padded(w), ("BSR_ALG1",), partial(describe, w))
    return _cusparse.prepare(weight, operands)


def padded(w: Bsr) -> tuple[int, int]:
    """Return the sizes in whole blocks, or raise Unsupported where they are not square."""
    (n, k), (r, c) = w.shape, w.block
    if r != c:
        raise Unsupported(f"cuSPARSE expected square blocks, found {r}x{c}")
    return n + -n % r, k + -k % c


def describe(w: Bsr) -> int:
    """Return a new descriptor; it does not keep the arrays alive."""
    from nvmath.bindings import cusparse

    (rows, columns), (r, c) = padded(w), w.block
    int32, base = cusparse.IndexType.INDEX_32I, cusparse.IndexBase.ZERO
    types = int32, int32, base, _cusparse.CUDA_TYPES[w.values.dtype]
    arrays = (a.data_ptr() for a in (w.offsets, w.columns, w.values))
    sizes = rows // r, columns // c, len(w.values), r, c
    return int(cusparse.create_bsr(*sizes, *arrays, *types, cusparse.Order.ROW))


KERNEL = Kernel("linear", "bsr", "cuda", prepare, _cusparse.unsupported)
