"""The weights of a gated MLP, and the results of pruning one or a linear layer.

    a = act(X Wg^T) * (X Wu^T)     Y = a Wd^T        X [tokens, k], a [tokens, h], Y [tokens, k]

    gate, up [h, k]          down [k, h]
    s s s s s s s s          s s s s | d d           s  sparse: 2:4 along the row
    s s s s s s s s          s s s s | d d           d  dense
    ---------------          s s s s | d d
    d d d d d d d d          s s s s | d d

The features of a are split: row i of gate and up and column i of down belong to one region. Their
order is arbitrary, so one permutation of all three moves the dense features to the end.
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
    """gate and up [h, k], and down [k, h]. Raises SuiteError unless they fit and are finite."""

    gate: Tensor
    up: Tensor
    down: Tensor
    activation: str = "silu"

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate, self.up, self.down

    def __post_init__(self) -> None:
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
        gate, up, down = (weight.to(dtype) for weight in self.weights)
        return type(self)(gate, up, down, self.activation)

    def permuted(self, order: Tensor) -> Self:
        """Return the same function with its features in the order of int64 [h]."""
        return type(self)(self.gate[order], self.up[order], self.down[:, order], self.activation)


@dataclass(frozen=True)
class PrunedMLP:
    """A pruned MLP. Its last `dense` features are dense; feature i was feature permutation[i]."""

    mlp: GatedMLP
    permutation: Tensor
    dense: int


@dataclass(frozen=True)
class PrunedLinear:
    """A pruned layer. Its last `dense` rows or columns are dense; i was permutation[i] before.

    If it is split by columns, it takes its inputs in the order of the permutation; if it is split
    by rows, its outputs have that order.
    """

    weight: Tensor
    permutation: Tensor
    dense: int
    split: str


def require_one_of(field: str, name: str, choices: list[str]) -> None:
    """Raise SuiteError unless the name is one of the choices."""
    if name not in choices:
        hint = did_you_mean(name, choices)
        raise SuiteError(f"{field}: expected one of {', '.join(choices)}; found {name!r}{hint}")


def require_weight(name: str, weight: Tensor, shape: tuple[int, ...] | None = None) -> None:
    """Raise SuiteError unless this is a finite matrix, of the given shape if there is one."""
    actual = f"found {weight.dtype} {list(weight.shape)}"
    if weight.dim() != 2 or not weight.is_floating_point():
        raise SuiteError(f"{name}: expected a floating-point matrix, {actual}")
    if shape is not None and tuple(weight.shape) != shape:
        raise SuiteError(f"{name}: expected {list(shape)}, {actual}")
    bad = int((~weight.isfinite()).sum())
    if bad:
        raise SuiteError(f"{name}: expected finite values, found {bad} that are not")


def require_inputs(x: Tensor, inputs: int) -> None:
    """Raise SuiteError unless x is finite and [tokens, inputs], with at least one token."""
    require_weight("activations", x)
    if len(x) < 1 or x.shape[1] != inputs:
        raise SuiteError(f"activations: expected [tokens, {inputs}], found {list(x.shape)}")
