"""The plans of weights that layers and `matmul` never train: bitmap and CSR.

    bitmap   bitmap_mma, or torch's own product with a dense copy of W. The copy is made when it is
             first chosen, and stays: with it W takes three times the memory or more. X may be
             padded, because cuBLAS can be slower for fewer tokens (NOTES.md)
    csr      csr_cuda, also with its rows divided as for more tokens

A weight's Operator is an attribute of the weight, and is made again if the weight is written or
moved (_stamp.py).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsebench.errors import Unsupported
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.capture import is_capturing, keep, make_lasting
from sparsebench.kernels._common.cuda import on_tape
from sparsebench.kernels._common.front import (
    BackwardProduct,
    Derivative,
    Front,
    Signature,
    record,
)
from sparsebench.kernels._common.selection import Candidate, Operator, bucket, config_of
from sparsebench.kernels._common.transforms import is_watched, readable, rows_of, unflatten
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.bitmap import bitmap_mma
from sparsebench.kernels.csr import csr_cuda
from sparsebench.kernels.nn._stamp import Stamp, arrays_of, stamp_of
from sparsebench.results.record import Problem

Weight = Bitmap | Csr
NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "tf32"}
ATTRIBUTE = "_sparsebench_operator"
SIGNATURE = Signature(backward=(BackwardProduct(("dy",), ("x",)),))
# Tokens of a tile of cuBLAS, above which X may be padded and rows divided as for SPARE more tokens;
# the latter for two configurations of csr_cuda.space, those with 32 tokens and most threads.
TILE, LIKELY, SPARE = 128, (2, 4), (64, 128)
# On an H200 bitmap_mma was at least 1.1 times as fast as cuBLAS for one token with W from 14336 x
# 4096, and 1.17 times up to FEW tokens from 28672 x 8192. At 50 % zeros it has 0.58 of the bytes.
FEW, ELEMENTS, MORE_ELEMENTS, ROWS, BYTES = 16, 14336 * 4096, 28672 * 8192, 4096, 0.6


@dataclass
class Plans:
    """An Operator, the stamp and the arrays of its weight, and the dense copy of a bitmap."""

    operator: Operator
    stamp: Stamp
    arrays: list[Tensor]
    dense: Tensor | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as None: the plans are of this weight's memory."""
        return type(None), ()


def multiply(x: Tensor, w: Weight) -> Tensor:
    """Return X @ W.T [m, n] by the planned kernel. Raises Unsupported."""
    if not x.shape[0]:
        return x.new_zeros(0, w.shape[0])
    operator, m = plans_of(w).operator, bucket(x.shape[0])
    selected = operator.plans.get(m)
    if selected is None:
        selected = operator.select(m, lambda product: partial(product.run, x))
    return selected.product.run(x)


def planned_run(m: int, w: Weight) -> Callable[[Tensor], Tensor] | None:
    """Return the product that `multiply` has planned for m tokens, or None."""
    selected = plans_of(w).operator.plans.get(bucket(m)) if m else None
    return selected.product.run if selected else None


def plans_of(w: Weight) -> Plans:
    """Return the plans of a weight as it is now. Raises Unsupported for an inference tensor."""
    stamp = stamp_of(w, "matmul")
    made: Plans | None = w.__dict__.get(ATTRIBUTE)
    if made is None or made.stamp != stamp:
        operator = _bitmap(w) if isinstance(w, Bitmap) else _csr(w)
        made = Plans(operator, stamp, arrays_of(w))
        object.__setattr__(w, ATTRIBUTE, made)
    return made


def dense_copy(w: Bitmap) -> Tensor:
    """Return the dense copy of a bitmap, which the first call makes."""
    plans = plans_of(w)
    if plans.dense is None:
        plans.dense = make_lasting(w.to_dense, w.records.device)
    if is_capturing(plans.dense):
        keep(plans.dense)
    return plans.dense


def derivative_of(w: Bitmap) -> Derivative:
    """Return how a recorded call is differentiated: by X, with the dense copy."""
    stamp = plans_of(w).stamp

    def run(front: Front | None, dy: Tensor, *_: Sequence[object]) -> list[Tensor]:
        plans = plans_of(w)
        if plans.stamp != stamp:
            raise RuntimeError("expected W as forward read it, found it modified before backward")
        transposed, rows = dense_copy(w).T, readable(rows_of(dy))
        if torch.is_grad_enabled() or is_watched():
            return [unflatten(linear(rows, transposed), dy)]

        def product(rows: Tensor) -> list[Tensor]:
            on_tape(dense=transposed)
            return [linear(rows, transposed)]

        return [unflatten(record(front, 1, [rows], product)[0], dy)]

    return run


