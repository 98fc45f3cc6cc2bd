"""Feed-forward layer without a gate, few units on, relu or relu2, on Hopper: a portfolio.

    U = X @ Wu.T           Y = act(U) @ Wd.T

The same ways as ffn_sparse.py, with U in the place of the gate: no way is packed, and the dense
kernels are cublas and torch_compile.
"""

from sparsebench.kernels._kernel import Launch, Operands, Portfolio
from sparsebench.kernels.dense import cublas, torch_compile
from sparsebench.kernels.twell._layer import unsupported
from sparsebench.kernels.twell.ffn_sparse import Way, fastest_of

DENSE = {"cublas": cublas, "torch_compile": torch_compile}


def prepare(operands: Operands, *, way: Way = "best") -> Launch:
    """Prepare every layer that is asked for, and keep the fastest. Raises Unsupported."""
    return fastest_of(operands, way, DENSE)


KERNEL = Portfolio("mlp", "cvse", "cuda", prepare, unsupported)
