"""PyTorch: scaled_dot_product_attention with the mask expanded to a bool for each element.

This is what torch offers without a sparse kernel: it computes every element and discards those that
the mask forbids. `prepare` expands the mask, which limits the size of the problem.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from sparsebench.formats.block_mask import MOST_ELEMENTS
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense._sdpa import by_head
from sparsebench.kernels.peers._attention import mask_of
from sparsebench.results.record import Problem


def prepare(operands: Operands) -> Launch:
    """Expand the mask once; the launch is one call of torch, and a copy to token-major order."""
    problem, (q, k, v) = operands.problem, by_head(operands, "q", "k", "v")
    allowed = mask_of(operands).expand(problem["heads"])
    tokens, grouped = problem["batch"] * problem["m"], problem["heads"] != problem["kv_heads"]

    def run() -> torch.Tensor:
        o = scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, scale=problem["scale"], enable_gqa=grouped
        )
        return o.transpose(1, 2).reshape(tokens, -1)

    return Launch(run)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    keys = problem["context"] or problem["m"]
    size = problem["batch"] * problem["heads"] * problem["m"] * keys
    if size > MOST_ELEMENTS:
        return f"expected at most {MOST_ELEMENTS} elements of the expanded mask, found {size}"
    return None


KERNEL = Kernel("attention", "block_mask", "any", prepare, unsupported)
