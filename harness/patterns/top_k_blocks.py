"""Attention: the best blocks of each row, the same number in every row that has so many.

## .  ## .
.  ## .  ##      as a selection of top-k blocks per block of queries leaves them (MoBA, NSA, VSA)
## .  ## .
.  .  ## ##
"""

from torch import Tensor

from sparsebench.harness.patterns._attention import in_rows, past, ranked
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Rank blocks by their place in the row."""

    def rank(scores: Tensor) -> Tensor:
        return in_rows(scores, past(weight.stack).to(scores.device)) + 1

    return ranked(weight, rank)


PATTERN = Pattern(rule, causal=True)
