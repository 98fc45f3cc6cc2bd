"""MoBA: the product of a query and the mean key of a block, for each query and head.

    scores[h, t, j] = q[t, h] . mean(K_j)                                           (_moba.py)

The own block of a query is kept in any case, and counts in `keep`. Causal.
"""

from torch import Tensor

from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.attention._moba import FORCED, score_blocks
from sparsebench.kernels.attention.methods._method import Method, Scored


def score(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    block: int,
    causal: bool,
    bias: Tensor | None = None,
) -> Scored:
    """Return a list for each query and head; the scale changes no choice of `keep` blocks."""
    refuse(None if causal else "moba: expected a causal mask, found another")
    return Scored(score_blocks(q.detach(), k.detach(), block, bias), q, k, v)


METHOD = Method(score, block=512, queries=1, launches=True, **FORCED)
