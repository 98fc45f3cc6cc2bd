"""A whole decoder with few active hidden units, whose MLPs run on any kernel of the op `ffn`.

    S = E[token]                                    S[:, 0] = 1, in every layer
    in each of the layers:
        S += attention(norm(S))                     causal; rotary position embedding
        Z = norm(S) * gains                         gains[0] differs by layer, see below
        S += (relu(Z Wg.T) * (Z Wu.T)) Wd.T         the kernel
    logits = norm(S) E.T

The weights are random; those of the MLP are drawn as in a problem of `ffn`. No row of Wo and Wd
writes column 0 of S, and column 0 of Wg is -1, so a layer's gains[0] sets the mean number of active
units per token. `calibrate` determines it layer by layer, in a pass over the tokens that are then
measured: with one sequence alone, the last of 38 layers had 17.5 active units instead of 24.

In a forward pass all layers share the values and the memory of one. Each layer still reads 46 MB or
more again, because L2 caches hold less, and at thousands of tokens the reads do not matter. In
training each layer has separate weights, so that gradients and optimizer need their full memory.

The operations between the products are compiled, in the same way for all kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, relu

from sparsebench.harness.models.train_lm.model import attention, normalized

DEVIATION = 0.02
SAMPLE = 16384  # tokens to calibrate with, at most, spread evenly
LARGEST_GAIN, HALVINGS = 16.0, 12  # to 0.004: gains of bf16 near 2.6 are 0.016 apart
ROWS = 4096  # rows of Z per step of counting, to limit memory


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and its input; `active` is the mean of active units per token."""

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
        return self.sequences * self.context


@dataclass(frozen=True)
class Weights:
    """The weights of one layer and the embedding; the MLPs' gains are [layers, width]."""

    embedding: Tensor
    qkv: Tensor
    out: Tensor
    wg: Tensor
    wu: Tensor
    wd: Tensor
    gains: Tensor

    @property
    def mlp(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.wg, self.wu, self.wd


def draw_weights(shape: Shape, device: torch.device, dtype: torch.dtype) -> Weights:
    """Draw the weights. Gains are 1 until `calibrate` sets them."""
    draw = torch.Generator(device).manual_seed(0)
    k, n, added = shape.width, shape.hidden, (2 * shape.layers) ** -0.5

    def normal(rows: int, columns: int, deviation: float) -> Tensor:
        weight = torch.empty(rows, columns, device=device)
        return weight.normal_(0, deviation, generator=draw).to(dtype)

    words = normal(shape.vocab, k, 1.0)
    words[:, 0] = 1
    qkv, out = normal(3 * k, k, DEVIATION), normal(k, k, DEVIATION * added)
    wg, wu, wd = normal(n, k, k**-0.5), normal(n, k, k**-0.5), normal(k, n, n**-0.5 * added)
    out[0] = wd[0] = 0
    wg[:, 0] = -1
    gains = torch.ones(shape.layers, k, device=device, dtype=dtype)
    return Weights(words, qkv, out, wg, wu, wd, gains)


def attended(x: Tensor, weights: Weights, heads: int) -> Tensor:
    ones = torch.ones_like(weights.gains[0])
    return attention(x, ones, weights.qkv, weights.out, heads)


def mlp(z: Tensor, wg: Tensor, wu: Tensor, wd: Tensor) -> Tensor:
    return linear(relu(linear(z, wg)) * linear(z, wu), wd)


Call = Callable[[], Tensor]
"""Compute the MLP of Z [tokens, k], a tensor at a fixed address."""

Pass = Callable[[Call], Tensor]
"""Run a forward pass with this MLP; return the logits [sequences, context, vocab]."""


def forward(shape: Shape, weights: Weights, tokens: Tensor, z: Tensor, compiled: bool) -> Pass:
    """Return a forward pass that writes Z before each call; it is compiled once for all kernels."""

    def begin(x: Tensor, gains: Tensor) -> Tensor:
        x = attended(x, weights, shape.heads)
        z.copy_(normalized(x, gains).view_as(z))
        return x

    def end(x: Tensor, y: Tensor) -> Tensor:
        z = normalized(x + y.view_as(x), torch.ones_like(weights.gains[0]))
        return linear(z, weights.embedding)

    def between(x: Tensor, y: Tensor, gains: Tensor) -> Tensor:
        return begin(x + y.view_as(x), gains)

    parts: list[Callable[..., Tensor]] = [begin, between, end]
    steps = [torch.compile(part, dynamic=False) if compiled else part for part in parts]

    @torch.no_grad()
    def run(call: Call) -> Tensor:
        x = steps[0](embedding(tokens, weights.embedding), weights.gains[0])
        for gains in weights.gains[1:]:
            x = steps[1](x, call(), gains)
        return steps[2](x, call())

    return run


def calibrate(run: Pass, shape: Shape, weights: Weights, z: Tensor) -> None:
    """Set gains[:, 0] layer by layer, by bisection, so that `active` units are on."""
    layers = iter(weights.gains)
    sample = z[:: -(-len(z) // SAMPLE)]

    def call() -> Tensor:
        gains = next(layers)
        rest, unit = sample.clone(), sample[:, 0].float() / gains[0].float()
        low, high = 0.0, LARGEST_GAIN
        for _ in range(HALVINGS):
            rest[:, 0] = unit * (low + high) / 2
            too_many = active_units(weights.wg, rest) > shape.active
            low, high = ((low + high) / 2, high) if too_many else (low, (low + high) / 2)
        gain = torch.full_like(gains[0], (low + high) / 2)
        z[:, 0] = z[:, 0].float() * (gain / gains[0]).float()
        gains[0] = gain
        return mlp(z, *weights.mlp)

    run(call)


def count_units(run: Pass, weights: Weights, z: Tensor) -> tuple[Tensor, list[float]]:
    """Return the logits of the plain model, and the active units per token in each layer."""
    counts: list[float] = []

    def call() -> Tensor:
        counts.append(active_units(weights.wg, z))
        return mlp(z, *weights.mlp)

    return run(call), counts


def active_units(wg: Tensor, z: Tensor) -> float:
    """Return the mean number of active units per token of Z."""
    counts: Sequence[Tensor] = [(linear(part, wg) > 0).sum() for part in z.split(ROWS)]
    return float(sum(counts)) / len(z)
