"""The gated layer of a mixture by batched products, as transformers computes a decoding step.

    copy X and [Wg; Wu] of each choice ─> G | U ─> act(G) * U ─> copy Wd of each choice ─> H @ Wd.T
             ─> shares ─> sum over top_k

The steps are those of `batched_mm` experts of transformers 5 (integrations/moe.py). Nothing is
sorted, so it takes few launches; experts_batched.py says what the copies cost.
"""

from functools import partial

import torch
from torch import Tensor

from sparsebench.kernels._common.gated_layer import dense_experts
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense import experts_batched
from sparsebench.kernels.dense.cublas import ACTIVATIONS


def prepare(operands: Operands) -> Launch:
    """Return the launch. Gate and up of an expert are one matrix, as models have them."""
    x, shares, ids = (operands.activations[name] for name in ("x", "shares", "ids"))
    (both, down), act = dense_experts(operands), ACTIVATIONS[operands.problem["activation"]]

    def run() -> Tensor:
        experts = ids.view(-1)
        rows = x.repeat_interleave(ids.shape[1], 0)
        gate, up = torch.bmm(both[experts], rows[:, :, None])[:, :, 0].chunk(2, -1)
        y = torch.bmm(down[experts], (act(gate) * up)[:, :, None])[:, :, 0]
        return (y * shares.view(-1, 1)).view(*ids.shape, -1).sum(1)

    return Launch(run)


KERNEL = Kernel(
    "experts_ffn", "dense", "any", prepare, partial(experts_batched.unsupported, matrices=3)
)
