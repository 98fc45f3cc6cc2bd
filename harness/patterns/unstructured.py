"""The best elements anywhere; the block is ignored.

x . . x x .
. . x . . x
x . . . x .
"""

from sparsebench.harness.patterns._pattern import Pattern, Rule

PATTERN = Pattern(lambda weight: Rule(weight.elements, group=weight.elements.cells))
