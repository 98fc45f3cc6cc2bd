"""The best 4 of each 6 elements along k; the block is ignored.

x x . x x .  . x x . x x
. x x . x x  x x x x . .
"""

from sparsebench.harness.patterns._pattern import n_of_m

PATTERN = n_of_m("four_six", 4, 6)
