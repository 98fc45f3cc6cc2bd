"""The best 2 of each 4 elements along k; the block is ignored.

x x . .  . x . x
. x x .  x x . .
x . . x  . . x x
"""

from sparsebench.harness.patterns._pattern import n_of_m

PATTERN = n_of_m("two_four", 2, 4)
