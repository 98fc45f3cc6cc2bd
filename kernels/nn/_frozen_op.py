"""The plans of weights that layers and `matmul` never train: bitmap and CSR.

    bitmap   bitmap_mma; bitmap_pairs, which packs W anew, in 0.56 to 0.75 of the dense bytes; or a
             dense product with a copy of W (_dense_copy.py). Either copy is made when it is first
             chosen. The dense one stays: with it W takes three times the memory or more
    csr      csr_cuda, or such a dense product, unless the copy is much larger than W

A weight's Operator is an attribute of the weight, and is made again if the weight is written or
moved (_common/stamp.py).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.front import BackwardProduct, Derivative, Front, Signature, record
from sparsebench.kernels._common.operator import Earlier, Engine, Operator, bucket
from sparsebench.kernels._common.product import Selected
from sparsebench.kernels._common.stamp import by_stamp
from sparsebench.kernels._common.tape import on_tape
from sparsebench.kernels._common.transforms import is_traced, readable, rows_of, unflatten
from sparsebench.kernels._common.unstructured import UnstructuredCall, operator_of
from sparsebench.kernels._kernel import NAMES, refuse
from sparsebench.kernels.bitmap import bitmap_mma, bitmap_pairs
from sparsebench.kernels.csr import csr_cuda
from sparsebench.kernels.nn._dense_copy import OF_BITMAP, OF_CSR, dense_copy, dtype_of, takes_copy
from sparsebench.results.record import Problem

Weight = Bitmap | Csr
ATTRIBUTE = "_sparsebench_operator"
SIGNATURE = Signature(backward=(BackwardProduct(("dy",), ("x",)),))
# On an H200 bitmap_mma was at least 1.1 times as fast as cuBLAS for one token with W from 14336 x
# 4096, and 1.17 times up to FEW tokens from 28672 x 8192. At 50 % zeros it has 0.58 of the bytes.
FEW, ELEMENTS, MORE_ELEMENTS, ROWS, BYTES = 16, 14336 * 4096, 28672 * 8192, 4096, 0.6
# From ELEMENTS on, bitmap_pairs was faster than cuBLAS up to so many tokens, by the largest share
# of the dense bytes that a bitmap may have. 5120 rows were enough (70 % zeros), 4096 not (50 %).
PAIRS_TOKENS, PAIRS_ROWS = {0.45: 64, BYTES: 48}, 5120
# CSR runs its dense copy first if it stores more than this part of W, or 16 bits. In fp32 csr_cuda
# was faster than cuBLAS at 80 % zeros in one of three layers with 1,024 tokens (H200), in 16 bits
# in none up to 98 %.
DENSER = 0.2


def multiply(x: Tensor, w: Weight) -> Tensor:
    """Return X @ W.T [m, n] by the planned kernel. Raises Unsupported."""
    if not x.shape[0]:
        return x.new_zeros(0, w.shape[0])
    y: Tensor = select(x, w).product.run(x)
    return y


def select(x: Tensor, w: Weight, earlier: Earlier | None = None) -> Selected:
    """Plan X @ W.T; a search times it on this X. Raises Unsupported."""
    call = UnstructuredCall("linear", bucket(x.shape[0]))
    return plans_of(w).select(call, lambda product: partial(product.run, x), earlier)


def plan(m: int, w: Weight) -> Selected:
    """Plan m tokens without a search. Raises Unsupported."""
    return plans_of(w).select(UnstructuredCall("linear", bucket(m)))


def planned_run(m: int, w: Weight) -> Callable[[Tensor], Tensor] | None:
    """Return the product that `multiply` has planned for m tokens, or None."""
    call = UnstructuredCall("linear", bucket(m))
    selected = plans_of(w).plans.get(call) if m else None
    return selected.product.run if selected else None


def plans_of(w: Weight) -> Operator:
    """Return the plans of a weight as it is now. Raises Unsupported for an inference tensor."""
    engines = BITMAP if isinstance(w, Bitmap) else CSR
    make = partial(operator_of, w, engines, partial(_likeliest, w))
    plans: Operator = by_stamp(w, "matmul", ATTRIBUTE, make)
    return plans


def derivative_of(w: Bitmap) -> Derivative:
    """Return how a recorded call is differentiated: by X, with the dense copy."""
    before = plans_of(w)

    def run(front: Front | None, dy: Tensor, *_: Sequence[object]) -> list[Tensor]:
        if plans_of(w) is not before:
            raise RuntimeError("expected W as forward read it, found it modified before backward")
        transposed, rows = dense_copy(w).T, readable(rows_of(dy))
        if torch.is_grad_enabled() or is_traced():
            return [unflatten(linear(rows, transposed), dy)]

        def product(rows: Tensor) -> list[Tensor]:
            on_tape(dense=transposed)
            return [linear(rows, transposed)]

        return [unflatten(record(front, 1, [rows], product)[0], dy)]

    return run


def pairs_are_faster(m: int, w: Bitmap) -> bool:
    """Return whether bitmap_pairs was faster than cuBLAS for a layer this large, on an H200."""
    (n, k), call = w.shape, UnstructuredCall("linear", m)
    share = w.stored_bytes / max(n * k * w.dtype.itemsize, 1)
    most = next((tokens for limit, tokens in PAIRS_TOKENS.items() if share <= limit), 0)
    large = n * k >= ELEMENTS and n >= PAIRS_ROWS
    return m <= most and large and bitmap_pairs.unsupported_call(w, call) is None


def bits_are_faster(m: int, w: Bitmap) -> bool:
    """Return whether bitmap_mma was faster than cuBLAS for a layer this large, on an H200."""
    (n, k), size = w.shape, w.dtype.itemsize
    large = n * k >= (MORE_ELEMENTS if m > 1 else ELEMENTS) and n >= ROWS
    return size == 2 and m <= FEW and large and w.stored_bytes <= BYTES * n * k * size


def _likeliest(w: Weight, call: UnstructuredCall) -> Sequence[Engine]:
    """Return the engines that may run a call, the likeliest first. Raises Unsupported."""
    dtype, device = dtype_of(w), w.offsets.device
    ours = csr_cuda.KERNEL if isinstance(w, Csr) else bitmap_mma.KERNEL
    reason = ours.unsupported(Problem("linear", {"m": call.m, "dtype": NAMES[dtype]}), device)
    if isinstance(w, Csr):
        refuse(reason)
        return _of_csr(w)
    if reason:
        return [OF_BITMAP]
    first = [ours] if bits_are_faster(call.m, w) else []
    first += [bitmap_pairs.KERNEL] if pairs_are_faster(call.m, w) else []
    return [*first, OF_BITMAP, *(engine for engine in BITMAP[:2] if engine not in first)]


def _of_csr(w: Csr) -> Sequence[Engine]:
    """Return the engines of a weight in CSR, the likeliest first."""
    if not takes_copy(w):
        return CSR[:1]
    dense_first = w.values.itemsize == 2 or len(w.values) > DENSER * w.shape[0] * w.shape[1]
    return CSR[::-1] if dense_first else CSR


BITMAP = bitmap_mma.KERNEL, bitmap_pairs.KERNEL, OF_BITMAP
CSR = csr_cuda.KERNEL, OF_CSR
