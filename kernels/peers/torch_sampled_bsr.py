"""Weight gradient in BSR by torch's own Triton kernel, torch.sparse._triton_ops.sampled_addmm.

One program a block row, over its blocks one after the other, one stage and four warps: torch has no
table and no parameters to tune. Blocks are powers of two of at least 16 that divide n and k; fp32
runs without tensor cores. dY.T and X are read as they lie.
Source: torch/sparse/_triton_ops.py, _sampled_addmm_kernel.
"""

import warnings
from dataclasses import replace

import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import torch_bsr


def prepare(operands: Operands) -> Launch:
    """Hand torch the pattern's arrays and values of its own, which every launch overwrites."""
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern
    assert isinstance(w, Bsr)
    if reason := torch_bsr.unsupported_blocks(w):
        raise Unsupported(reason)
    from torch.sparse._triton_ops import sampled_addmm

    gradient = replace(w, values=torch.zeros_like(w.values))
    arrays = gradient.offsets, gradient.columns, gradient.values

    def run() -> Bsr:
        # Into itself: torch copies its input to any other `out` first.
        sampled_addmm(bsr, dy.t(), x, beta=0.0, alpha=1.0, out=bsr, skip_checks=True)
        return gradient

    with warnings.catch_warnings():
        # Once a process that BSR is beta, and that torch's own code leaves invariants unchecked.
        warnings.filterwarnings("ignore", message="Sparse BSR tensor support is in beta")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly")
        bsr = torch.sparse_bsr_tensor(*arrays, size=w.shape, check_invariants=False)
        run()
    return Launch(run)


KERNEL = Kernel("linear_wgrad", "bsr", "cuda", prepare, torch_bsr.unsupported)
