"""The best blocks, the same number in every block row.

## . ## .
. ## . ##
## ## . .
"""

from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Choose within each block row."""
    return Rule(weight.blocks, group=weight.blocks.columns)


PATTERN = Pattern(rule)
