"""Compute `linear_dgrad` by a peer of `linear`: dX = dY @ W is a linear layer of W.T.

`prepare` packs W.T with its values. In training the values change in each step, so each step would
pack W.T again. This time is not measured, in favour of the peers.
"""

from dataclasses import replace
from functools import wraps
from typing import Any

from sparsebench.formats._format import offsets_of, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.kernels._kernel import Kernel, Launch, Operands


def dgrad_of(kernel: Kernel) -> Kernel:
    """Return the kernel of `linear_dgrad` that runs a kernel of `linear` on W.T."""

    @wraps(kernel.prepare)
    def prepare(operands: Operands, **options: Any) -> Launch:
        return kernel.prepare(as_linear(operands), **options)

    return replace(kernel, op="linear_dgrad", prepare=prepare)


def as_linear(operands: Operands) -> Operands:
    """Return the operands of the linear layer: W.T as `w`, dY as `x`."""
    w = operands.weights["w"]
    assert isinstance(w, Bsr | Csr)
    activations = {"x": operands.activations["dy"]}
    return replace(operands, weights={"w": transposed(w)}, activations=activations)


def transposed(w: Bsr | Csr) -> Bsr | Csr:
    """Return W.T [k, n] in W's format; blocks are transposed too."""
    n, k = w.shape
    columns = w.columns.long()
    order = columns.argsort(stable=True)  # stable, so rows still ascend within a column
    rows = rows_of(w.offsets)[order].to(w.columns.dtype)
    if isinstance(w, Csr):
        return Csr((k, n), offsets_of(columns, k), rows, w.values[order])
    offsets = offsets_of(columns, -(-k // w.block[1]))
    return Bsr((k, n), offsets, rows, w.values[order].transpose(1, 2).contiguous())
