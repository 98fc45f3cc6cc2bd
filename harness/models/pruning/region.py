"""Which features stay dense: as many as asked for, chosen by place or by score, moved to the end.

    scores       3 9 1 7        dense 2, scored:  permutation 0 2 | 1 3      (the rest | the best)
    features     0 1 2 3                last:     permutation 0 1 | 2 3

A score is the mean, over one feature's weights, of Wanda's |w_ij| ||x_j||. In a gated MLP the three
scores of an intermediate feature i, its row of gate, its row of up and its column of down, are each
divided by their mean over all features and then added up.
Source: Lee et al., arXiv 2606.10445, section 3.3.3 (last: SpenseGPT; scored: SpenseGPT+).
"""

import torch
from torch import Tensor

from sparsebench.errors import SuiteError

TILE = 128  # a GEMM's tile: neither region should end inside one
REGIONS = "last", "scored"


def dense_count(features: int, fraction: float) -> int:
    """Return how many features stay dense: the nearest multiple of a tile; of two, the larger.

    The tile is TILE, or the largest power of two below it that divides the features, and at most a
    quarter of them, so that rounding moves the fraction by 1/8 at most. It is 4 at least: a group
    of 4 must not straddle the regions, and SuiteError is raised where it would.
    """
    if features % 4:
        raise SuiteError(f"split: expected a multiple of 4 features, found {features}")
    sizes = (TILE, 64, 32, 16, 8)
    tile = next((size for size in sizes if features % size == 0 and 4 * size <= features), 4)
    return int(fraction * features / tile + 0.5) * tile


def scores_by_row(weight: Tensor, norms: Tensor) -> Tensor:
    """Return the score [n] of each row of a weight [n, k], from its inputs' norms [k]."""
    return _normalised((weight.abs() * norms).mean(dim=1))


def scores_by_column(weight: Tensor, norms: Tensor) -> Tensor:
    """Return the score [k] of each column of a weight [n, k], from its inputs' norms [k]."""
    return _normalised((weight.abs() * norms).mean(dim=0))


def permutation(region: str, scores: Tensor, dense: int) -> Tensor:
    """Return int64 [features]: the features in their new order, which is the old in each region."""
    features = torch.arange(len(scores), device=scores.device)
    if region == "last":
        return features
    stays = torch.zeros_like(features, dtype=torch.bool)
    stays[scores.argsort(descending=True, stable=True)[:dense]] = True
    return torch.cat((features[~stays], features[stays]))


def _normalised(scores: Tensor) -> Tensor:
    mean = scores.mean()
    return scores / mean if mean > 0 else scores
