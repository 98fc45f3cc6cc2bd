"""The best blocks anywhere.

## . . ##
. . ## .
. ## ## ##
"""

from sparsebench.harness.patterns._pattern import Pattern, Rule

PATTERN = Pattern(lambda weight: Rule(weight.blocks, group=weight.blocks.cells))
