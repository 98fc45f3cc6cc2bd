"""Attention: the blocks nearest to a query's own position (Longformer's window; Mistral).

## ## .  .
## ## ## .
.  ## ## ##
.  .  ## ##
"""

from torch import Tensor

from sparsebench.harness.patterns._attention import distance, ranked
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Rank blocks by their distance."""

    def rank(scores: Tensor) -> Tensor:
        return distance(weight.stack).to(scores.device).expand(scores.shape)

    return ranked(weight, rank)


PATTERN = Pattern(rule, causal=True)
