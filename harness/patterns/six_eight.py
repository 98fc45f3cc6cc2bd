"""The best 6 of each 8 elements along k; the block is ignored.

x x . x x x . x  x x x x x . . x
. x x x x . x x  . . x x x x x x
"""

from sparsebench.harness.patterns._pattern import n_of_m

PATTERN = n_of_m("six_eight", 6, 8)
