"""6:8 and other slide weights by cuSPARSELt: lift X, then multiply by the lifted 2:4 matrix.

    X [m, k]   ── _common/lift.py ──>   X' [m, k']   ── cuSPARSELt ──>   Y = X' W'.T

So does SlideSparse (arXiv 2603.05232), whose kernel lifts X while it quantises it. Its published
speedups of a product leave this launch out; here each call includes it. The library is called, and
its algorithms are searched, as for 2:4 (cusparselt.py).
"""

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.slide import Slide
from sparsebench.kernels._common.lift import lifting
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import cusparselt


def prepare(operands: Operands, *, search: bool = True) -> Launch:
    """Compress W' and choose the fastest way; `search: false` takes the default.

    Raises Unsupported if X is not aligned, or if the library accepts no way.
    """
    w, x = operands.weights["w"], operands.activations["x"]
    assert isinstance(w, Slide)
    if x.stride(1) != 1 or x.stride(0) % 2 or x.data_ptr() % (2 * x.itemsize):
        raise Unsupported(f"expected rows of pairs of elements, found strides {x.stride()}")
    lift, n = lifting(x, w), w.shape[0]
    lift()
    target = cusparselt.Call(cusparselt.compressed(w.lifted.to_dense()), lift.out, n)
    fastest, choice, candidates = cusparselt.chosen(
        target, n, search, operands.pinned, operands.timed
    )

    def run() -> Tensor:
        lift()
        y = torch.empty(fastest.rows, n, dtype=target.output, device=x.device)
        fastest.call(y)
        return y[: len(x)]

    return Launch(run, choice, candidates=candidates)


KERNEL = Kernel("linear", "slide", "cuda", prepare, cusparselt.unsupported)
