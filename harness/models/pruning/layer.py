"""Prune a gated MLP beside a dense region, and measure the error.

    a = act(X Wg^T) * (X Wu^T)     Y = a Wd^T        X [tokens, k], a [tokens, h], Y [tokens, k]

    gate, up [h, k]          down [k, h]
    s s s s s s s s          s s s s | d d           s  sparse: pruned along the row, from X
    s s s s s s s s          s s s s | d d              and, for down, from a of the pruned gate
    ---------------          s s s s | d d              and up, whose errors it can compensate
    d d d d d d d d          s s s s | d d           d  dense

Row i of gate and up and column i of down belong to one feature of a. Their order is arbitrary, so
one permutation of all three moves the dense features to the end: the last ones, or the best.

    scores       3 9 1 7        dense 2, scored:  permutation 0 2 | 1 3      (the rest | the best)
    features     0 1 2 3                last:     permutation 0 1 | 2 3

A score is the mean of Wanda's |w_ij| ||x_j|| over one feature's weights. A feature of a gated MLP
has three scores: of its row of gate, its row of up, and its column of down. Each is divided by its
mean over all features, then the three are added. Weights are pruned in fp32 and returned with their
dtype and device. Every -0.0 becomes +0.0.
Source: Lee et al., arXiv 2606.10445, section 3.3.3 (last: SpenseGPT; scored: SpenseGPT+).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu

from sparsebench._discovery import did_you_mean
from sparsebench.errors import SuiteError
from sparsebench.harness.models.pruning.methods import METHODS, PruningPattern, input_norms

REGIONS = ["last", "scored"]
TILE = 128  # a GEMM's tile: neither region should end inside one
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


@dataclass(frozen=True)
class GatedMLP:
    """gate and up [h, k], and down [k, h]."""

    gate: Tensor
    up: Tensor
    down: Tensor
    activation: str = "silu"

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate, self.up, self.down

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
class Pruned:
    """Pruned weights; the last `dense` features are dense, and feature i was permutation[i]."""

    weights: tuple[Tensor, Tensor, Tensor]
    permutation: Tensor
    dense: int


@dataclass(frozen=True)
class Pruner:
    """How to prune.

    method   one of METHODS
    dense    fraction of the features that stays dense; 0 prunes all
    region   how dense features are chosen: one of REGIONS
    pattern  of the other features: N:M, a fraction to prune anywhere, or blocks (methods.py)
    """

    method: str = "spensegpt"
    dense: float = 0.5
    region: str = "scored"
    pattern: str = "2:4"

    def __post_init__(self) -> None:
        require_one_of("method", self.method, METHODS)
        require_one_of("region", self.region, REGIONS)
        if not 0 <= self.dense <= 1:
            raise SuiteError(f"dense: expected a fraction of 0 to 1, found {self.dense:g}")
        PruningPattern.of(self.pattern)

    @property
    def mask_pattern(self) -> PruningPattern:
        return PruningPattern.of(self.pattern)

    def prune(self, weight: Tensor, x: Tensor, columns: int) -> Tensor:
        """Prune the first columns of a weight [n, k] from inputs x [tokens, k]."""
        return METHODS[self.method](weight, x, columns, self.mask_pattern)


@torch.no_grad()
def prune_mlp(mlp: GatedMLP, x: Tensor, pruner: Pruner) -> Pruned:
    """Prune from calibration inputs x [tokens, k]. Raises SuiteError for unfit sizes or values."""
    h, k = mlp.gate.shape
    for name, values in zip(("activations", "gate", "up", "down"), (x, *mlp.weights), strict=True):
        if bad := int((~values.isfinite()).sum()):
            raise SuiteError(f"{name}: expected finite values, found {bad} that are not")
    dense = dense_count(h, pruner.dense)
    sparse = h - dense
    x, full = x.float(), mlp.to(torch.float32)
    norms = input_norms(x)
    scores = _scores(full.gate, norms, by_row=True) + _scores(full.up, norms, by_row=True)
    scores += _scores(full.down, input_norms(full.hidden(x)), by_row=False)
    order = permutation(pruner.region, scores, dense)
    full = full.permuted(order)
    both = pruner.prune(torch.cat((full.gate[:sparse], full.up[:sparse])), x, k)
    gate, up = (
        _round_to_storage(torch.cat((pruned, weight[sparse:])), mlp.gate.dtype)
        for pruned, weight in zip(both.tensor_split(2), (full.gate, full.up), strict=True)
    )
    hidden = GatedMLP(gate.float(), up.float(), full.down, mlp.activation).hidden(x)
    down = _round_to_storage(pruner.prune(full.down, hidden, sparse), mlp.down.dtype)
    return Pruned((gate, up, down), order, dense)


@torch.no_grad()
def mlp_errors(mlp: GatedMLP, pruned: Pruned, x: Tensor) -> dict[str, float]:
    """Return ||XW^T - XW'^T|| / ||XW^T|| of gate, up and down, and the error of the whole output.

    x [tokens, k] should be tokens that pruning did not see. In both products of down, the inputs
    are the outputs of the pruned gate and up; if these are all zero, its error is 0.
    """
    x, before = x.float(), mlp.to(torch.float32).permuted(pruned.permutation)
    gate, up, down = (weight.float() for weight in pruned.weights)
    after = GatedMLP(gate, up, down, mlp.activation)
    hidden = after.hidden(x)
    return {
        "gate": _error(linear(x, after.gate), linear(x, before.gate)),
        "up": _error(linear(x, after.up), linear(x, before.up)),
        "down": _error(linear(hidden, after.down), linear(hidden, before.down))
        if hidden.any()
        else 0.0,
        "output": _error(linear(hidden, after.down), before(x)),
    }


def _scores(weight: Tensor, norms: Tensor, by_row: bool) -> Tensor:
    """Return the score of each row or column of a weight [n, k], from its inputs' norms [k]."""
    scores = (weight.abs() * norms).mean(dim=1 if by_row else 0)
    mean = scores.mean()
    return scores / mean if mean > 0 else scores


