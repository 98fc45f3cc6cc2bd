"""6:8 and other slide weights by cuSPARSELt: lift X, then multiply by the lifted 2:4 matrix.

    X [m, k]   ── _common/lift.py ──>   X' [m, k']   ── cuSPARSELt ──>   Y = X' W'.T

SlideSparse does the same (arXiv 2603.05232), and lifts X while it quantises it. Its published
speedups of a product leave the lifting out; here each call includes it. The library's algorithms
are searched as for 2:4 (cusparselt.py).
"""

from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.slide import Slide
from sparsebench.kernels._common.lift import lifting
from sparsebench.kernels._kernel import Kernel, Launch, Operands, sum_scale
from sparsebench.kernels.peers import cusparselt


def prepare(operands: Operands, *, search: bool = True) -> Launch:
    """Choose the fastest way; `search: false` takes the library's default. Raises Unsupported."""
    w = operands.weights["w"]
    assert isinstance(w, Slide)
    return lifted_launch(operands, w, search)


def lifted_launch(operands: Operands, w: Slide, search: bool) -> Launch:
    """Compress W' and choose the fastest way to multiply it by X'.

    Raises Unsupported if X has no whole pairs of elements, or if the library accepts no way.
    """
    x, n = operands.activations["x"], w.shape[0]
    if x.stride(1) != 1 or x.stride(0) % 2 or x.data_ptr() % (2 * x.itemsize):
        raise Unsupported(f"expected contiguous rows of pairs, found strides {list(x.stride())}")
    lift = lifting(x, w)
    lift()
    scale = sum_scale(operands.problem["dtype"], w.shape[1])
    compressed = cusparselt.compressed(w.lifted.to_dense())
    target = cusparselt.Call(compressed, lift.out, n, scale=scale)
    before = operands.pinned, operands.timed
    fastest, choice, candidates = cusparselt.choose(target, n, search, *before)

    def run() -> Tensor:
        lift()
        y = x.new_empty(fastest.rows, n, dtype=target.output)
        fastest.call(y)
        return y[: len(x)]

    return Launch(run, choice, candidates=candidates)


KERNEL = Kernel("linear", "slide", "cuda", prepare, cusparselt.unsupported)
