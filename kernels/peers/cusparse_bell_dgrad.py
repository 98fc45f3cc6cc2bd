"""Input gradient from Blocked-ELL by cuSPARSE: cusparse_bell on W.T, packed in `prepare`."""

from sparsebench.kernels._common.transposed import as_linear
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import cusparse_bell


def prepare(operands: Operands) -> Launch:
    """Multiply by W.T as cusparse_bell does by W: padded to the longest block column of W."""
    return cusparse_bell.prepare(as_linear(operands))


KERNEL = Kernel("linear_dgrad", "bsr", "cuda", prepare, cusparse_bell.unsupported)