def _round_to_storage(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the dtype of storage; adding 0 turns -0.0, which rounding may give, into +0.0."""
    return weight.to(dtype) + 0.0


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative distance in fp64; raise SuiteError for an expected output of zeros."""
    distance, size = (float(t.double().norm()) for t in (actual - expected, expected))
    if not size:
        raise SuiteError("weights: expected an output to compare with, found only zeros")
    return distance / size


def dense_count(features: int, fraction: float) -> int:
    """Return the number of dense features: the nearest multiple of a tile, rounded half up.

    The tile is TILE, or the largest smaller power of two that divides the features. It is at most a
    quarter of the features, so that rounding changes the fraction by 1/8 at most, and at least 4,
    because a group of 4 must not straddle the regions. Raises SuiteError if 4 does not divide the
    features.
    """
    if features % 4:
        raise SuiteError(f"split: expected a multiple of 4 features, found {features}")
    sizes = (TILE, 64, 32, 16, 8)
    tile = next((size for size in sizes if features % size == 0 and 4 * size <= features), 4)
    return int(fraction * features / tile + 0.5) * tile


def permutation(region: str, scores: Tensor, dense: int) -> Tensor:
    """Return the new order of the features, int64 [features]; it is stable within each region."""
    features = torch.arange(len(scores), device=scores.device)
    if region == "last":
        return features
    is_dense = torch.zeros_like(features, dtype=torch.bool)
    is_dense[scores.argsort(descending=True, stable=True)[:dense]] = True
    return torch.cat((features[~is_dense], features[is_dense]))


def require_one_of(field: str, name: object, choices: Iterable[str]) -> str:
    """Return the name. Raises SuiteError unless it is one of the choices."""
    names, text = [*choices], str(name)[:60]
    if text not in names:
        hint = did_you_mean(text, names)
        raise SuiteError(f"{field}: expected one of {', '.join(names)}; found {text!r}{hint}")
    return text
