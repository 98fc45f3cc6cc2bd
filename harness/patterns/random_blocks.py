"""Attention: random blocks of each head anywhere, and those at a query's own position.

## .  ## ##
.  ## .  .
.  .  ## .
.  ## ## ##
"""

from sparsebench.harness.patterns._attention import by_rank

PATTERN = by_rank(lambda stack, scores: scores.max().long() - scores)
