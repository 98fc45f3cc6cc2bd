"""CSR on the CPU by scipy.sparse: one thread, fp32, one axpy of m elements for each non-zero.

scipy multiplies a sparse matrix by a row-major dense one: each non-zero (block) of W scales rows of
X.T of m contiguous elements. For X @ W.T scipy transposes first and runs the same loop. X is
token-major, so the launch transposes X before the product and Y after it; both are timed.
Source: scipy/sparse/sparsetools/csr.h, csr_matvecs.
"""

from typing import Any

import numpy as np
import torch
from scipy import sparse

from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.transposed import dgrad_of
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem


def prepare(operands: Operands) -> Launch:
    w = operands.weights["w"]
    assert isinstance(w, Csr)
    arrays = w.values.numpy(), w.columns.numpy(), w.offsets.numpy()
    return launch(sparse.csr_array(arrays, shape=w.shape), operands)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why scipy.sparse cannot run the dtype, or None; tf32 problems run in full fp32."""
    dtype = problem["dtype"]
    exact = dtype in ("fp32", "tf32")
    return None if exact else f"scipy.sparse expected fp32 or fp64, found {dtype}"


def launch(w: Any, operands: Operands) -> Launch:
    """Multiply by W, a scipy.sparse array of at least n rows and k columns."""
    x = operands.activations["x"].numpy()  # shares the memory, so rewritten activations are read
    m, k = x.shape
    n = operands.weights["w"].shape[0]
    x_transposed = np.zeros((w.shape[1], m), dtype=x.dtype)

    def run() -> torch.Tensor:
        x_transposed[:k] = x.T
        y_transposed = w @ x_transposed
        return torch.from_numpy(np.ascontiguousarray(y_transposed[:n].T))

    return Launch(run)


KERNEL = Kernel("linear", "csr", "cpu", prepare, unsupported)

DGRAD = dgrad_of(KERNEL)
"""Input gradient from CSR on the CPU by scipy.sparse."""
