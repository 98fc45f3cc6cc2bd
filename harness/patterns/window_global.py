"""Attention: a window, and global tokens in the first block (Longformer, arXiv:2004.05150).

## ## ## ##      the first block sees all and is seen by all
## ## .  .
## ## ## .
## .  ## ##
"""

from torch import Tensor

from sparsebench.harness.inputs.grid import Stack
from sparsebench.harness.patterns._attention import by_rank, distance


def rank(stack: Stack, scores: Tensor) -> Tensor:
    """Rank the first row and column first, then blocks by their distance."""
    ranks = distance(stack) + 1
    ranks[0] = ranks[:, 0] = 0
    return ranks


PATTERN = by_rank(rank)
