"""Attention: a window, and global tokens in the first block (Longformer, arXiv:2004.05150).

## ## ## ##      the first block sees all and is seen by all
## ## .  .
## ## ## .
## .  ## ##
"""

from sparsebench.harness.patterns._attention import distance, ranked
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Rank the first row and column first, then blocks by their distance."""
    near = distance(weight.stack) + 1
    near[0] = near[:, 0] = 0
    return ranked(weight, lambda scores: near.to(scores.device).expand(scores.shape))


PATTERN = Pattern(rule, causal=True)
