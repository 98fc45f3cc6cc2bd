"""A decoder of gated MLPs with few hidden units on, whole, around any kernel of the op `ffn`.

    S = E[token]                                    S[:, 0] = 1, in every layer
    in each of the layers:
        S += attention(norm(S))                     causal; queries and keys turned
        Z = norm(S) * gains                         gains[0] by layer, see below
        S += (relu(Z Wg.T) * (Z Wu.T)) Wd.T         the kernel's
    logits = norm(S) E.T

Weights are drawn, those of the MLP as in a problem of `ffn`. No row of Wo and Wd writes column 0 of
S. Column 0 of Wg is -1: so a layer's gains[0] says how many units are on for a token, `active` on
average. It is found layer by layer, in a pass over the very tokens that are measured (`calibrate`):
one sequence, alone, left the last of 38 layers with 17.5 units on where 24 were asked for.

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

from sparsebench.harness.models.train_lm.model import EPSILON, attention

DEVIATION = 0.02
SAMPLE = 16384  # tokens that a gain is found with, at most: they are taken evenly from all
LARGEST_GAIN, HALVINGS = 16.0, 12  # to 0.004: gains of bf16 near 2.6 are 0.016 apart
ROWS = 4096  # of Z, whose units are counted at a time


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
    """Draw the weights; gains are 1 until `calibrate` has found them."""
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
    return Weights(words, qkv, out, wg, wu, wd, gains)


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

Pass = Callable[[Call], Tensor]
"""A forward pass whose MLP is the call; it returns the logits [sequences, context, vocab]."""


def forward(shape: Shape, weights: Weights, tokens: Tensor, z: Tensor, compiled: bool) -> Pass:
    """Return a forward pass, which writes Z before each call; compiled once for all kernels."""

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
    def run(call: Call) -> Tensor:
        x = steps[0](embedding(tokens, weights.embedding), weights.gains[0])
        for gains in weights.gains[1:]:
            x = steps[1](x, call(), gains)
        return steps[2](x, call())

    return run


def calibrate(run: Pass, shape: Shape, weights: Weights, z: Tensor) -> None:
    """Write gains[:, 0], a layer after the other: those with which `active` units are on."""
    layers = iter(weights.gains)
    sample = z[:: -(-len(z) // SAMPLE)]

    def call() -> Tensor:
        gains = next(layers)
        rest, unit = sample.clone(), sample[:, 0].float() / gains[0].float()
        low, high = 0.0, LARGEST_GAIN
        for _ in range(HALVINGS):
            rest[:, 0] = unit * (low + high) / 2
            many = on(weights.wg, rest) > shape.active
            low, high = ((low + high) / 2, high) if many else (low, (low + high) / 2)
        found = torch.full_like(gains[0], (low + high) / 2)
        z[:, 0] = z[:, 0].float() * (found / gains[0]).float()
        gains[0] = found
        return mlp(z, weights.wg, weights.wu, weights.wd)

    run(call)


def counted(run: Pass, weights: Weights, z: Tensor) -> tuple[Tensor, list[float]]:
    """Return the logits of the plain model, and how many units are on for a token in each layer."""
    counts: list[float] = []

    def call() -> Tensor:
        counts.append(on(weights.wg, z))
        return mlp(z, weights.wg, weights.wu, weights.wd)

    return run(call), counts


def on(wg: Tensor, z: Tensor) -> float:
    """Return how many units are on for a token of Z, on average."""
    counts: Sequence[Tensor] = [(linear(part, wg) > 0).sum() for part in z.split(ROWS)]
    return float(sum(counts)) / len(z)
