"""What is pruned, a gated MLP or one linear layer, and what becomes of it.

    a = act(X Wg^T) * (X Wu^T)     Y = a Wd^T        X [tokens, k], a [tokens, h], Y [tokens, k]

    gate, up [h, k]          down [k, h]
    s s s s s s s s          s s s s | d d           s  sparse: 2:4 along the row
    s s s s s s s s          s s s s | d d           d  dense
    ---------------          s s s s | d d
    d d d d d d d d          s s s s | d d

The features of a are split: row i of gate and up and column i of down are of one region. Their
order is free, so that one permutation, applied to all three, gathers the dense ones at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu

from sparsebench._discovery import did_you_mean
from sparsebench.errors import SuiteError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


@dataclass(frozen=True)
class GatedMLP:
    """gate and up [h, k], down [k, h], finite; SuiteError where they do not fit one another."""

    gate: Tensor
    up: Tensor
    down: Tensor
    activation: str = "silu"

    def __post_init__(self) -> None:
        """Refuse weights that do not fit, or are not finite."""
        require_weight("gate", self.gate)
        require_weight("up", self.up, tuple(self.gate.shape))
        require_weight("down", self.down, tuple(self.gate.T.shape))
        require_one_of("activation", self.activation, list(ACTIVATIONS))

    def hidden(self, x: Tensor) -> Tensor:
        """Return the intermediate activations [tokens, h] of inputs [tokens, k]."""
        return ACTIVATIONS[self.activation](linear(x, self.gate)) * linear(x, self.up)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs [tokens, k] of inputs [tokens, k]."""
        return linear(self.hidden(x), self.down)

    def to(self, dtype: torch.dtype) -> Self:
        """Return the same with weights in another dtype."""
        gate, up, down = (weight.to(dtype) for weight in (self.gate, self.up, self.down))
        return type(self)(gate, up, down, self.activation)

    def permuted(self, order: Tensor) -> Self:
        """Return the same function, with its features in another order, int64 [h]."""
        return type(self)(self.gate[order], self.up[order], self.down[:, order], self.activation)


@dataclass(frozen=True)
class PrunedMLP:
    """The last `dense` features are dense; feature i was feature permutation[i]."""

    mlp: GatedMLP
    permutation: Tensor
    dense: int


@dataclass(frozen=True)
class PrunedLinear:
    """The last `dense` rows or columns are dense; number i of them was number permutation[i].

    Split by columns it is given its inputs in the order of the permutation; split by rows, it gives
    its outputs in that order.
    """

    weight: Tensor
    permutation: Tensor
    dense: int
    split: str


def require_one_of(what: str, name: str, known: list[str]) -> None:
    """Raise SuiteError unless the name is known."""
    if name not in known:
        hint = did_you_mean(name, known)
        raise SuiteError(f"{what}: expected one of {', '.join(known)}; found {name!r}{hint}")


def require_weight(name: str, weight: Tensor, shape: tuple[int, ...] | None = None) -> None:
    """Raise SuiteError unless this is a finite matrix, of this shape where one is given."""
    found = f"found {weight.dtype} {list(weight.shape)}"
    if weight.dim() != 2 or not weight.is_floating_point():
        raise SuiteError(f"{name}: expected a floating-point matrix, {found}")
    if shape is not None and tuple(weight.shape) != shape:
        raise SuiteError(f"{name}: expected {list(shape)}, {found}")
    bad = int((~weight.isfinite()).sum())
    if bad:
        raise SuiteError(f"{name}: expected finite values, found {bad} that are not")


def require_inputs(x: Tensor, inputs: int) -> None:
    """Raise SuiteError unless x is finite and [tokens, inputs], with a token at least."""
    require_weight("activations", x)
    tokens, found = x.shape
    if tokens < 1 or found != inputs:
        raise SuiteError(f"activations: expected [tokens, {inputs}], found {list(x.shape)}")
