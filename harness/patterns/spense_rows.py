"""2 of each 4 in the upper rows, the lower rows dense: Spense's gate and up projections.

x x . .  . x . x
x . x .  . . x x
x x x x  x x x x
"""

from sparsebench.harness.patterns._hybrid import hybrid

PATTERN = hybrid("rows")
