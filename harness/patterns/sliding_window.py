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
    near = distance(weight.stack)
    return ranked(weight, lambda scores: near.to(scores.device).expand(scores.shape))


PATTERN = Pattern(rule, causal=True)
