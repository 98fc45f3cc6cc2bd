"""Magnitude pruning: keep the largest |w_ij| of a pattern's groups. No calibration enters."""

from torch import Tensor

from sparsebench.harness.models.pruning.pattern import TWO_FOUR, Pattern, keep


def prune(weight: Tensor, x: Tensor, columns: int, pattern: Pattern = TWO_FOUR) -> Tensor:
    """Return the weight [n, k], its first `columns` columns pruned; x [tokens, k] is not read."""
    return keep(weight, weight.abs(), columns, pattern)
