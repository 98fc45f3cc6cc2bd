"""Feed-forward layer without a gate, few units on, relu or relu2, in CUDA C++ for Hopper.

    U = X @ Wu.T           cuBLAS or cuBLASLt, whichever is faster
    Y = act(U) @ Wd.T      ffn_sparse.cu: of units that are on, and no others
    the same, dense        _ffn_rest.py: of groups of tokens with too many of them

All of it as ffn_sparse.py says, with U in the place of the gate.
"""

from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.ffn_sparse import prepared, supports


def prepare(operands: Operands, *, fallback: bool = True) -> Launch:
    """Choose the library of U; without the `fallback` all groups are multiplied as sparse."""
    return prepared(operands, "wu", None, fallback)


KERNEL = Kernel(op="mlp", consumes="dense", device="cuda", prepare=prepare, supports=supports)
