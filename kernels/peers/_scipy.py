"""Shared by the scipy peers: Y[m, n] = (W @ X.T).T by one thread of scipy.sparse on the CPU.

scipy multiplies a sparse matrix by a row-major dense one: each non-zero (block) of W scales rows of
X.T of m contiguous elements. For X @ W.T scipy transposes first and runs the same loop. X is
token-major, so the launch transposes X before the product and Y after it; both are timed. A block
format may need padding with rows of zeros below X.T.
"""

from typing import Any

import numpy as np
import torch

from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.results.record import Problem


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
