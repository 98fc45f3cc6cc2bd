"""Pooled: the product of the mean query and the mean key of two blocks, for each KV head.

    scores[h, i, j] = scale · mean(Q_i, of all heads that read h) · mean(K_j)        in fp32

The mean of a block of queries contains its last ones. So with the causal rule the selection, but no
key, depends on later tokens of the same block. A NaN in a block makes its scores NaN.
"""

import torch
from torch import Tensor

from sparsebench.kernels.attention._selecting import means
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
    """Return one list for each KV head; the causal rule changes no score."""
    queries, keys = (means(x.detach(), block, k.shape[2]) for x in (q, k))
    pairs = queries.flatten(0, 1), keys.flatten(0, 1).mT
    added, beta = (queries.new_empty(()), 0) if bias is None else (bias.flatten(0, 1), 1)
    products = torch.baddbmm(added, *pairs, beta=beta, alpha=scale)
    return Scored(products.unflatten(0, keys.shape[:2]), q, k, v)


METHOD = Method(score)
