"""Attention: random blocks of each head anywhere, and those at a query's own position.

## .  ## ##
.  ## .  .
.  .  ## .
.  ## ## ##
"""

from torch import Tensor

from sparsebench.harness.patterns._attention import ranked
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Rank blocks by their score."""

    def rank(scores: Tensor) -> Tensor:
        return scores.max().long() - scores

    return ranked(weight, rank)


PATTERN = Pattern(rule, causal=True)
