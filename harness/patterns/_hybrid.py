"""What the three Spense patterns share: 2:4 in front, whole behind. Source: arXiv:2606.10445.

Sparsity s leaves the fraction 1 - 2 s of the rows (or columns) whole.
"""

from collections.abc import Mapping
from typing import Any

TILE = 128
"""Rows or columns of a matrix product's tile; the dense part of a Spense matrix is whole tiles."""


def front(size: int, sparsity: float) -> int:
    """Return how many rows or columns are 2:4: all but whole tiles, or fours where no tile fits."""
    step = 4 if size % TILE else TILE
    return size - min(size, max(0, step * round(size * (1 - 2 * sparsity) / step)))


def dense_fraction(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameter of the format Spense that follows from a problem's sparsity."""
    return {"dense_fraction": round(1 - 2 * fields["sparsity"], 6)}
