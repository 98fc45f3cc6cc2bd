"""Of an MLP: all weights are dense in the same hidden units.

    gate and up [n, k]    spense_rows       hidden units are rows
    down [k, n]           spense_columns    hidden units are columns

The fields of an MLP call its hidden units n.
"""

from sparsebench.harness.patterns import spense_columns, spense_rows
from sparsebench.harness.patterns._hybrid import dense_fraction
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Split the weight along its hidden units."""
    to_hidden = weight.sizes[0] == "n"
    return spense_rows.rule(weight) if to_hidden else spense_columns.rule(weight)


PATTERN = Pattern(rule, dense_fraction)
