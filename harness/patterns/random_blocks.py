"""Attention: random blocks of each head anywhere, and those at a query's own position.

## .  ## ##
.  ## .  .
.  .  ## .
.  ## ## ##
"""

from sparsebench.harness.patterns._attention import ranked
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Rank blocks by their score."""
    return ranked(weight, lambda scores: scores.max().long() - scores)


PATTERN = Pattern(rule, causal=True)
