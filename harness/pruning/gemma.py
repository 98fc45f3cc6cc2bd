"""Gemma 3, the text model, forward only: what it takes to calibrate on, and to give the loss.

    x = E[token] sqrt(d)
    each layer:  x += norm(attention(norm(x)))       queries and keys normed by head, then rotated
                 x += norm(mlp(norm(x)))             gated, GELU by tanh
    logits = norm(x) E^T

Of every 6 layers the first 5 attend to the last `window` tokens alone. A layer is taken in halves,
`attend` and `feed_forward`, so that its MLP can be pruned between them from what reaches it.
Source: Gemma 3 technical report, arXiv 2503.19786, section 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm, scaled_dot_product_attention

from sparsebench.harness.pruning.mlp import GatedMLP

EPSILON = 1e-6
GLOBAL_EVERY = 6
LOCAL_BASE = 10_000.0  # of the rotation's wavelengths, in layers with a window
CHUNK = 256  # tokens whose logits are held at once: 268 MB for Gemma's 262,144 pieces


@dataclass(frozen=True)
class Layer:
    """Weights of a layer: norms [d] or by head [head], q, k, v [heads * head, d], out [d, ...].

    window  tokens that one attends to, itself among them; None for all before it
    base    of the rotation's wavelengths
    """

    attention_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    post_attention_norm: Tensor
    mlp_norm: Tensor
    mlp: GatedMLP
    post_mlp_norm: Tensor
    window: int | None
    base: float

    def attend(self, x: Tensor) -> Tensor:
        """Return [contexts, tokens, d] after the attention."""
        tokens, head = x.shape[1], len(self.q_norm)
        seen = _norm(x, self.attention_norm)
        q, k, v = (
            linear(seen, weight).unflatten(-1, (-1, head)).transpose(1, 2)
            for weight in (self.q, self.k, self.v)
        )
        angles = _angles(tokens, head, self.base, x.device)
        q, k = _rotate(_norm(q, self.q_norm), angles), _rotate(_norm(k, self.k_norm), angles)
        mask = _mask(tokens, self.window, x.device)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return x + _norm(
            linear(mixed.transpose(1, 2).flatten(2), self.out), self.post_attention_norm
        )

    def mlp_input(self, x: Tensor) -> Tensor:
        """Return what the MLP is given, [contexts * tokens, d]."""
        return _norm(x, self.mlp_norm).flatten(0, 1)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return [contexts, tokens, d] after the MLP."""
        given = self.mlp(self.mlp_input(x)).view_as(x)
        return x + _norm(given, self.post_mlp_norm)


@dataclass(frozen=True)
class Gemma:
    """Embeddings [pieces, d], the layers, and the last norm [d]."""

    embedding: Tensor
    layers: Sequence[Layer]
    norm: Tensor

    def embed(self, tokens: Tensor) -> Tensor:
        """Return [contexts, tokens, d] of token numbers [contexts, tokens]."""
        return self.embedding[tokens] * math.sqrt(self.embedding.shape[1])

    def loss(self, x: Tensor, tokens: Tensor) -> float:
        """Return the mean loss of each token but a context's first, in nats, from the last x."""
        given = _norm(x, self.norm)[:, :-1].flatten(0, 1)
        wanted = tokens[:, 1:].flatten()
        parts = zip(given.split(CHUNK), wanted.split(CHUNK), strict=True)
        losses = [
            cross_entropy(linear(part, self.embedding), target, reduction="sum")
            for part, target in parts
        ]
        return float(torch.stack(losses).sum() / len(wanted))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight.shape, weight, EPSILON)


def _angles(tokens: int, head: int, base: float, device: torch.device) -> Tensor:
    """Return [tokens, head / 2]: position times frequency."""
    halves = torch.arange(0, head, 2, device=device) / head
    return torch.outer(torch.arange(tokens, device=device).float(), base**-halves)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate element i of the first half of each head with element i of the second."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _mask(tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [tokens, tokens]: True where a query (row) sees a key (column)."""
    places = torch.arange(tokens, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < (window or tokens))
