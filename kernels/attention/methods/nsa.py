"""NSA: the weights of complete blocks in its compressed branch, for each query and KV head.

    scores[h, t, j] = sum of p[t, j] over the heads that read h          (_nsa.py has p)

Attention is the selected branch alone; `sparsebench.nsa_attention` has the other two and the gates.
The first block, a query's own and the one before are kept in any case. Causal.
"""

from torch import Tensor

from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.attention._nsa import FORCED, compress
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
    """Return a list for each query and KV head."""
    refuse(None if causal else "nsa: expected a causal mask, found another")
    scores = compress(q.detach(), k.detach(), v.detach(), block, scale, bias)[1]
    return Scored(scores, q, k, v)


METHOD = Method(score, block=64, queries=1, launches=True, **FORCED)
