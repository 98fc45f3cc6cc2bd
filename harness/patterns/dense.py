"""Everything is kept; the block says nothing."""

from sparsebench.harness.grid import Grid
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Keep the one cell that there is."""
    return Rule(Grid(weight.n, weight.k, weight.n, weight.k), group=1)


PATTERN = Pattern(rule)
