"""Every element is kept; the block is ignored."""

from sparsebench.harness.inputs.grid import Grid
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Keep the only cell."""
    return Rule(Grid(weight.n, weight.k, weight.n, weight.k), group=1)


PATTERN = Pattern(rule)
