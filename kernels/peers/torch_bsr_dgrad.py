"""Input gradient by PyTorch's own BSR product: torch_bsr on W.T, as shipped or tuned.

torch has no backward for BSR on a GPU. A user must pack W.T, as `prepare` does here.
"""

from sparsebench.kernels._common.transposed import as_linear
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import torch_bsr


def prepare(operands: Operands, *, tuned: bool = False) -> Launch:
    """Multiply by W.T as torch_bsr does by W."""
    return torch_bsr.prepare(as_linear(operands), tuned=tuned)


KERNEL = Kernel("linear_dgrad", "bsr", "cuda", prepare, torch_bsr.unsupported)
