"""Shared by the three Spense patterns: a 2:4 part, then a dense part. Source: arXiv:2606.10445.

At sparsity s the fraction 1 - 2 s of the rows (or columns) stays dense.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight
from sparsebench.harness.patterns.two_four import PATTERN as TWO_FOUR

TILE = 128
"""Rows or columns of a product's tile; the dense part of a Spense matrix is whole tiles."""


def hybrid(split: str) -> Pattern:
    """Return the pattern whose last rows, or last columns, are dense."""

    def rule(weight: Weight) -> Rule:
        n, k = weight.n, weight.k
        by_rows = split == "rows"
        return replace(
            TWO_FOUR.rule(weight), front=lambda s: (front(n, s), k) if by_rows else (n, front(k, s))
        )

    return Pattern(rule, lambda fields: {**dense_fraction(fields), "split": split})


def front(size: int, sparsity: float) -> int:
    """Return the number of 2:4 rows or columns; the rest is whole tiles, or fours if none fit."""
    step = 4 if size % TILE else TILE
    return size - min(size, max(0, step * round(size * (1 - 2 * sparsity) / step)))


def dense_fraction(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Spense format's parameter for a problem's sparsity."""
    return {"dense_fraction": round(1 - 2 * fields["sparsity"], 6)}
