"""The gated layer of a mixture with dense experts, as transformers computes it on a GPU.

    sort ids ─> gather rows of X ─> grouped product with gate and up ─> act(G) * U
             ─> grouped product with down ─> shares ─> back in order ─> sum over top_k

The steps are those of `grouped_mm` experts of transformers 5 (integrations/moe.py), with torch's
grouped product (experts_grouped.py).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sparsebench.kernels._common.gated_layer import dense_experts
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense.cublas import ACTIVATIONS
from sparsebench.kernels.dense.experts_grouped import unsupported


def prepare(operands: Operands) -> Launch:
    """Return the launch."""
    x, shares, ids = (operands.activations[name] for name in ("x", "shares", "ids"))
    return Launch(partial(layer_of(operands), x, ids, shares))


def layer_of(operands: Operands) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the layer of X, ids and shares, with weights of its own."""
    both, wd = dense_experts(operands)
    both, down, count = both.transpose(1, 2), wd.clone().transpose(1, 2), len(both)
    act = ACTIVATIONS[operands.problem["activation"]]

    def run(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        m, top_k = ids.shape
        order = torch.argsort(ids.view(-1))
        counts = torch.histc(ids.view(-1).int(), bins=count, min=0, max=count - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = torch._grouped_mm(x[order // top_k], both, offs=ends).chunk(2, -1)
        rows = torch._grouped_mm(act(gate) * up, down, offs=ends)
        rows = rows * shares.view(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return rows[back].view(m, top_k, -1).sum(1)

    return run


KERNEL = Kernel("experts_ffn", "dense", "cuda", prepare, unsupported)
