"""Attention: the blocks nearest to a query's own position (Longformer's window; Mistral).

## ## .  .
## ## ## .
.  ## ## ##
.  .  ## ##
"""

from sparsebench.harness.patterns._attention import by_rank, distance

PATTERN = by_rank(lambda stack, scores: distance(stack))
