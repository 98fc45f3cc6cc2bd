"""Weight gradient in BSR by torch's own Triton kernel, torch.sparse._triton_ops.sampled_addmm.

One program computes a block row, block by block, with one stage and four warps. torch has no table
and no parameters to tune. dY.T is a view of dY, or the launch copies it to rows, whichever is
faster. Block sides must be powers of two of at least 16 that divide n and k. fp32 runs without
tensor cores.
Source: torch/sparse/_triton_ops.py, _sampled_addmm_kernel.
"""

import warnings
from dataclasses import replace

import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.search import fastest_choice
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import torch_bsr


def prepare(operands: Operands) -> Launch:
    """Pass the pattern's arrays to torch, with values that every launch overwrites.

    Raises Unsupported.
    """
    dy, x, w = operands.activations["dy"], operands.activations["x"], operands.pattern
    assert isinstance(w, Bsr)
    if reason := torch_bsr.unsupported_blocks(w):
        raise Unsupported(reason)
    from torch.sparse._triton_ops import sampled_addmm

    gradient = replace(w, values=torch.zeros_like(w.values))
    arrays = gradient.offsets, gradient.columns, gradient.values

    def run(dy_copied: bool) -> Bsr:
        left = dy.t().contiguous() if dy_copied else dy.t()
        # `out` is the input, because torch would first copy the input to any other `out`.
        sampled_addmm(bsr, left, x, beta=0.0, alpha=1.0, out=bsr, skip_checks=True)
        return gradient

    with warnings.catch_warnings():
        # torch warns once that BSR is beta, and that its code does not check invariants.
        warnings.filterwarnings("ignore", message="Sparse BSR tensor support is in beta")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly")
        bsr = torch.sparse_bsr_tensor(*arrays, size=w.shape, check_invariants=False)
        run(dy_copied=False)
    return fastest_choice(run, [{"dy_copied": copied} for copied in (False, True)], operands)


KERNEL = Kernel("linear_wgrad", "bsr", "cuda", prepare, torch_bsr.unsupported)
