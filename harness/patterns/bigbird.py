"""Attention: a window of three blocks, the first block as global tokens, and random blocks.

## ## ## ##
## ## ## .
## ## ## ##      each row has the same number of random blocks, but for rounding
## .  ## ##

Source: BigBird, arXiv:2007.14062.
"""

from torch import Tensor

from sparsebench.harness.patterns._attention import distance, in_rows, past, ranked
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Rank window and global blocks first, then random ones, in each row in turn."""

    def rank(scores: Tensor) -> Tensor:
        first = distance(weight.stack) <= 1
        first[0] = first[:, 0] = True
        ranks = in_rows(scores, past(weight.stack) & ~first) + 1
        return ranks.masked_fill_(first.to(scores.device), 0)

    return ranked(weight, rank)


PATTERN = Pattern(rule, causal=True)
