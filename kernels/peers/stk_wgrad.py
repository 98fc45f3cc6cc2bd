"""Gradient of a layer's weight by STK: stored blocks of dW = dY.T @ X, one program for each block.

dY.T is a view of dY, or is copied to rows by the launch, whichever is faster. STK returns a matrix
of the given pattern; its `data` are the values. Sizes and dtypes: stk.py.
"""

from collections.abc import Callable
from dataclasses import replace

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers.stk import fastest_of, matrix, unsupported


def prepare(operands: Operands) -> Launch:
    """Give STK the pattern's arrays and time its layouts. Raises Unsupported."""
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern
    assert isinstance(w, Bsr)
    topology = matrix(w)
    from stk import ops

    layouts: dict[str, Callable[[], Bsr]] = {
        "view": lambda: replace(w, values=ops.sdd(dy.t(), x, topology).data),
        "copied": lambda: replace(w, values=ops.sdd(dy.t().contiguous(), x, topology).data),
    }
    return fastest_of(layouts, operands)


KERNEL = Kernel("linear_wgrad", "bsr", "cuda", prepare, unsupported)
