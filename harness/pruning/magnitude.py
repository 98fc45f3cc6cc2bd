"""Magnitude pruning: of every 4 elements keep the 2 largest, |w_ij|. No calibration enters."""

from torch import Tensor

from sparsebench.harness.pruning.two_four import keep_two


def prune(weight: Tensor, x: Tensor, columns: int) -> Tensor:
    """Return the weight [n, k] with its first `columns` columns 2:4; x [tokens, k] is not read."""
    return keep_two(weight, weight.abs(), columns)
