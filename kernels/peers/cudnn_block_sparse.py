"""Block-sparse attention of NVIDIA's cudnn-frontend, whose kernels are made by the CuTe DSL.

Its kernels for Hopper have blocks of 64, so larger blocks are cut into blocks of 64, which hold the
same mask. They support no causal mask. The backward pass supports only bf16, D = 128 and as many
key heads as heads.
Source: python/cudnn/block_sparse_attention/api.py of NVIDIA/cudnn-frontend.
"""

from importlib import import_module

import torch
from torch import Tensor

from sparsebench.kernels._common.requirements import HOPPER, unmet
from sparsebench.kernels._common.search import fastest_choice
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense._sdpa import by_token
from sparsebench.kernels.peers._attention import lists_in, mask_of, unsupported_blocks
from sparsebench.results.record import Problem

SIDE = 64
SPLITS = 1, 2, 4, 8  # parts of a list, for K and V that exceed the L2 cache


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if problem["head_dim"] not in (64, 96, 128):
        return f"head_dim: expected 64, 96 or 128, found {problem['head_dim']}"
    package = "cudnn", "nvidia-cudnn-frontend"
    reason = unmet(problem, device, HOPPER, "fp16", "bf16", package=package)
    return reason or unsupported_blocks(problem, SIDE)


def unsupported_backward(problem: Problem, device: torch.device) -> str | None:
    alike = problem["heads"] == problem["kv_heads"]
    if problem["dtype"] != "bf16" or problem["head_dim"] != 128 or not alike:
        expected = "bf16, head_dim 128 and as many key heads as heads"
        fields = "dtype", "head_dim", "kv_heads", "heads"
        return f"expected {expected}, found {', '.join(f'{f} {problem[f]}' for f in fields)}"
    return unsupported(problem, device)


def prepare(operands: Operands) -> Launch:
    """Cut the lists; time several numbers of splits, and keep the fastest."""
    attend = import_module("cudnn").block_sparse_attention_forward
    (q, k, v), problem = by_token(operands, "q", "k", "v"), operands.problem
    counts, index = lists_in(mask_of(operands), problem["heads"], SIDE)

    def run(kv_splits: int) -> Tensor:
        results = attend(
            *(q, k, v, index),
            q2k_block_nums=counts,
            sparse_block_size=SIDE,
            allow_empty_block_nums=True,
            softmax_scale=problem["scale"],
            layout="bshd",
            kv_splits=kv_splits,
        )
        o: Tensor = results["o_tensor"]
        return o.reshape(q.shape[0] * q.shape[1], -1)

    return fastest_choice(run, [{"kv_splits": splits} for splits in SPLITS], operands)


def prepare_backward(operands: Operands) -> Launch:
    """Cut the lists; the gradients are written where the output has them."""
    differentiate = import_module("cudnn").block_sparse_attention_backward
    q, k, v, o, do = by_token(operands, "q", "k", "v", "o", "do")
    problem = operands.problem
    counts, index = lists_in(mask_of(operands), problem["heads"], SIDE)
    lse = operands.activations["lse"].view(q.shape[0], problem["heads"], -1)
    rows = [x.numel() // problem["head_dim"] for x in (q, k, v)]
    out = q.new_empty(sum(rows), problem["head_dim"])
    dq, dk, dv = (part.view(x.shape) for part, x in zip(out.split(rows), (q, k, v), strict=True))

    def run() -> Tensor:
        differentiate(
            *(do, q, k, v, o, lse, index),
            q2k_block_nums=counts,
            softmax_scale=problem["scale"],
            dq_tensor=dq,
            dk_tensor=dk,
            dv_tensor=dv,
            sparse_block_size=SIDE,
            layout="bshd",
        )
        return out

    return Launch(run)


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
BACKWARD = Kernel(
    "attention_backward", "block_mask", "cuda", prepare_backward, unsupported_backward
)
