"""Gradient of a layer's input by STK: dX = dY @ W, the faster of its two layouts.

STK multiplies by W from the blocks as they are stored, through the transposed index that its matrix
holds: no value is copied, and a change of values costs nothing. What it asks for: stk.py.
"""

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers.stk import matrix, multiplied, unsupported


def prepare(operands: Operands) -> Launch:
    """Hand STK the format's arrays and time its two layouts."""
    w = operands.weights["w"]
    assert isinstance(w, Bsr)
    return multiplied(operands, operands.activations["dy"], matrix(w), transposed=False)


KERNEL = Kernel("linear_dgrad", "bsr", "cuda", prepare, unsupported)
