"""Gradient of a block-sparse linear layer's input, in CUDA C++ for Hopper: dX = dY @ W.

dX[m, k] = dY[m, n] @ W[n, k] is a linear layer with the weights W.T. bsr_wgmma.cu computes it from
the blocks as the forward pass stores them. The host transposes the index, and wgmma reads a tile of
W MN-major. No value is copied.

    W, stored by block rows      what an item multiplies: block columns
      ## .. ##                     ##        ..  ##
      .. ## ##                     ..   ->   ##  ##      dX's 64 features of a slice
"""

from sparsebench.kernels._common.cuda import unsupported_on_hopper
from sparsebench.kernels._common.tuned_table import Tuned
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr.bsr_wgmma import prepared


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Pair the columns and assign the work; take a table's configuration, or time up to four."""
    return prepared(operands, operands.activations["dy"], tuned, transposed=True)


KERNEL = Kernel("linear_dgrad", "bsr", "cuda", prepare, unsupported_on_hopper, tunes=True)
