"""Weight gradient in BSR by a dense GEMM on an NVIDIA GPU: dW = dY.T @ X, then gather its blocks.

Training with masked dense weights works like this: the fastest call of dense/cublas.py computes all
of dW, and a second kernel gathers the blocks of the pattern.
"""

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense import cublas


def prepare(operands: Operands) -> Launch:
    """Choose the dense product, and compute the indices of the gather once."""
    w = operands.pattern
    assert isinstance(w, Bsr)
    (n, k), (r, c) = w.shape, w.block
    edges = 0, -k % c, 0, -n % r
    rows, columns = rows_of(w.offsets), w.columns.long()
    product = cublas.prepare(operands)

    def run() -> Bsr:
        dense = product()
        assert isinstance(dense, Tensor)
        padded = pad(dense, edges) if any(edges) else dense
        blocks = padded.view(-1, r, padded.shape[1] // c, c)
        return replace(w, values=blocks[rows, :, columns].contiguous())

    return Launch(run, product.choice, candidates=product.candidates)


KERNEL = Kernel("linear_wgrad", "bsr", "cuda", prepare, cublas.unsupported)
