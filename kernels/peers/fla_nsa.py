"""The selected branch of native sparse attention in flash-linear-attention (fla-core), in Triton.

`parallel_nsa` gets the lists of the mask as block_indices, and no gate: then it computes attention
to these blocks alone. A program has one query of one KV head, so the heads of a group are the rows
of its tile; the library wants at least 16 of them, a power of two. It also computes means of K and
V, which this call does not need: about 1 % of the time. Its own search chooses warps and stages.

`parallel_moba` is not here: it calls the private functions of flash-attn (FlashAttention 2), which
has no wheel on PyPI, and waits for the GPU in each call.
Source: fla/ops/nsa/parallel.py and fla/ops/moba/parallel.py of fla-core 0.6.0.
"""

from importlib import import_module

import torch
from torch import Tensor

from sparsebench.formats._format import sides_of
from sparsebench.formats.block_mask_converters import to_nsa
from sparsebench.kernels._common.requirements import AMPERE, unmet
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense._sdpa import by_token
from sparsebench.kernels.peers._attention import mask_of, require_keys
from sparsebench.results.record import Problem

LEAST_GROUP, MOST_DEPTH = 16, 256


def unsupported(problem: Problem, device: torch.device) -> str | None:
    group, (queries, side) = problem["heads"] // problem["kv_heads"], sides_of(problem["block"])
    if queries != 1 or problem["lists"] != "kv_heads":
        expected = "a list for each query and KV head: block [1, n], lists kv_heads"
        return f"expected {expected}; found {[queries, side]}, {problem['lists']}"
    if group < LEAST_GROUP or group & (group - 1):
        expected = f"a power of two from {LEAST_GROUP}"
        return f"expected heads of a KV head as {expected}, found {group}"
    if side < 16 or side & (side - 1):
        return f"block: expected a power of two from 16, found {side}"
    if not problem["causal"] or problem["context"] not in (None, problem["m"]):
        return "expected a causal mask with as many keys as queries, found another"
    if problem["head_dim"] > MOST_DEPTH:
        return f"head_dim: expected at most {MOST_DEPTH}, found {problem['head_dim']}"
    return unmet(problem, device, AMPERE, "fp16", "bf16", newer=True, package=("fla", "fla-core"))


def prepare(operands: Operands) -> Launch:
    """Convert the lists. Raises Unsupported for a query without a block, where it divides by 0."""
    mask, problem = mask_of(operands), operands.problem
    require_keys(mask)
    attend = import_module("fla.ops.nsa").parallel_nsa
    q, k, v = by_token(operands, "q", "k", "v")
    indices = to_nsa(mask)
    options = {"block_counts": indices.shape[3], "block_size": mask.block[1]}

    def run() -> Tensor:
        with torch.no_grad():
            o = attend(q, k, v, block_indices=indices, scale=problem["scale"], **options)
        rows: Tensor = o.flatten(2).flatten(0, 1)
        return rows

    return Launch(run)


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