def bits_are_faster(m: int, w: Bitmap) -> bool:
    """Return whether bitmap_mma was faster than cuBLAS for a layer this large, on an H200."""
    (n, k), size = w.shape, w.dtype.itemsize
    large = n * k >= (MORE_ELEMENTS if m > 1 else ELEMENTS) and n >= ROWS
    return size == 2 and m <= FEW and large and w.stored_bytes <= BYTES * n * k * size


# ---- what each format offers ----


@dataclass(frozen=True)
class Padded:
    """The configuration of a dense product: X is padded to so many tokens; 0: as it is."""

    padded: int = 0


class DenseCopy:
    """torch's own product with the dense copy."""

    code = pack = order = None

    def __init__(self, w: Bitmap, config: Padded) -> None:
        """Make the copy, unless there is one."""
        self.dense, self.tokens = dense_copy(w), config.padded

    def run(self, x: Tensor) -> Tensor:
        """Multiply."""
        if self.tokens > (m := x.shape[0]):
            on_tape(complete=False)
            padded = x.new_empty(self.tokens, x.shape[1])  # the other rows of Y are dropped
            padded[:m] = x
            return linear(padded, self.dense)[:m]
        on_tape(dense=self.dense)
        return linear(x, self.dense)


def _bitmap(w: Bitmap) -> Operator:
    (n, k), device = w.shape, w.records.device
    bytes_of_dense = n * k * w.dtype.itemsize

    def offer(m: int, choice: Mapping[str, Any] | None) -> list[Iterable[Candidate]]:
        sizes = 0, -(-m // TILE) * TILE if m > TILE and m % TILE else 0
        chosen = choice and choice["kernel"] == "dense"
        configs = [Padded(choice.get("padded", 0))] if choice and chosen else map(Padded, sizes)
        dense = [Candidate("dense", c, partial(DenseCopy, w, c)) for c in dict.fromkeys(configs)]
        if device.type != "cuda" or chosen:
            return [dense]
        bits = _bits(m, choice)
        if choice:
            return [bits]
        return [bits, dense] if bits_are_faster(m, w) else [dense, bits]

    def _bits(m: int, choice: Mapping[str, Any] | None) -> Iterable[Candidate]:
        x = torch.empty(m, k, dtype=w.dtype, device="meta")
        sizes = Problem("linear", {"m": m, "dtype": NAMES[w.dtype]})
        reason = bitmap_mma.unsupported(sizes, device)
        if reason := reason or bitmap_mma.unsupported_operands(x, w):
            raise Unsupported(reason)
        if choice:
            configs = [config_of(bitmap_mma, choice)]
        else:
            workers = {split: bitmap_mma.at_once(split, device) for split in bitmap_mma.SPLITS}
            configs = bitmap_mma.configurations(n, k, m, w.room, w.dtype.itemsize, workers)
        for config in configs[: bitmap_mma.TRIED]:
            yield Candidate("bitmap_mma", config, partial(_bits_product, w, m, config))

    def problem(m: int) -> dict[str, Any]:
        density = float(f"{w.stored_bytes / bytes_of_dense:.2g}")
        fields = {"op": "bitmap.linear", "dtype": NAMES[w.dtype]}
        return {**fields, "m": m, "n": n, "k": k, "density": density}

    return Operator(("bitmap_mma", "dense"), offer, problem, device)


def _bits_product(w: Bitmap, m: int, config: bitmap_mma.Config) -> bitmap_mma.Product:
    product = bitmap_mma.Product(w, config, w.records.device)
    product.require(m)
    return product


def _csr(w: Csr) -> Operator:
    (n, k), device, stored = w.shape, w.values.device, max(len(w.values), 1)
    name = NAMES[w.values.dtype]

    def offer(m: int, choice: Mapping[str, Any] | None) -> list[Iterable[Candidate]]:
        x = torch.empty(m, k, dtype=w.values.dtype, device="meta")
        reason = csr_cuda.unsupported(Problem("linear", {"dtype": name}), device)
        if reason := reason or csr_cuda.unsupported_operands(x, w):
            raise Unsupported(reason)
        configs = [config_of(csr_cuda, choice)] if choice else csr_cuda.space(w.values.dtype)
        if not choice and m > TILE:
            configs += [replace(configs[i], spare=spare) for i in LIKELY for spare in SPARE]
        plan = partial(csr_cuda.Product, w, m, aligned=csr_cuda.is_aligned(x))
        return [[Candidate("csr_cuda", c, partial(plan, c)) for c in configs]]

    def problem(m: int) -> dict[str, Any]:
        density = float(f"{stored / (n * k):.2g}")
        return {"op": "csr.linear", "dtype": name, "m": m, "n": n, "k": k, "density": density}

    return Operator(("csr_cuda",), offer, problem, device)
