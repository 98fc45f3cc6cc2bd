"""Gradient of a layer's weight by STK: the stored blocks of dW = dY.T @ X, one program a block.

dY.T is read as a view of dY. STK returns the blocks in a matrix of the pattern that it was given:
its `data` are the values. What it asks for: stk.py.
"""

from dataclasses import replace

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers.stk import matrix, unsupported


def prepare(operands: Operands) -> Launch:
    """Hand STK the pattern's arrays."""
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern
    assert isinstance(w, Bsr)
    topology = matrix(w)
    from stk import ops

    return Launch(lambda: replace(w, values=ops.sdd(dy.t(), x, topology).data))


KERNEL = Kernel("linear_wgrad", "bsr", "cuda", prepare, unsupported)
