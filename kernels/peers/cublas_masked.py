"""Weight gradient by a dense product on an NVIDIA GPU, of which the stored blocks are gathered.

What masked dense training does: all of dY.T @ X is computed and written, by the faster of cuBLAS
and cuBLASLt (kernels/cublas.py), then read where the pattern has blocks.
"""

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense import cublas


def prepare(operands: Operands) -> Launch:
    """Choose the library; the indices of the gather are made once."""
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

    return Launch(run, product.choice)


KERNEL = Kernel("linear_wgrad", "bsr", "cuda", prepare, cublas.unsupported)
