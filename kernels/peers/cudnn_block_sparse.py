"""Block-sparse attention of NVIDIA's cudnn-frontend, whose kernels are made by the CuTe DSL.

Its kernels for Hopper have blocks of 64 and of 128. Other blocks are cut into those, which hold the
same mask: for O into 64, for the gradients into 128 if they fit, because those were always faster
(NOTES.md). They support no causal mask. The backward pass supports only bf16, D = 128 and as many
key heads as heads.

A fixed count of blocks is a constant of the kernel of 128. For the kernel of 64 it would fill a
tensor in every call, so that one gets the counts. Splitting the lists pays if the keys and values
of a head exceed the L2 cache (its authors: 20 % at 64 MB), and so is tried from a third of it on.
Counts and lists are read on the device, so a mask that changes in every call needs no plan: this
time is what its users pay, if they select a list for each head in blocks of this size.
Source: python/cudnn/block_sparse_attention/_interface.py of cudnn-frontend 1.32.0.
"""

from importlib import import_module
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
    """Cut the lists; time the splits, or `kv_splits` alone, and keep the fastest."""
    attend = function("block_sparse_attention_forward")
    (q, k, v), problem = by_token(operands, "q", "k", "v"), operands.problem
    side = min(SIDES)
    options = {"softmax_scale": problem["scale"], "layout": "bshd", **lists_of(operands, side)}
    options["allow_empty_block_nums"] = not options["q2k_block_nums"].all()

    def run(kv_splits: int) -> Tensor:
        o: Tensor = attend(q, k, v, **options, kv_splits=kv_splits)["o_tensor"]
        return o.reshape(q.shape[0] * q.shape[1], -1)

    large = 2 * k[0, :, 0].nbytes >= LARGE
    splits = [kv_splits] if kv_splits else SPLITS if large else SPLITS[:1]
    return fastest_choice(run, [{"kv_splits": n} for n in splits], operands, side=side)


def prepare_backward(operands: Operands) -> Launch:
    """Cut the lists; the gradients are written where the output has them."""
    differentiate = function("block_sparse_attention_backward")
    q, k, v, o, do = by_token(operands, "q", "k", "v", "o", "do")
    problem = operands.problem
    side = next(side for side in SIDES if unsupported_blocks(problem, side) is None)
    options = {"softmax_scale": problem["scale"], "layout": "bshd", **lists_of(operands, side)}
    lse = operands.activations["lse"].view(q.shape[0], problem["heads"], -1)
    rows = [x.numel() // problem["head_dim"] for x in (q, k, v)]
    out = q.new_empty(sum(rows), problem["head_dim"])
    dq, dk, dv = (part.view(x.shape) for part, x in zip(out.split(rows), (q, k, v), strict=True))

    def run() -> Tensor:
        gradients = {"dq_tensor": dq, "dk_tensor": dk, "dv_tensor": dv}
        differentiate(do, q, k, v, o, lse, **gradients, **options)
        return out

    return Launch(run, {"side": side})


def function(name: str) -> Any:
    """Return a function of cudnn. Raises Unsupported if the DSL of its kernels is not installed."""
    try:
        return getattr(import_module("cudnn"), name)
    except ImportError as error:  # cudnn imports the DSL when the function is looked up
        raise Unsupported(str(error)) from error


def lists_of(operands: Operands, side: int) -> dict[str, Any]:
    """Return the arguments for the lists, in blocks of `side`."""
    counts, index = lists_in(mask_of(operands), operands.problem["heads"], side)
    fixed = side == max(SIDES) and bool(counts.min() == counts.max() > 0)
    numbers = None if fixed else counts
    return {"q2k_block_index": index, "q2k_block_nums": numbers, "sparse_block_size": side}


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
BACKWARD = Kernel(
    "attention_backward", "block_mask", "cuda", prepare_backward, unsupported_backward
)
