"""Prune a gated MLP or a linear layer beside a dense region, and measure the error.

    region     chooses the dense features and moves them to the end
    gate, up   sparse rows are pruned together from X, as one matrix
    down       is pruned from the activations of the pruned gate and up, so that it can compensate
               their errors

Weights are pruned in fp32 and returned with their dtype and device. Every -0.0 becomes +0.0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsebench.errors import SuiteError
from sparsebench.harness.models.pruning import region, spensegpt
from sparsebench.harness.models.pruning.mlp import (
    GatedMLP,
    PrunedLinear,
    PrunedMLP,
    require_inputs,
    require_one_of,
    require_weight,
)
from sparsebench.harness.models.pruning.pattern import Pattern, input_norms, magnitude, wanda

Prune = Callable[[Tensor, Tensor, int, Pattern], Tensor]
METHODS: dict[str, Prune] = {"magnitude": magnitude, "wanda": wanda, "spensegpt": spensegpt.prune}
SPLITS = "rows", "columns"


@dataclass(frozen=True)
class Recipe:
    """How to prune.

    method   one of METHODS
    dense    fraction of the features that stays dense; 0 prunes all
    region   how dense features are chosen: one of region.REGIONS
    pattern  of the other features: N:M, a fraction to prune anywhere, or blocks (pattern.py)
    """

    method: str = "spensegpt"
    dense: float = 0.5
    region: str = "scored"
    pattern: str = "2:4"

    def __post_init__(self) -> None:
        require_one_of("method", self.method, list(METHODS))
        require_one_of("region", self.region, list(region.REGIONS))
        if not 0 <= self.dense <= 1:
            raise SuiteError(f"dense: expected a fraction of 0 to 1, found {self.dense:g}")
        Pattern.of(self.pattern)

    @property
    def mask_pattern(self) -> Pattern:
        return Pattern.of(self.pattern)

    def prune(self, weight: Tensor, x: Tensor, columns: int) -> Tensor:
        """Prune the first columns of a weight [n, k] from inputs x [tokens, k]."""
        return METHODS[self.method](weight, x, columns, self.mask_pattern)


@torch.no_grad()
def prune_mlp(mlp: GatedMLP, x: Tensor, recipe: Recipe) -> PrunedMLP:
    """Prune from calibration inputs x [tokens, k]. Raises SuiteError for unfit sizes or values."""
    h, k = mlp.gate.shape
    require_inputs(x, k)
    _require_groups("gate and up", k)
    dense = region.dense_count(h, recipe.dense)
    sparse = h - dense
    x, full = x.float(), mlp.to(torch.float32)
    order = region.permutation(recipe.region, _scores(full, x), dense)
    full = full.permuted(order)
    both = recipe.prune(torch.cat((full.gate[:sparse], full.up[:sparse])), x, k)
    gate, up = (
        _stored(torch.cat((pruned, weight[sparse:])), mlp.gate.dtype)
        for pruned, weight in zip(both.tensor_split(2), (full.gate, full.up), strict=True)
    )
    seen = GatedMLP(gate.float(), up.float(), full.down, mlp.activation).hidden(x)
    down = _stored(recipe.prune(full.down, seen, sparse), mlp.down.dtype)
    return PrunedMLP(GatedMLP(gate, up, down, mlp.activation), order, dense)


@torch.no_grad()
def prune_linear(weight: Tensor, x: Tensor, recipe: Recipe, split: str) -> PrunedLinear:
    """Prune a weight [n, k], split by `rows` or `columns`, from inputs x [tokens, k]."""
    require_weight("weight", weight)
    n, k = weight.shape
    require_inputs(x, k)
    _require_groups("weight", k)
    require_one_of("split", split, list(SPLITS))
    x, full = x.float(), weight.float()
    by_row = split == "rows"
    dense = region.dense_count(n if by_row else k, recipe.dense)
    score = region.scores_by_row if by_row else region.scores_by_column
    order = region.permutation(recipe.region, score(full, input_norms(x)), dense)
    if by_row:
        top, rest = full[order].split((n - dense, dense))
        pruned = torch.cat((recipe.prune(top, x, k), rest))
    else:
        pruned = recipe.prune(full[:, order], x[:, order], k - dense)
    return PrunedLinear(_stored(pruned, weight.dtype), order, dense, split)


@torch.no_grad()
def mlp_errors(mlp: GatedMLP, pruned: PrunedMLP, x: Tensor) -> dict[str, float]:
    """Return ||XW^T - XW'^T|| / ||XW^T|| of gate, up and down, and the error of the whole output.

    x [tokens, k] should be tokens that pruning did not see. In both products of down, the inputs
    are the outputs of the pruned gate and up; if these are all zero, its error is 0.
    """
    require_inputs(x, mlp.gate.shape[1])
    x, before = x.float(), mlp.to(torch.float32).permuted(pruned.permutation)
    after = pruned.mlp.to(torch.float32)
    seen = after.hidden(x)
    return {
        "gate": _error(linear(x, after.gate), linear(x, before.gate)),
        "up": _error(linear(x, after.up), linear(x, before.up)),
        "down": _error(linear(seen, after.down), linear(seen, before.down)) if seen.any() else 0.0,
        "output": _error(linear(seen, after.down), before(x)),
    }


@torch.no_grad()
def linear_errors(weight: Tensor, pruned: PrunedLinear, x: Tensor) -> dict[str, float]:
    """Return ||XW^T - XW'^T|| / ||XW^T|| of a layer for inputs x [tokens, k]."""
    require_inputs(x, weight.shape[1])
    x, before, after = x.float(), weight.float(), pruned.weight.float()
    order = pruned.permutation
    if pruned.split == "rows":
        return {"output": _error(linear(x, after), linear(x, before[order]))}
    return {"output": _error(linear(x[:, order], after), linear(x, before))}


def _scores(mlp: GatedMLP, x: Tensor) -> Tensor:
    """Return the scores [h] of the intermediate features, SpenseGPT+'s sum of three."""
    norms = input_norms(x)
    by_row = region.scores_by_row(mlp.gate, norms) + region.scores_by_row(mlp.up, norms)
    return by_row + region.scores_by_column(mlp.down, input_norms(mlp.hidden(x)))


def _stored(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the dtype of storage; adding 0 turns -0.0, which rounding may give, into +0.0."""
    return weight.to(dtype) + 0.0


def _require_groups(name: str, k: int) -> None:
    if k % 4:
        raise SuiteError(f"{name}: expected a multiple of 4 elements per row, found {k}")


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative distance in fp64; raise SuiteError for an expected output of zeros."""
    distance, size = (float(t.double().norm()) for t in (actual - expected, expected))
    if not size:
        raise SuiteError("weights: expected an output to compare with, found only zeros")
    return distance / size
