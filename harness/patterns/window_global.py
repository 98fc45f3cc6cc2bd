"""Attention: a window, and global tokens in the first block (Longformer, arXiv:2004.05150).

## ## ## ##      the first block sees all and is seen by all
## ## .  .
## ## ## .
## .  ## ##
"""

from torch import Tensor

from sparsebench.harness.patterns._attention import distance, ranked
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Rank the first row and column first, then blocks by their distance."""

    def rank(scores: Tensor) -> Tensor:
        ranks = distance(weight.stack) + 1
        ranks[0] = ranks[:, 0] = 0
        return ranks

    return ranked(weight, rank)


PATTERN = Pattern(rule, causal=True)
