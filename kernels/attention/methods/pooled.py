"""Pooled: the product of the mean query and the mean key of two blocks, for each KV head.

    scores[h, i, j] = scale · mean(Q_i, of all heads that read h) · mean(K_j)        in fp32

The mean of a block of queries contains its last ones. So with the causal rule the selection, but no
key, depends on later tokens of the same block. A NaN in a block makes its scores NaN.

With pool="max", the largest values of a block stand for it, each of its D for itself. Or a caller
brings what stands for blocks, which was computed where queries and keys were.
"""

import struct

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench._discovery import unknown
from sparsebench.errors import Unsupported
from sparsebench.formats._format import describe
from sparsebench.kernels._common.tape import MatrixProduct, on_tape
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
    pool: str = "mean",
    pooled_q: Tensor | None = None,
    pooled_k: Tensor | None = None,
) -> Scored:
    """Return one list for each KV head; the causal rule changes no score.

    pool                what stands for a block: "mean" or "max"
    pooled_q, pooled_k  in its place: floats [batch, H_kv, blocks, D]
    """
    if pool not in [*POOLS]:  # a list of names has no hash
        raise Unsupported(f"pooled: {unknown('a pool', str(pool), POOLS)}")
    queries = _pooled("pooled_q", pooled_q, q, block, k.shape[2], pool)
    keys = _pooled("pooled_k", pooled_k, k, block, k.shape[2], pool)
    pairs = queries.flatten(0, 1), keys.flatten(0, 1).mT
    added, beta = (queries.new_empty(()), 0) if bias is None else (bias.flatten(0, 1), 1)
    products = torch.baddbmm(added, *pairs, beta=beta, alpha=scale)
    if not torch.compiler.is_compiling():
        product = MatrixProduct(queries, keys, products, alpha=struct.pack("d", scale))
        on_tape(products, call=product, complete=pool == "mean" and bias is None)
    return Scored(products.unflatten(0, keys.shape[:2]), q, k, v)


def largest(x: Tensor, block: int, groups: int) -> Tensor:
    """Return the largest values of blocks and groups of heads, fp32 [batch, groups, blocks, D]."""
    whole = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % block), value=-torch.inf)
    blocks: Tensor = whole.unflatten(2, (groups, -1)).unflatten(1, (-1, block))
    return blocks.amax((2, 4)).transpose(1, 2).float()


POOLS = {"mean": means, "max": largest}


def _pooled(
    name: str, pooled: Tensor | None, x: Tensor, block: int, groups: int, pool: str
) -> Tensor:
    """Return what stands for each block of x, fp32. Raises Unsupported."""
    if pooled is None:
        return POOLS[pool](x.detach(), block, groups)
    size = [x.shape[0], groups, -(-x.shape[1] // block), x.shape[3]]
    fits = isinstance(pooled, Tensor) and pooled.is_floating_point()
    if not fits or [*pooled.shape] != size or pooled.device != x.device:
        actual = f"{describe(pooled)} on {getattr(pooled, 'device', 'no device')}"
        raise Unsupported(f"pooled: {name}: expected floats {size} on {x.device}, found {actual}")
    return pooled.detach().float()


METHOD = Method(score, launches=True)
