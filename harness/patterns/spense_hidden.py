"""For an MLP: all weights are dense in the same hidden units.

    gate and up [n, k]    spense_rows       hidden units are rows
    down [k, n]           spense_columns    hidden units are columns

The field for hidden units is n in an MLP and `intermediate` in a decoder. A decoder's projections
are split along rows.
"""

from sparsebench.harness.patterns import spense_columns, spense_rows
from sparsebench.harness.patterns._hybrid import dense_fraction
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Split the weight along its hidden units."""
    from_hidden = weight.sizes[1] in ("n", "intermediate")
    split = spense_columns.PATTERN if from_hidden else spense_rows.PATTERN
    return split.rule(weight)


PATTERN = Pattern(rule, dense_fraction)
