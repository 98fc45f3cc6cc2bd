"""Gradient of a layer's input with blocks of any even size and few rows: dX = dY @ W.

dX[m, k] = dY[m, n] @ W[n, k] is a linear layer with the weights W.T. The blocks are turned when
they are packed; the kernel is that of the forward pass.
"""

from sparsebench.kernels._common.tuned_table import Tuned
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr.bsr_resident import prepared, unsupported


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Turn and pack the blocks; take a table's configuration, or time a few."""
    return prepared(operands, operands.activations["dy"], tuned, transposed=True)


KERNEL = Kernel("linear_dgrad", "bsr", "cuda", prepare, unsupported, tunes=True)
