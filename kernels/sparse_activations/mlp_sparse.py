"""Feed-forward layer without a gate, few units on, relu or relu2, in CUDA C++ for Hopper.

    U = X @ Wu.T           cuBLAS or cuBLASLt, whichever is faster
    Y = act(U) @ Wd.T      ffn_sparse.cu: of units that are on, and no others
    the same, dense        _remainder.py: of groups of tokens with too many of them

All of it as ffn_sparse.py says, with U in the place of the gate, and not packed.
"""

from sparsebench.errors import Unsupported
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense import cublas, torch_compile
from sparsebench.kernels.sparse_activations.ffn_sparse import Way, prepared, unsupported


def prepare(operands: Operands, *, way: Way = "best") -> Launch:
    """Build the layer in every way that is asked for, and keep the fastest. Raises Unsupported."""
    if way == "packed":
        raise Unsupported("option way: a packed product needs a layer with a gate")
    return prepared(operands, "wu", None, way, (cublas, torch_compile))


KERNEL = Kernel(op="mlp", consumes="dense", device="cuda", prepare=prepare, unsupported=unsupported)
