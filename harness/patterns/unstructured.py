"""The best elements anywhere; the block is ignored.

x . . x x .
. . x . . x
x . . . x .
"""

from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Choose among all elements."""
    return Rule(weight.elements, group=weight.elements.cells)


PATTERN = Pattern(rule)
