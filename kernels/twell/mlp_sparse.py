"""Feed-forward layer without a gate, few active units, relu or relu2, on Hopper: a portfolio.

    U = X @ Wu.T           Y = act(U) @ Wd.T

The ways are those of ffn_sparse.py, with U in place of the gate. The dense kernels are cublas and
torch_compile.
"""

from sparsebench.kernels._kernel import Launch, Operands, Portfolio
from sparsebench.kernels.dense import cublas, torch_compile
from sparsebench.kernels.twell._call import unsupported
from sparsebench.kernels.twell.ffn_sparse import Way, fastest_of

DENSE = {"cublas": cublas, "torch_compile": torch_compile}


def prepare(operands: Operands, *, way: Way = "best") -> Launch:
    """Prepare every layer of a way, and keep the fastest. Raises Unsupported."""
    return fastest_of(operands, way, DENSE)


KERNEL = Portfolio("mlp", "cvse", "cuda", prepare, unsupported)
