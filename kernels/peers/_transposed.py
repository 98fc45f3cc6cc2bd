"""dX = dY @ W is a linear layer of W.T: how a peer of `linear` computes `linear_dgrad`.

W.T is packed anew in `prepare`, values included. A training step changes the values, and so owes a
pack of W.T that no launch here pays for: peers get it for nothing.
"""

from dataclasses import replace

from torch import Tensor

from sparsebench.formats._format import offsets_of, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.kernels._kernel import Operands


def as_linear(operands: Operands) -> Operands:
    """Return the operands of the linear layer: W.T as `w`, dY as `x`."""
    w = operands.weights["w"]
    assert isinstance(w, Bsr | Csr)
    activations = {"x": operands.activations["dy"]}
    return replace(operands, weights={"w": transposed(w)}, activations=activations)


def transposed(w: Bsr | Csr) -> Bsr | Csr:
    """Return W.T [k, n] in W's format, its blocks transposed with it."""
    n, k = w.shape
    columns = w.columns.long()
    order = columns.argsort(stable=True)  # rows ascend within a column: they did before
    rows = rows_of(w.offsets)[order].to(w.columns.dtype)
    if isinstance(w, Csr):
        return Csr((k, n), offsets_of(columns, k), rows, w.values[order])
    offsets = offsets_of(columns, -(-k // w.block[1]))
    return Bsr((k, n), offsets, rows, _flipped(w.values[order]))


def _flipped(blocks: Tensor) -> Tensor:
    return blocks.transpose(1, 2).contiguous()
