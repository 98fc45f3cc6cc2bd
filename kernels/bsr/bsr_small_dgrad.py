"""Gradient of a layer's input with small blocks, in CUDA C++ for Hopper: dX = dY @ W.

dX[m, k] = dY[m, n] @ W[n, k] is a linear layer with the weights W.T. bsr_small.cu unites block
columns where the forward pass unites block rows, and wgmma reads each block MN-major. The blocks
are packed again, in the order of these steps; none is transposed.
"""

from sparsebench.kernels._common.cuda import unsupported_on_hopper
from sparsebench.kernels._common.tuned_table import Tuned
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr.bsr_small import prepared


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Unite the columns and assign the work; take a table's configuration, or time up to four."""
    return prepared(operands, operands.activations["dy"], tuned, transposed=True)


KERNEL = Kernel(
    op="linear_dgrad",
    consumes="bsr",
    device="cuda",
    unsupported=unsupported_on_hopper,
    prepare=prepare,
    tunes=True,
)
