"""Weight gradient in CSR by torch.sparse.sampled_addmm: cuSPARSE's SDDMM, or its own loop on a CPU.

Only fp32, because torch has it for fp32, fp64 and complex types. On a GPU each call also queries
the size of the workspace and runs the preprocessing of SDDMM. The launch first sets its output to
zero, because torch multiplies the old output by beta = 0, at least on the CPU, and NaN would stay.
Source: ATen/native/sparse/cuda/SparseBlasImpl.cpp; ATen/native/cpu/SampledAddmmKernel.cpp.
"""

import warnings
from dataclasses import replace

import torch

from sparsebench.formats.csr import Csr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why torch cannot run the dtype, or None; tf32 problems run in full fp32."""
    dtype = problem["dtype"]
    exact = dtype in ("fp32", "tf32")
    return None if exact else f"torch.sparse.sampled_addmm expected fp32, found {dtype}"


def prepare(operands: Operands) -> Launch:
    """Pass the pattern's arrays to torch, with values that every launch overwrites."""
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern
    assert isinstance(w, Csr)
    gradient = replace(w, values=torch.zeros_like(w.values))
    arrays = gradient.offsets, gradient.columns, gradient.values
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
        csr = torch.sparse_csr_tensor(*arrays, size=w.shape, check_invariants=False)

    def run() -> Csr:
        gradient.values.zero_()
        torch.sparse.sampled_addmm(csr, dy.t(), x, beta=0.0, out=csr)
        return gradient

    return Launch(run)


KERNEL = Kernel("linear_wgrad", "csr", "any", prepare, unsupported)
