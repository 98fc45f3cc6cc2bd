"""A decoder with few active hidden units, in forward passes and in training steps.

    S = E[token]                                    S[:, 0] = 1, in every layer
    in each of the layers:
        S += attention(norm(S))                     causal; rotary position embedding
        Z = norm(S) * gains                         gains[0] differs by layer, see below
        S += (relu(Z Wg.T) * (Z Wu.T)) Wd.T         the kernel, or the layer
    logits = norm(S) E.T

The weights are random. No row of Wo and Wd writes column 0 of S, and column 0 of Wg is -1, so a
layer's gains[0] sets its mean number of active units per token. `calibrate` finds it layer by layer
in a pass over the tokens that are then measured: with one sequence alone, the last of 38 layers had
17.5 active units instead of 24.

In a forward pass all layers share the values of one. In training each has its own, with fp32
weights, bf16 products and fused AdamW, at a rate too small to change them. What is between the
products is compiled, in the same way for all kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear, relu, rms_norm
from torch.nn.functional import scaled_dot_product_attention as sdpa

from sparsebench.nn import SparseGatedMLP

PLAIN, SPARSE, COMPILED = "plain", "SparseGatedMLP", "compiled"  # the MLPs of a step
SAMPLE = 16384  # tokens to calibrate with, at most, spread evenly
LARGEST_GAIN, HALVINGS = 16.0, 12  # to 0.004: gains of bf16 near 2.6 are 0.016 apart
ROWS = 4096  # rows of Z per step of counting, to limit memory
RATE, L1 = 1e-9, 2e-5

Call = Callable[[], Tensor]


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


@dataclass(frozen=True)
class Weights:
    """The weights of one layer and the embedding; the MLPs' gains are [layers, width]."""

    embedding: Tensor
    qkv: Tensor
    out: Tensor
    mlp: tuple[Tensor, Tensor, Tensor]
    gains: Tensor

    @classmethod
    def draw(cls, shape: Shape, device: torch.device, dtype: torch.dtype) -> "Weights":
        """Draw the weights. Gains are 1 until `calibrate` sets them."""
        draw = torch.Generator(device).manual_seed(0)
        k, n, added = shape.width, shape.hidden, (2 * shape.layers) ** -0.5

        def normal(rows: int, columns: int, deviation: float) -> Tensor:
            weight = torch.empty(rows, columns, device=device)
            return weight.normal_(0, deviation, generator=draw).to(dtype)

        words = normal(shape.vocab, k, 1.0)
        qkv, out = normal(3 * k, k, 0.02), normal(k, k, 0.02 * added)
        wg, wu, wd = normal(n, k, k**-0.5), normal(n, k, k**-0.5), normal(k, n, n**-0.5 * added)
        words[:, 0], wg[:, 0] = 1, -1
        out[0] = wd[0] = 0
        gains = torch.ones(shape.layers, k, device=device, dtype=dtype)
        return cls(words, qkv, out, (wg, wu, wd), gains)


def normalized(x: Tensor, gains: Tensor) -> Tensor:
    return rms_norm(x, gains.shape, gains, 1e-6)


def attention(x: Tensor, norm: Tensor, qkv: Tensor, out: Tensor, heads: int) -> Tensor:
    """Return the stream [sequences, tokens, k] with the output of attention added."""
    parts = linear(normalized(x, norm), qkv).unflatten(-1, (3, heads, -1))
    q, k, v = parts.permute(2, 0, 3, 1, 4)
    mixed = sdpa(rotated(q), rotated(k), v, is_causal=True)
    return x + linear(mixed.transpose(1, 2).flatten(2), out)


def rotated(x: Tensor) -> Tensor:
    """Rotate [..., tokens, head]; element i of the first half pairs with i of the second."""
    tokens, head = x.shape[-2:]
    halves = torch.arange(0, head, 2, device=x.device) / head
    angles = torch.outer(torch.arange(tokens, device=x.device).float(), 10_000.0**-halves)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def mlp(z: Tensor, wg: Tensor, wu: Tensor, wd: Tensor) -> Tensor:
    return linear(relu(linear(z, wg)) * linear(z, wu), wd)


# ---- forward passes ----


