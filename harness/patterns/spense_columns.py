"""2 of each 4 in the left columns, the right columns dense: Spense's down projection.

x x . .  x x x x
. x . x  x x x x
x . . x  x x x x
"""

from sparsebench.harness.patterns._hybrid import hybrid

PATTERN = hybrid("columns")
