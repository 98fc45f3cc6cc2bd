"""Attention: the best blocks of each row, equally many in every row that has enough of them.

## .  ## .
.  ## .  ##      as if each block of queries selected its top-k blocks (MoBA, NSA, VSA)
## .  ## .
.  .  ## ##
"""

from sparsebench.harness.patterns._attention import in_rows, past, ranked
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Rank blocks by their place in the row."""
    return ranked(weight, lambda scores: in_rows(scores, past(weight.stack)) + 1)


PATTERN = Pattern(rule, causal=True)
