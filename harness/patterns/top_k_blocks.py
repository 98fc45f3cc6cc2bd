"""Attention: the best blocks of each row, equally many in every row that has enough of them.

## .  ## .
.  ## .  ##      as if each block of queries selected its top-k blocks (MoBA, NSA, VSA)
## .  ## .
.  .  ## ##
"""

from sparsebench.harness.patterns._attention import by_rank, in_rows, past

PATTERN = by_rank(lambda stack, scores: in_rows(scores, past(stack)) + 1)
