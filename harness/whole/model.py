"""A decoder of gated MLPs with few hidden units on, whole, around any kernel of the op `ffn`.

    S = E[token]                                    S[:, 0] = 1, in every layer
    in each of the layers:
        S += attention(norm(S))                     causal; queries and keys turned
        Z = norm(S) * gains                         gains[0] by layer, see below
        S += (relu(Z Wg.T) * (Z Wu.T)) Wd.T         the kernel's
    logits = norm(S) E.T

Weights are drawn, those of the MLP as in a problem of `ffn`. No row of Wo and Wd writes column 0 of
S. Column 0 of Wg is -1: so a layer's gains[0] says how many units are on for a token, `active` on
average. It is found layer by layer, from the gates of a sample.

All layers have the values, and here the memory, of one: 46 MB and more are read anew in each, since
L2 caches hold less, and at thousands of tokens the reading does not count. In training each layer
has weights of its own, for the memory that gradients and the optimizer need.

What stands between the products is compiled, for all kernels alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, relu, rms_norm

from sparsebench.harness.train_lm.model import EPSILON, attention

DEVIATION = 0.02
SAMPLE = 2048  # tokens that gains are found with, at most


@dataclass(frozen=True)
class Shape:
    """A model, and how many tokens it is given; `active` units are on for one on average."""

    layers: int = 38
    width: int = 2048
    hidden: int = 5632
    heads: int = 32
    vocab: int = 49152
    sequences: int = 64
    context: int = 2048
    active: float = 24

    @property
    def tokens(self) -> int:
        """Return how many there are in all sequences."""
        return self.sequences * self.context


@dataclass(frozen=True)
class Weights:
    """A layer's, on the device; gains of attention and MLP [layers, width]."""

    embedding: Tensor
    qkv: Tensor
    out: Tensor
    wg: Tensor
    wu: Tensor
    wd: Tensor
    gains: Tensor


def drawn(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Draw the weights, and find the gains."""
    draw = torch.Generator(device).manual_seed(seed)
    k, n, added = shape.width, shape.hidden, (2 * shape.layers) ** -0.5

    def normal(rows: int, columns: int, by: float) -> Tensor:
        made = torch.empty(rows, columns, device=device)
        return made.normal_(0, by, generator=draw).to(dtype)

    words = normal(shape.vocab, k, 1.0)
    words[:, 0] = 1
    qkv, out = normal(3 * k, k, DEVIATION), normal(k, k, DEVIATION * added)
    wg, wu, wd = normal(n, k, k**-0.5), normal(n, k, k**-0.5), normal(k, n, n**-0.5 * added)
    out[0] = wd[0] = 0
    wg[:, 0] = -1
    gains = torch.ones(shape.layers, k, device=device, dtype=dtype)
    weights = Weights(words, qkv, out, wg, wu, wd, gains)
    sample = 1, min(SAMPLE, shape.tokens)
    tokens = torch.randint(shape.vocab, sample, device=device, generator=draw)
    _find_gains(weights, shape, tokens)
    return weights


@torch.no_grad()
def _find_gains(weights: Weights, shape: Shape, tokens: Tensor) -> None:
    """Write gains[:, 0]: what the sum of the other columns exceeds for `active` of all units."""
    x = embedding(tokens, weights.embedding)
    for gains in weights.gains:
        x = attended(x, weights, shape.heads)
        z = norm(x, gains)
        rest = linear(z[..., 1:], weights.wg[:, 1:]).float() / z[..., :1].float()
        on = round(shape.active * rest.numel() / shape.hidden)
        gains[0] = rest.flatten().kthvalue(rest.numel() - on).values.clamp(min=0)
        x = x + mlp(norm(x, gains), weights.wg, weights.wu, weights.wd)


def norm(x: Tensor, gains: Tensor) -> Tensor:
    """Return the RMS norm."""
    return rms_norm(x, gains.shape, gains, EPSILON)


def attended(x: Tensor, weights: Weights, heads: int) -> Tensor:
    """Return the stream [sequences, context, k] after the attention."""
    ones = torch.ones_like(weights.gains[0])
    return attention(x, ones, weights.qkv, weights.out, heads)


def mlp(z: Tensor, wg: Tensor, wu: Tensor, wd: Tensor) -> Tensor:
    """Return what the MLP adds, as torch computes it."""
    return linear(relu(linear(z, wg)) * linear(z, wu), wd)


Call = Callable[[], Tensor]
"""The MLP of Z [tokens, k], which is where it was when the call was made."""


def forward(
    shape: Shape, weights: Weights, tokens: Tensor, z: Tensor, call: Call, compiled: bool
) -> Callable[[], Tensor]:
    """Return a forward pass whose MLP is `call`: it writes Z before, and returns the logits."""

    def begin(x: Tensor, gains: Tensor) -> Tensor:
        x = attended(x, weights, shape.heads)
        z.copy_(norm(x, gains).view_as(z))
        return x

    def end(x: Tensor, y: Tensor) -> Tensor:
        return linear(norm(x + y.view_as(x), torch.ones_like(weights.gains[0])), weights.embedding)

    def between(x: Tensor, y: Tensor, gains: Tensor) -> Tensor:
        return begin(x + y.view_as(x), gains)

    made: list[Callable[..., Tensor]] = [begin, between, end]
    steps = [torch.compile(f, dynamic=False) if compiled else f for f in made]

    @torch.no_grad()
    def run() -> Tensor:
        x = steps[0](embedding(tokens, weights.embedding), weights.gains[0])
        for gains in weights.gains[1:]:
            x = steps[1](x, call(), gains)
        return steps[2](x, call())

    return run


def on(wg: Tensor, z: Tensor, rows: int = 4096) -> float:
    """Return how many units are on for a token of Z, on average."""
    counts: Sequence[Tensor] = [(linear(part, wg) > 0).sum() for part in z.split(rows)]
    return float(sum(counts)) / len(z)
