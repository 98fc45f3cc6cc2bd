"""Attention: a window of three blocks, the first block as global tokens, and random blocks.

## ## ## ##
## ## ## .
## ## ## ##      each row has the same number of random blocks, but for rounding
## .  ## ##

Source: BigBird, arXiv:2007.14062.
"""

from torch import Tensor

from sparsebench.harness.inputs.grid import Stack
from sparsebench.harness.patterns._attention import by_rank, distance, in_rows, past


def rank(stack: Stack, scores: Tensor) -> Tensor:
    """Rank window and global blocks first, then random ones, in each row in turn."""
    first = distance(stack) <= 1
    first[0] = first[:, 0] = True
    ranks = in_rows(scores, past(stack) & ~first) + 1
    return ranks.masked_fill_(first.to(scores.device), 0)


PATTERN = by_rank(rank)
