"""Attention: the blocks nearest to a query's own position (Longformer's window; Mistral).

## ## .  .
## ## ## .
.  ## ## ##
.  .  ## ##
"""

from sparsebench.harness.patterns._attention import distance, ranked
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Rank blocks by their distance."""
    return ranked(weight, lambda scores: distance(weight.stack))


PATTERN = Pattern(rule, causal=True)
