"""Wanda: of every 4 elements keep the 2 of largest |w_ij| ||x_j||_2, and update none.

||x_j|| is the norm of input j over the calibration tokens.
Source: Sun et al., arXiv 2306.11695, section 3.
"""

from torch import Tensor

from sparsebench.harness.pruning.two_four import keep_two


def prune(weight: Tensor, x: Tensor, columns: int) -> Tensor:
    """Return the weight [n, k] with its first `columns` columns 2:4, from inputs x [tokens, k]."""
    return keep_two(weight, weight.abs() * x.norm(dim=0), columns)
