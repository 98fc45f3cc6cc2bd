"""Weight gradient in BSR on the CPU by torch: one GEMM for each block row.

    values of block row i  =  dY[:, rows of block row i].T @ X[:, columns of its blocks]

The launch gathers the columns of X. Works for any block and dtype; torch's GEMM accumulates.
"""

from dataclasses import replace
from itertools import pairwise

from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands


def prepare(operands: Operands) -> Launch:
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern
    assert isinstance(w, Bsr)
    r, c = w.block
    starts, columns = w.offsets.tolist(), w.columns.long()

    def run() -> Bsr:
        outputs, inputs = _in_blocks(dy, r), _in_blocks(x, c)
        values = x.new_empty(len(columns), r, c)
        for row, (start, end) in enumerate(pairwise(starts)):
            if start < end:
                gathered = inputs[:, columns[start:end]].flatten(1)
                panel = outputs[:, row].t() @ gathered
                values[start:end] = panel.view(r, end - start, c).transpose(0, 1)
        return replace(w, values=values)

    return Launch(run)


def _in_blocks(tokens: Tensor, size: int) -> Tensor:
    """Return [m, features] as [m, blocks, size], padded with zeros to whole blocks."""
    beyond = -tokens.shape[1] % size
    whole = pad(tokens, (0, beyond)) if beyond else tokens
    return whole.view(len(tokens), -1, size)


KERNEL = Kernel("linear_wgrad", "bsr", "cpu", prepare)
