"""2 of each 4 in the upper rows, the lower rows dense: Spense's gate and up projections.

x x . .  . x . x
x . x .  . . x x
x x x x  x x x x
"""

from dataclasses import replace

from sparsebench.harness.patterns._hybrid import dense_fraction, front
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight
from sparsebench.harness.patterns.two_four import PATTERN as TWO_FOUR


def rule(weight: Weight) -> Rule:
    """Choose within each four of the upper rows."""
    n, k = weight.n, weight.k
    return replace(TWO_FOUR.rule(weight), front=lambda sparsity: (front(n, sparsity), k))


PATTERN = Pattern(rule, lambda fields: {**dense_fraction(fields), "split": "rows"})
