"""A decoder with MLPs gated by ReLU, in plain torch so that no kernel of ours affects the results.

blocks.py replaces its weights by block-sparse layers for `train-lm --pattern`.

    x = E[byte]
    each layer:  x += attention(norm(x))        causal; rotary position embedding
                 x += h Wd.T                    h = relu(z Wg.T) * (z Wu.T),  z = norm(x)
    logits = norm(x) Wo.T

    L1 = mean over layers of the mean over tokens of the sum over units of |h|

A unit is on for a token if its gate is above zero. The L1 term follows the code of Cetin et al.,
arXiv 2603.23198. Their equation 2 also divides by the number of units, but their coefficients
belong to the term without that division.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, relu, rms_norm, scaled_dot_product_attention

from sparsebench.errors import SuiteError

BYTES = 256
EPSILON = 1e-6
BASE = 10_000.0  # base of the wavelengths of the rotary embedding
DEVIATION = 0.02  # standard deviation of the initial weights, as in GPT-2

Watch = Callable[[int, Tensor, Tensor], None]
"""Called with a layer's number, its MLP's input [contexts, tokens, k], and gates [..., hidden]."""


@dataclass(frozen=True)
class Sizes:
    """Layers, width, hidden units per MLP, attention heads, and bytes per context."""

    layers: int = 6
    width: int = 512
    hidden: int = 2048
    heads: int = 8
    context: int = 256

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            expected = f"a multiple of {2 * self.heads}, twice the heads"
            raise SuiteError(f"width: expected {expected}; found {self.width}")


class Layer(nn.Module):
    """Attention and a gated MLP: qkv [3 k, k], out [k, k], wg and wu [n, k], wd [k, n].

    `out` and `wd` add to the residual stream, so they start smaller by sqrt(2 * layers).
    """

    def __init__(self, sizes: Sizes, draw: torch.Generator | None) -> None:
        super().__init__()
        k, n, added = sizes.width, sizes.hidden, DEVIATION / math.sqrt(2 * sizes.layers)
        self.heads = sizes.heads
        self.attention_norm, self.mlp_norm = (nn.Parameter(torch.ones(k)) for _ in range(2))
        self.qkv = _draw_parameter(3 * k, k, draw)
        self.out = _draw_parameter(k, k, draw, added)
        self.wg, self.wu = _draw_parameter(n, k, draw), _draw_parameter(n, k, draw)
        self.wd = _draw_parameter(k, n, draw, added)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the stream [contexts, tokens, k], the L1 term, and the MLP's inputs and gates."""
        x = attention(x, self.attention_norm, self.qkv, self.out, self.heads)
        z = normalized(x, self.mlp_norm)
        g = relu(_times(z, self.wg))
        h = g * _times(z, self.wu)
        return x + _times(h, self.wd), h.abs().sum(-1, dtype=torch.float32).mean(), z, g


class Decoder(nn.Module):
    """The model. Equal sizes and seeds give equal initial bits on every device."""

    def __init__(self, sizes: Sizes, seed: int | None) -> None:
        """Draw the weights on the CPU; without a seed they stay uninitialized."""
        super().__init__()
        draw = None if seed is None else torch.Generator().manual_seed(seed)
        self.embedding = _draw_parameter(BYTES, sizes.width, draw)
        self.layers = nn.ModuleList(Layer(sizes, draw) for _ in range(sizes.layers))
        self.norm = nn.Parameter(torch.ones(sizes.width))
        self.output = _draw_parameter(BYTES, sizes.width, draw)

    def forward(self, tokens: Tensor, watch: Watch | None = None) -> tuple[Tensor, Tensor]:
        """Return logits [contexts, tokens, 256] for bytes [contexts, tokens], and the L1 term."""
        x, norms = embedding(tokens, self.embedding), []
        for number, layer in enumerate(self.layers):
            x, norm, z, g = layer(x)
            norms.append(norm)
            if watch:
                watch(number, z, g)
        return linear(normalized(x, self.norm), self.output), torch.stack(norms).mean()


def attention(
    x: Tensor, norm: Tensor, qkv: Tensor | nn.Module, out: Tensor | nn.Module, heads: int
) -> Tensor:
    """Return the stream [contexts, tokens, k] with the output of attention added."""
    q, k, v = _times(normalized(x, norm), qkv).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    mixed = scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
    return x + _times(mixed.transpose(1, 2).flatten(2), out)


def _times(x: Tensor, weight: Tensor | nn.Module) -> Tensor:
    """Return X @ W.T; block-sparse weights are modules (blocks.py)."""
    if isinstance(weight, nn.Module):
        y: Tensor = weight(x)
        return y
    return linear(x, weight)


def _draw_parameter(
    rows: int, columns: int, draw: torch.Generator | None, deviation: float = DEVIATION
) -> nn.Parameter:
    if draw is None:
        return nn.Parameter(torch.empty(rows, columns))
    return nn.Parameter(torch.randn(rows, columns, generator=draw) * deviation)


def normalized(x: Tensor, weight: Tensor) -> Tensor:
    """Return X normalized over its last dimension and scaled."""
    return rms_norm(x, weight.shape, weight, EPSILON)


def _rotate(x: Tensor) -> Tensor:
    """Rotate [..., tokens, head]; element i of the first half pairs with i of the second."""
    tokens, head = x.shape[-2:]
    halves = torch.arange(0, head, 2, device=x.device) / head
    angles = torch.outer(torch.arange(tokens, device=x.device).float(), BASE**-halves)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
