"""Video sparse attention of FastVideo: a ThunderKittens kernel for Hopper, with blocks of 64.

Larger blocks are cut into blocks of 64, which hold the same mask. The kernel reads [1, heads,
tokens, D] and its scale is D ** -0.5; copies from token-major q, k and v are timed with it. It
loads a first block of every list, so an empty list would attend to block 0. Without its compiled
extension the package runs Triton, so this peer requires the extension.
Source: csrc/attention/block_sparse_h100.cu of fastvideo-kernel 0.3.1, hao-ai-lab/FastVideo.
"""

from importlib import import_module

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.requirements import HOPPER, unmet
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense._sdpa import by_head
from sparsebench.kernels.peers._attention import lists_in, mask_of, require_keys, unsupported_blocks
from sparsebench.results.record import Problem

SIDE = 64


def unsupported(problem: Problem, device: torch.device) -> str | None:
    d = problem["head_dim"]
    if d not in (64, 128):
        return f"head_dim: expected 64 or 128, found {d}"
    if problem["batch"] != 1:
        return f"expected one sequence, found {problem['batch']}"
    if problem["scale"] not in (None, d**-0.5):
        return f"scale: expected head_dim ** -0.5, found {problem['scale']}"
    package = "fastvideo_kernel", "fastvideo-kernel"
    reason = unmet(problem, device, HOPPER, "bf16", package=package)
    return reason or unsupported_blocks(problem, SIDE)


def prepare(operands: Operands) -> Launch:
    """Cut the lists. Raises Unsupported without the compiled extension, or for an empty list."""
    require_keys(mask_of(operands))
    try:
        compiled = import_module("fastvideo_kernel._C.fastvideo_kernel_ops")
    except ImportError as error:
        raise Unsupported(f"fastvideo_kernel has no extension for this torch: {error}") from error
    attend = compiled.block_sparse_fwd
    problem, (q, k, v) = operands.problem, by_head(operands, "q", "k", "v")
    counts, index = lists_in(mask_of(operands), problem["heads"], SIDE)
    sizes = torch.full((k.shape[2] // SIDE,), SIDE, dtype=torch.int32, device=q.device)

    def run() -> Tensor:
        o: Tensor = attend(*(x.contiguous() for x in (q, k, v)), index, counts, sizes)[0]
        return o[0].transpose(0, 1).reshape(problem["m"], -1)

    return Launch(run)


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
