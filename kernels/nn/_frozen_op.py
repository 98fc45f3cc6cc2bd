"""The plans of weights that layers and `matmul` never train: bitmap and CSR.

    bitmap   bitmap_mma; bitmap_pairs, which packs W anew, in 0.56 to 0.75 of the dense bytes; or a
             dense product with a copy of W, by torch or by a direct call of cuBLASLt, for which a
             search times what the dense baseline times (dense/_gemm.py). Either copy is made when
             it is first chosen. The dense one stays: with it W takes three times the memory or
             more. torch's X may be padded, because cuBLAS can be slower for fewer tokens (NOTES.md)
    csr      csr_cuda

A weight's Operator is an attribute of the weight, and is made again if the weight is written or
moved (_stamp.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.capture import is_capturing, keep, make_lasting
from sparsebench.kernels._common.cuda import on_tape
from sparsebench.kernels._common.front import BackwardProduct, Derivative, Front, Signature, record
from sparsebench.kernels._common.operator import Earlier, Engine, Operator, bucket
from sparsebench.kernels._common.product import Product, Selected
from sparsebench.kernels._common.search import finalists
from sparsebench.kernels._common.transforms import (
    ALIGNMENT,
    is_watched,
    readable,
    rows_of,
    unflatten,
)
from sparsebench.kernels._common.unstructured import UnstructuredCall, bind, operator_of
from sparsebench.kernels._kernel import DTYPES, NAMES, poison, refuse
from sparsebench.kernels.bitmap import bitmap_mma, bitmap_pairs
from sparsebench.kernels.csr import csr_cuda
from sparsebench.kernels.dense import _cublaslt
from sparsebench.kernels.dense._cublaslt import Algorithm
from sparsebench.kernels.dense._gemm import DenseProduct, agrees, fastest_way, runs
from sparsebench.kernels.nn._stamp import by_stamp
from sparsebench.results.record import Problem

Weight = Bitmap | Csr
ATTRIBUTE = "_sparsebench_operator"
SIGNATURE = Signature(backward=(BackwardProduct(("dy",), ("x",)),))
TILE = 128  # tokens of a tile of cuBLAS, above which X may be padded
# On an H200 bitmap_mma was at least 1.1 times as fast as cuBLAS for one token with W from 14336 x
# 4096, and 1.17 times up to FEW tokens from 28672 x 8192. At 50 % zeros it has 0.58 of the bytes.
FEW, ELEMENTS, MORE_ELEMENTS, ROWS, BYTES = 16, 14336 * 4096, 28672 * 8192, 4096, 0.6
# From ELEMENTS on, bitmap_pairs was faster than cuBLAS up to so many tokens, by the largest share
# of the dense bytes that a bitmap may have. 5120 rows were enough (70 % zeros), 4096 not (50 %).
PAIRS_TOKENS, PAIRS_ROWS = {0.45: 64, BYTES: 48}, 5120


@dataclass(eq=False)
class FrozenPlans:
    """The operator of a weight, and the dense copy of a bitmap."""

    operator: Operator
    dense: Tensor | None = None


def multiply(x: Tensor, w: Weight) -> Tensor:
    """Return X @ W.T [m, n] by the planned kernel. Raises Unsupported."""
    if not x.shape[0]:
        return x.new_zeros(0, w.shape[0])
    y: Tensor = select(x, w).product.run(x)
    return y


def select(x: Tensor, w: Weight, earlier: Earlier | None = None) -> Selected:
    """Plan X @ W.T; a search times it on this X. Raises Unsupported."""
    call = UnstructuredCall("linear", bucket(x.shape[0]))
    return plans_of(w).operator.select(call, lambda product: partial(product.run, x), earlier)


def plan(m: int, w: Weight) -> Selected:
    """Plan m tokens without a search. Raises Unsupported."""
    return plans_of(w).operator.select(UnstructuredCall("linear", bucket(m)))


def planned_run(m: int, w: Weight) -> Callable[[Tensor], Tensor] | None:
    """Return the product that `multiply` has planned for m tokens, or None."""
    call = UnstructuredCall("linear", bucket(m))
    selected = plans_of(w).operator.plans.get(call) if m else None
    return selected.product.run if selected else None


def plans_of(w: Weight) -> FrozenPlans:
    """Return the plans of a weight as it is now. Raises Unsupported for an inference tensor."""

    def make() -> FrozenPlans:
        engines = BITMAP if isinstance(w, Bitmap) else (csr_cuda.KERNEL,)
        return FrozenPlans(operator_of(w, engines, partial(_likeliest, w)))

    plans: FrozenPlans = by_stamp(w, "matmul", ATTRIBUTE, make)
    return plans


def dense_copy(w: Bitmap) -> Tensor:
    """Return the dense copy [n, k] of a bitmap, by columns, which the first call makes.

    In published searches of cuBLAS with up to 64 tokens, the fastest call had W by columns in 97 %
    of large products, and torch's product took 1.09 to 1.10 of its time by rows, 1.03 by columns.
    """
    plans = plans_of(w)
    if plans.dense is None:
        plans.dense = make_lasting(lambda: w.to_dense().T.contiguous().T, w.records.device)
    if is_capturing(plans.dense):
        keep(plans.dense)
    return plans.dense


def derivative_of(w: Bitmap) -> Derivative:
    """Return how a recorded call is differentiated: by X, with the dense copy."""
    before = plans_of(w)

    def run(front: Front | None, dy: Tensor, *_: Sequence[object]) -> list[Tensor]:
        if plans_of(w) is not before:
            raise RuntimeError("expected W as forward read it, found it modified before backward")
        transposed, rows = dense_copy(w).T, readable(rows_of(dy))
        if torch.is_grad_enabled() or is_watched():
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
    dtype, device = w.values.dtype if isinstance(w, Csr) else w.dtype, w.offsets.device
    ours = csr_cuda.KERNEL if isinstance(w, Csr) else bitmap_mma.KERNEL
    reason = ours.unsupported(Problem("linear", {"m": call.m, "dtype": NAMES[dtype]}), device)
    if isinstance(w, Csr):
        refuse(reason)
        return [ours]
    if reason:
        return [DENSE]
    first = [ours] if bits_are_faster(call.m, w) else []
    first += [bitmap_pairs.KERNEL] if pairs_are_faster(call.m, w) else []
    return [*first, DENSE, *(engine for engine in BITMAP[:2] if engine not in first)]


# ---- a dense product with a copy of W ----


@dataclass(frozen=True)
class DenseConfig:
    """The configuration of a dense product.

    padded     torch's product of X padded to so many tokens; 0: as it is
    algorithm  of a direct call of cuBLASLt; None: torch's product
    """

    padded: int = 0
    algorithm: Algorithm | None = None

    def __post_init__(self) -> None:
        """Take an algorithm as a list has it: its fields."""
        if isinstance(self.algorithm, Mapping):
            object.__setattr__(self, "algorithm", Algorithm(**self.algorithm))


def torch_choices(w: Bitmap, call: UnstructuredCall) -> list[DenseConfig]:
    """Return the product of X as it is, and of X padded to whole tiles."""
    whole = -(-call.m // TILE) * TILE
    return [DenseConfig(), *([DenseConfig(whole)] if TILE < call.m < whole else [])]


def dense_choices(w: Bitmap, call: UnstructuredCall) -> Iterator[DenseConfig]:
    """Yield torch's products, and then the fastest direct calls, which the baseline's search times.

    They are timed on an X as torch allocates it. Kernels also read an X that begins 16 bytes after
    a multiple of 256; a call that is wrong for such an X is left out.
    """
    yield from torch_choices(w, call)
    if not w.offsets.is_cuda or w.dtype == DTYPES["fp8"] or _cublaslt.unavailable():
        return
    dense, (n, k), shift = dense_copy(w), w.shape, ALIGNMENT // w.dtype.itemsize
    memory = torch.randn(call.m * k + shift, device=dense.device).to(w.dtype)
    x, shifted = (memory[start : start + call.m * k].view(call.m, k) for start in (0, shift))
    right, out = torch.mm(shifted, dense.T), x.new_empty(call.m, n)
    for choice in finalists(fastest_way(DenseProduct(x, dense.T, out, weight=False)).candidates):
        if "algorithm" in choice:
            config = DenseConfig(algorithm=choice["algorithm"])
            run = partial(plan_dense(w, call, config).run, shifted, out=out)
            poison(out)
            if runs(run) and agrees(out, right):
                yield config


def plan_dense(w: Bitmap, call: UnstructuredCall, config: DenseConfig) -> Product:
    """Make the dense copy, unless there is one. Raises Unsupported."""
    fp8 = w.dtype == DTYPES["fp8"]
    refuse("dense: expected fp16, bf16 or fp32, because torch multiplies no fp8" if fp8 else None)
    dense = dense_copy(w)
    if config.algorithm:
        return Product(_cublaslt.bind_weight(dense, config.algorithm, call.m))

    def run(x: Tensor, out: Tensor | None = None) -> Tensor:
        if config.padded <= (m := x.shape[0]):
            on_tape(dense=dense)
            return torch.mm(x, dense.T, out=out)
        on_tape(complete=False)
        rows = x.new_empty(config.padded, x.shape[1])  # the other rows of Y are dropped
        rows[:m] = x
        y = torch.mm(rows, dense.T)[:m]
        return y if out is None else out.copy_(y)

    return Product(run)


DENSE = Engine(
    op="linear",
    consumes="bitmap",
    device="any",
    name="dense",
    config=DenseConfig,
    choices=dense_choices,
    closed=torch_choices,
    plan=plan_dense,
    bind=bind,
)
BITMAP = bitmap_mma.KERNEL, bitmap_pairs.KERNEL, DENSE
