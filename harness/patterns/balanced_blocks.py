"""The best blocks, the same number in every block row.

## . ## .
. ## . ##
## ## . .
"""

from sparsebench.harness.patterns._pattern import Pattern, Rule

PATTERN = Pattern(lambda weight: Rule(weight.blocks, group=weight.blocks.columns))
