"""PyTorch: scaled_dot_product_attention with the mask expanded to a bool for each element.

This is what torch offers without a sparse kernel: it computes every element and discards those that
the mask forbids. `prepare` expands the mask, which limits the size of the problem.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from sparsebench.formats.block_mask import MOST_ELEMENTS, BlockMask
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem


def prepare(operands: Operands) -> Launch:
    """Expand the mask once; the launch is one call of torch, and a copy to token-major order."""
    problem, mask = operands.problem, operands.weights["mask"]
    assert isinstance(mask, BlockMask)
    heads, batch = problem["heads"], problem["batch"]
    allowed = mask.expand(heads)
    q, k, v = (
        operands.activations[name].view(batch, -1, count, problem["head_dim"]).transpose(1, 2)
        for name, count in (("q", heads), ("k", problem["kv_heads"]), ("v", problem["kv_heads"]))
    )
    grouped = problem["heads"] != problem["kv_heads"]

    def run() -> torch.Tensor:
        o = scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, scale=problem["scale"], enable_gqa=grouped
        )
        return o.transpose(1, 2).reshape(batch * problem["m"], -1)

    return Launch(run)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return a reason if the expanded mask would be too large."""
    keys = problem["context"] or problem["m"]
    size = problem["batch"] * problem["heads"] * problem["m"] * keys
    if size > MOST_ELEMENTS:
        return f"expected at most {MOST_ELEMENTS} elements of the expanded mask, found {size}"
    return None


KERNEL = Kernel("attention", "block_mask", "any", prepare, unsupported)
