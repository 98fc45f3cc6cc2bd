"""2:4 sparsity: of every aligned 4 elements of a row, at most 2 are not zero.

    columns   0 1 2 3   4 5 6 7   |   8 9 10 11
              x . x .   . x x .   |   x x x  x        keep_two(weight, scores, columns=8)

Columns from there on are left as they are: the dense region of a weight that is split by columns.
"""

import torch
from torch import Tensor


def kept(scores: Tensor) -> Tensor:
    """Return where the 2 highest of every 4 scores along the last axis are; of equals, the first.

    Scores [..., 4 g], a bool tensor of the same shape comes back.
    """
    groups = scores.unflatten(-1, (-1, 4))
    order = groups.argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., :2], True)
    return chosen.flatten(-2)


def keep_two(weight: Tensor, scores: Tensor, columns: int) -> Tensor:
    """Prune the first `columns` columns of a weight [n, k] by scores [n, k]; the rest stay."""
    sparse = weight[:, :columns].where(kept(scores[:, :columns]), 0)
    return torch.cat((sparse, weight[:, columns:]), dim=1)
