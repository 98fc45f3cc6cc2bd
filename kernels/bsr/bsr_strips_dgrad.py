"""Gradient of a layer's input with blocks of odd sizes, in CUDA C++ for Hopper: dX = dY @ W.

dX[m, k] = dY[m, n] @ W[n, k] is a linear layer with the weights W.T. Index and blocks are turned
when they are packed; the kernel is that of the forward pass.
"""

from sparsebench.kernels._common.cuda import unsupported_on_hopper
from sparsebench.kernels._common.tuned_table import Tuned
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr.bsr_strips import prepared


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Unite the columns and assign the work; take a table's configuration, or time a few."""
    return prepared(operands, operands.activations["dy"], tuned, transposed=True)


KERNEL = Kernel("linear_dgrad", "bsr", "cuda", prepare, unsupported_on_hopper, tunes=True)
