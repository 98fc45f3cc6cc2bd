"""Choose the features that stay dense, by position or by score, and move them to the end.

    scores       3 9 1 7        dense 2, scored:  permutation 0 2 | 1 3      (the rest | the best)
    features     0 1 2 3                last:     permutation 0 1 | 2 3

A score is the mean of Wanda's |w_ij| ||x_j|| over one feature's weights. An intermediate feature of
a gated MLP has three scores: of its row of gate, its row of up, and its column of down. Each is
divided by its mean over all features, then the three are added.
Source: Lee et al., arXiv 2606.10445, section 3.3.3 (last: SpenseGPT; scored: SpenseGPT+).
"""

import torch
from torch import Tensor

from sparsebench.errors import SuiteError

TILE = 128  # a GEMM's tile: neither region should end inside one
REGIONS = "last", "scored"


def dense_count(features: int, fraction: float) -> int:
    """Return the number of dense features: the nearest multiple of a tile, rounded half up.

    The tile is TILE, or the largest smaller power of two that divides the features. It is at most a
    quarter of the features, so that rounding changes the fraction by 1/8 at most, and at least 4,
    because a group of 4 must not straddle the regions. Raises SuiteError if 4 does not divide the
    features.
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
    """Return the new order of the features, int64 [features]; it is stable within each region."""
    features = torch.arange(len(scores), device=scores.device)
    if region == "last":
        return features
    is_dense = torch.zeros_like(features, dtype=torch.bool)
    is_dense[scores.argsort(descending=True, stable=True)[:dense]] = True
    return torch.cat((features[~is_dense], features[is_dense]))


def _normalised(scores: Tensor) -> Tensor:
    mean = scores.mean()
    return scores / mean if mean > 0 else scores
