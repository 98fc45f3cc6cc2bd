"""Dense weights by cuSPARSELt, a null contender: nothing is zero, and k is twice as long.

    W   a b c d      W'   a b . . | . . c d      2:4, so that any matrix fits
    X   p q r s      X'   p q r s | p q r s

Sparse tensor cores at twice the rate do the work of the dense product, and W' takes 1.125 times
the bytes of W in 16 bits (1.25 in 8 bits). So this product can at best equal a good dense one. If
it is faster than every dense contender, the dense baseline is slow, and the speedups of sparse
contenders say more about the baseline than about sparsity. Each call also copies X to X'.
"""

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._kernel import Kernel, Launch, Operands, sum_scale
from sparsebench.kernels.peers import cusparselt


def prepare(operands: Operands, *, search: bool = True) -> Launch:
    """Choose the fastest way; `search: false` takes the library's default.

    Raises Unsupported if X is not contiguous, or if the library accepts no way.
    """
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    if not x.is_contiguous() or x.data_ptr() % 8:
        raise Unsupported(f"expected contiguous X at 8 bytes, found strides {list(x.stride())}")
    (m, k), n = x.shape, len(w)
    twice = x.new_empty(m, 2 * k)
    words, halves = x.view(torch.int64)[:, None], twice.view(torch.int64).unflatten(1, (2, -1))
    halves.copy_(words)
    target = cusparselt.Call(
        cusparselt.compressed(spread(w)), twice, n, scale=sum_scale(operands.problem["dtype"], k)
    )
    before = operands.pinned, operands.timed
    fastest, choice, candidates = cusparselt.choose(target, n, search, *before)

    def run() -> Tensor:
        halves.copy_(words)
        y = x.new_empty(fastest.rows, n, dtype=target.output)
        fastest.call(y)
        return y[:m]

    return Launch(run, choice, candidates=candidates)


def spread(w: Tensor) -> Tensor:
    """Return W' [n, 2 k]: the first two elements of each four, and then the last two."""
    bits = w.view(torch.int8).unflatten(1, (-1, 2, 2 * w.itemsize))
    first, last = bits.clone(), bits.clone()
    first[:, :, 1], last[:, :, 0] = 0, 0
    return torch.cat([first.flatten(1), last.flatten(1)], 1).view(w.dtype)


KERNEL = Kernel("linear", "dense", "cuda", prepare, cusparselt.unsupported)
