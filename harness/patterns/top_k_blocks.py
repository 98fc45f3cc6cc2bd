"""Attention: the best blocks of each row, equally many in every row that has enough of them.

## .  ## .
.  ## .  ##      as if each block of queries selected its top-k blocks (MoBA, NSA, VSA)
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
