"""Block-sparse attention of NVIDIA's cudnn-frontend, whose kernels are made by the CuTe DSL.

Its kernels for Hopper have blocks of 64 and of 128. Other blocks are cut into those, which hold the
same mask; if both sides fit, both are timed. They support no causal mask. The backward pass
supports only bf16, D = 128 and as many key heads as heads.

A fixed count of blocks is a constant of the kernel of 128. For the kernel of 64 it would fill a
tensor in every call, so that one gets the counts. Splitting the lists pays if the keys and values
of a head exceed the L2 cache (its authors: 20 % at 64 MB), and so is tried from a third of it on.
Source: python/cudnn/block_sparse_attention/_interface.py of cudnn-frontend 1.32.0.
"""

from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.requirements import HOPPER, unmet
from sparsebench.kernels._common.search import fastest_choice
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense._sdpa import by_token
from sparsebench.kernels.peers._attention import lists_in, mask_of, unsupported_blocks
from sparsebench.results.record import Problem

SIDES = 128, 64
SPLITS = 1, 2, 4, 8  # parts of a list
LARGE = 16 * 1024 * 1024  # bytes of K and V of a head
Lists = dict[str, Any]


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if problem["head_dim"] not in (64, 96, 128):
        return f"head_dim: expected 64, 96 or 128, found {problem['head_dim']}"
    package = "cudnn", "nvidia-cudnn-frontend"
    reason = unmet(problem, device, HOPPER, "fp16", "bf16", package=package)
    return reason or unsupported_blocks(problem, min(SIDES))


def unsupported_backward(problem: Problem, device: torch.device) -> str | None:
    alike = problem["heads"] == problem["kv_heads"]
    if problem["dtype"] != "bf16" or problem["head_dim"] != 128 or not alike:
        expected = "bf16, head_dim 128 and as many key heads as heads"
        fields = "dtype", "head_dim", "kv_heads", "heads"
        return f"expected {expected}, found {', '.join(f'{f} {problem[f]}' for f in fields)}"
    return unsupported(problem, device)


def prepare(operands: Operands, *, kv_splits: int | None = None) -> Launch:
    """Cut the lists; time both sides of blocks and the splits, or `kv_splits` alone.

    The fastest is kept.
    """
    attend = function("block_sparse_attention_forward")
    (q, k, v), problem = by_token(operands, "q", "k", "v"), operands.problem
    lists = lists_by_side(operands)

    def run(side: int, kv_splits: int) -> Tensor:
        options = {"softmax_scale": problem["scale"], "layout": "bshd", "kv_splits": kv_splits}
        o: Tensor = attend(q, k, v, **lists[side], **options)["o_tensor"]
        return o.reshape(q.shape[0] * q.shape[1], -1)

    large = 2 * k[0, :, 0].nbytes >= LARGE
    splits = [kv_splits] if kv_splits else SPLITS if large else SPLITS[:1]
    ways = product(lists, splits)
    return fastest_choice(run, [{"side": s, "kv_splits": n} for s, n in ways], operands)


def prepare_backward(operands: Operands) -> Launch:
    """Cut the lists; the gradients are written where the output has them. Both sides are timed."""
    differentiate = function("block_sparse_attention_backward")
    q, k, v, o, do = by_token(operands, "q", "k", "v", "o", "do")
    problem = operands.problem
    lists = lists_by_side(operands)
    for of_side in lists.values():
        of_side.pop("allow_empty_block_nums")
    lse = operands.activations["lse"].view(q.shape[0], problem["heads"], -1)
    rows = [x.numel() // problem["head_dim"] for x in (q, k, v)]
    out = q.new_empty(sum(rows), problem["head_dim"])
    dq, dk, dv = (part.view(x.shape) for part, x in zip(out.split(rows), (q, k, v), strict=True))

    def run(side: int) -> Tensor:
        options = {"softmax_scale": problem["scale"], "layout": "bshd"}
        gradients = {"dq_tensor": dq, "dk_tensor": dk, "dv_tensor": dv}
        differentiate(do, q, k, v, o, lse, **lists[side], **gradients, **options)
        return out

    return fastest_choice(run, [{"side": side} for side in lists], operands)


def function(name: str) -> Any:
    """Return a function of cudnn. Raises Unsupported if the DSL of its kernels is not installed."""
    try:
        return getattr(import_module("cudnn"), name)
    except ImportError as error:  # cudnn imports the DSL when the function is looked up
        raise Unsupported(str(error)) from error


def lists_by_side(operands: Operands) -> dict[int, Lists]:
    """Return the arguments for the lists, by the side of the kernel's blocks."""
    problem, by_side = operands.problem, {}
    for side in SIDES:
        if unsupported_blocks(problem, side) is None:
            counts, index = lists_in(mask_of(operands), problem["heads"], side)
            fewest, most = int(counts.min()), int(counts.max())
            fixed = side == max(SIDES) and fewest == most > 0
            by_side[side] = {
                "q2k_block_index": index,
                "q2k_block_nums": None if fixed else counts,
                "sparse_block_size": side,
                "allow_empty_block_nums": fewest == 0,
            }
    return by_side


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
BACKWARD = Kernel(
    "attention_backward", "block_mask", "cuda", prepare_backward, unsupported_backward
)
