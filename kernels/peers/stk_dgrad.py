"""Gradient of a layer's input by STK: dX = dY @ W, the fastest of its layouts.

STK reads the blocks as they are stored, through the transposed index of its matrix. So no value is
copied, and new values need no work. Sizes and dtypes: stk.py.
"""

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers.stk import matrix, multiplied, unsupported


def prepare(operands: Operands) -> Launch:
    """Give STK the format's arrays and time its layouts. Raises Unsupported."""
    w = operands.weights["w"]
    assert isinstance(w, Bsr)
    return multiplied(operands, operands.activations["dy"], matrix(w), transposed=False)


KERNEL = Kernel("linear_dgrad", "bsr", "cuda", prepare, unsupported)
