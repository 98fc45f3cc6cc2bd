"""A training step of the whole model, with dense MLPs (plain or compiled) or SparseGatedMLP.

    loss = mean over tokens of -ln p(next)   [+ l1 * mean over layers of L1, sparse MLPs only]
    fp32 weights, bf16 products on a GPU; fused AdamW; no recomputation; launched from Python

The learning rate RATE is so small that the weights and the active units do not change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear

from sparsebench.harness.models.train_lm.model import attention, normalized
from sparsebench.harness.models.train_lm.training import products
from sparsebench.harness.models.whole.model import Shape, Weights, mlp
from sparsebench.kernels.nn.sparse_gated_mlp import SparseGatedMLP

RATE, L1 = 1e-9, 2e-5
Mlp = Literal["plain", "compiled", "SparseGatedMLP"]
MLPS: tuple[Mlp, ...] = "plain", "SparseGatedMLP", "compiled"


@dataclass(frozen=True)
class Step:
    """A training step: `run` returns the loss and leaves gradients in the parameters.

    first_layer  two weights of the first layer, whose gradients depend on all other layers
    """

    run: Callable[..., Tensor]
    first_layer: Sequence[nn.Parameter]

    def loss_and_gradients(self) -> list[Tensor]:
        """Take a step without the L1 term; return the loss and the first layer's gradients."""
        loss = self.run(0.0)
        gradients = (w.grad.float().clone() for w in self.first_layer if w.grad is not None)
        return [loss.float(), *gradients]


class Model(nn.Module):
    """The model with separate weights in each layer."""

    def __init__(self, shape: Shape, weights: Weights, kind: Mlp, compiled: bool) -> None:
        super().__init__()
        self.shape, self.sparse = shape, kind == "SparseGatedMLP"

        def copied(weight: Tensor) -> nn.Parameter:
            return nn.Parameter(weight.float().clone())

        def layer() -> nn.Module:
            if self.sparse:
                return SparseGatedMLP.from_dense(*(w.float() for w in weights.mlp))
            named = zip(("wg", "wu", "wd"), map(copied, weights.mlp), strict=True)
            return nn.ParameterDict(dict(named))

        self.embedding, self.gains = copied(weights.embedding), copied(weights.gains)
        self.ones = nn.Parameter(torch.ones_like(self.gains))
        self.qkv = nn.ParameterList(copied(weights.qkv) for _ in range(shape.layers))
        self.out = nn.ParameterList(copied(weights.out) for _ in range(shape.layers))
        self.mlps = nn.ModuleList(layer() for _ in range(shape.layers))
        self._attention = torch.compile(attention, dynamic=False) if compiled else attention
        self._norm = torch.compile(normalized, dynamic=False) if compiled else normalized
        fused = torch.compile(mlp, dynamic=False) if kind == "compiled" else mlp
        self._mlp: Callable[..., Tensor] = fused

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the L1 term of sparse MLPs."""
        x, term = embedding(tokens, self.embedding), tokens.new_zeros((), dtype=torch.float32)
        for number, layer in enumerate(self.mlps):
            weights = self.ones[number], self.qkv[number], self.out[number]
            x = self._attention(x, *weights, self.shape.heads)
            z = self._norm(x, self.gains[number])
            if self.sparse:
                y, l1 = layer(z, l1=True)
                term = term + l1 / self.shape.layers
            else:
                y = self._mlp(z, layer.wg, layer.wu, layer.wd)
            x = x + y
        return linear(self._norm(x, self.ones[0]), self.embedding), term


def step(shape: Shape, weights: Weights, tokens: Tensor, kind: Mlp, compiled: bool) -> Step:
    """Return a training step on tokens [sequences, context + 1]."""
    model = Model(shape, weights, kind, compiled)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, weight_decay=0.0, fused=tokens.is_cuda
    )

    def run(l1: float = L1) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with products(tokens.device):
            logits, term = model(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss + l1 * term if model.sparse else loss).backward()
        optimizer.step()
        return loss.detach()

    first: Any = model.mlps[0]
    return Step(run, [model.qkv[0], first.gate.weight if model.sparse else first.wg])
