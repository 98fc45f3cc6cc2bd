"""Dense weights by cuSPARSELt, a null contender: nothing is zero, and k is twice as long.

    W   a b c d      W'   a b . . . . c d      2:4, so that any matrix fits (formats/slide.py)
    X   p q r s      X'   p q r s p q r s

Sparse tensor cores at twice the rate do the work of the dense product, and W' takes 1.125 times
the bytes of W in 16 bits (1.25 in 8 bits). So this product can at best equal a good dense one. If
it is faster than every dense contender, the dense baseline is slow, and the speedups of sparse
contenders say more about the baseline than about sparsity.
"""

from sparsebench.formats.slide import DENSE, Slide
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import cusparselt
from sparsebench.kernels.peers.cusparselt_slide import lifted_launch


def prepare(operands: Operands, *, search: bool = True) -> Launch:
    """Choose the fastest way; `search: false` takes the library's default. Raises Unsupported."""
    kept, group = DENSE
    w = Slide.from_dense(operands.weights["w"].to_dense(), kept=kept, group=group)
    return lifted_launch(operands, w, search)


KERNEL = Kernel("linear", "dense", "cuda", prepare, cusparselt.unsupported)
