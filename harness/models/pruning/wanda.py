"""Wanda: keep the largest |w_ij| ||x_j||_2 of a pattern's groups, and update no weight.

||x_j|| is the norm of input j over the calibration tokens.
Source: Sun et al., arXiv 2306.11695, section 3.
"""

from torch import Tensor

from sparsebench.harness.models.pruning.pattern import TWO_FOUR, Pattern, keep


def prune(weight: Tensor, x: Tensor, columns: int, pattern: Pattern = TWO_FOUR) -> Tensor:
    """Return the weight [n, k], its first `columns` columns pruned by inputs x [tokens, k]."""
    return keep(weight, weight.abs() * x.norm(dim=0), columns, pattern)
