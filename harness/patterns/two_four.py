"""The best 2 of each 4 elements along k; the block is ignored.

x x . .  . x . x
. x x .  x x . .
x . . x  . . x x
"""

from sparsebench.errors import SuiteError
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Choose within each four."""
    if weight.k % 4:
        raise SuiteError(f"pattern two_four: expected k to be a multiple of 4, found {weight.k}")
    return Rule(weight.elements, group=4, kept=(2,))


PATTERN = Pattern(rule)
