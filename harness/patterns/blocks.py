"""The best blocks anywhere.

## . . ##
. . ## .
. ## ## ##
"""

from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Choose among all blocks."""
    return Rule(weight.blocks, group=weight.blocks.cells)


PATTERN = Pattern(rule)
