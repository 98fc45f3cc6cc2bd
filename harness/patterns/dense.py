"""Every element is kept; the block is ignored."""

from sparsebench.harness.inputs.grid import ValueGrid
from sparsebench.harness.patterns._pattern import Pattern, Rule

PATTERN = Pattern(lambda weight: Rule(ValueGrid(weight.n, weight.k, weight.n, weight.k), group=1))