class Forward:
    """A forward pass on tokens [sequences, context] that calls its MLP on z [tokens, width]."""

    def __init__(self, shape: Shape, weights: Weights, tokens: Tensor) -> None:
        self.shape, self.weights, self.tokens = shape, weights, tokens
        self.z = weights.qkv.new_empty(tokens.numel(), shape.width)
        parts: list[Callable[..., Tensor]] = [self._begin, self._between, self._end]
        compiled = tokens.is_cuda  # once, for all kernels
        self.parts = [torch.compile(p, dynamic=False) if compiled else p for p in parts]

    def _begin(self, x: Tensor, gains: Tensor) -> Tensor:
        w = self.weights
        x = attention(x, torch.ones_like(gains), w.qkv, w.out, self.shape.heads)
        self.z.copy_(normalized(x, gains).view_as(self.z))
        return x

    def _between(self, x: Tensor, y: Tensor, gains: Tensor) -> Tensor:
        return self._begin(x + y.view_as(x), gains)

    def _end(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + y.view_as(x)
        return linear(normalized(x, torch.ones_like(x[0, 0])), self.weights.embedding)

    @torch.no_grad()
    def __call__(self, call: Call) -> Tensor:
        """Return the logits [sequences, context, vocab]."""
        begin, between, end = self.parts
        x = begin(embedding(self.tokens, self.weights.embedding), self.weights.gains[0])
        for gains in self.weights.gains[1:]:
            x = between(x, call(), gains)
        return end(x, call())

    def plain(self) -> Tensor:
        return mlp(self.z, *self.weights.mlp)

    def calibrate(self) -> None:
        """Set gains[:, 0] layer by layer, by bisection, so that `active` units are on."""
        layers, z = iter(self.weights.gains), self.z
        sample = z[:: -(-len(z) // SAMPLE)]

        def call() -> Tensor:
            gains = next(layers)
            rest, unit = sample.clone(), sample[:, 0].float() / gains[0].float()
            low, high = 0.0, LARGEST_GAIN
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                rest[:, 0] = unit * middle
                too_many = active_units(self.weights.mlp[0], rest) > self.shape.active
                low, high = (middle, high) if too_many else (low, middle)
            gain = torch.full_like(gains[0], (low + high) / 2)
            z[:, 0] = z[:, 0].float() * (gain / gains[0]).float()
            gains[0] = gain
            return self.plain()

        self(call)

    def count_units(self) -> tuple[Tensor, list[float]]:
        """Return the logits of the plain model, and the active units per token by layer."""
        counts: list[float] = []

        def call() -> Tensor:
            counts.append(active_units(self.weights.mlp[0], self.z))
            return self.plain()

        return self(call), counts


def active_units(wg: Tensor, z: Tensor) -> float:
    """Return the mean number of active units per token of Z."""
    return sum(float((linear(part, wg) > 0).sum()) for part in z.split(ROWS)) / len(z)


# ---- training steps ----


class Model(nn.Module):
    """The model with separate weights in each layer, and its optimizer."""

    def __init__(self, shape: Shape, weights: Weights, kind: str, compiled: bool) -> None:
        super().__init__()
        self.shape, self.kind = shape, kind

        def copied(weight: Tensor) -> nn.Parameter:
            return nn.Parameter(weight.float().clone())

        def layer() -> nn.Module:
            if kind == SPARSE:
                return SparseGatedMLP.from_dense(*(w.float() for w in weights.mlp))
            return nn.ParameterList(map(copied, weights.mlp))

        self.embedding, self.gains = copied(weights.embedding), copied(weights.gains)
        self.ones = nn.Parameter(torch.ones_like(self.gains))
        self.qkv = nn.ParameterList(copied(weights.qkv) for _ in range(shape.layers))
        self.out = nn.ParameterList(copied(weights.out) for _ in range(shape.layers))
        self.mlps = nn.ModuleList(layer() for _ in range(shape.layers))
        self.attention, self.norm = (
            torch.compile(part, dynamic=False) if compiled else part
            for part in (attention, normalized)
        )
        self.mlp = torch.compile(mlp, dynamic=False) if kind == COMPILED else mlp
        on_gpu = self.embedding.is_cuda
        self.optimizer = torch.optim.AdamW(
            self.parameters(), lr=RATE, weight_decay=0.0, fused=on_gpu
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the L1 term of sparse MLPs."""
        x, term = embedding(tokens, self.embedding), tokens.new_zeros((), dtype=torch.float32)
        for number, layer in enumerate(self.mlps):
            weights = self.ones[number], self.qkv[number], self.out[number]
            x = self.attention(x, *weights, self.shape.heads)
            z = self.norm(x, self.gains[number])
            if self.kind == SPARSE:
                y, l1 = layer(z, l1=True)
                term = term + l1 / self.shape.layers
            else:
                y = self.mlp(z, *layer)
            x = x + y
        return linear(self.norm(x, self.ones[0]), self.embedding), term

    def step(self, tokens: Tensor, l1: float = L1) -> Tensor:
        """Take a step on tokens [sequences, context + 1]; return its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits, term = self(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss + l1 * term if self.kind == SPARSE else loss).backward()
        self.optimizer.step()
        return loss.detach()

    def loss_and_gradients(self, tokens: Tensor) -> list[Tensor]:
        """Take a step without the L1 term; the gradients depend on all later layers."""
        loss, first = self.step(tokens, 0.0), self.mlps[0]
        weights = self.qkv[0], first.gate.weight if self.kind == SPARSE else first[0]
        return [loss.float(), *(w.grad.float().clone() for w in weights)]
