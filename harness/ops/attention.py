"""Block-sparse attention: O = softmax(scale Q K.T, over the allowed elements) V, for each head.

The mask says which blocks of keys each block of queries attends to. It is a matrix of cells
(formats/block_mask.py), and _block_attention.py has the shapes. A query without a key gives O = 0.

    FLOPs   4 head_dim for each allowed pair of a query and a key: elements are counted, not blocks
    bytes   Q and O, and the keys and values that some query selects

Contenders of format dense compute attention over all elements, or over all past ones if the problem
is causal, and are checked against that result.
"""

from collections.abc import Mapping

from torch import Tensor

from sparsebench.harness.ops._block_attention import (
    EXAMPLE,
    KEYS,
    MASK,
    QUERIES,
    AttentionFields,
    Geometry,
    counts,
    format_params,
    full,
    longest_sum,
    parts,
    queries_and_keys,
    scale_of,
    sizes,
    weights,
    without_unselected,
)
from sparsebench.harness.ops._op import Op
from sparsebench.kernels._kernel import DTYPES
from sparsebench.results.record import Problem


def definition(
    mask: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    kv_heads: int,
    batch: int,
    block: int | list[int],
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Return O [batch * m, heads * head_dim]."""
    factor, out = scale_of(scale, q, heads), q.new_empty(q.shape)
    geometry = Geometry(heads, kv_heads, batch, block, causal)
    k, v = without_unselected(mask, q, geometry, k, v)
    for part in parts(mask, q, k, geometry):
        p = weights(q[part.q], k[part.kv], part.allowed, factor)
        out[part.q] = p @ v[part.kv]
    return out


def spread(
    mask: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    kv_heads: int,
    batch: int,
    block: int | list[int],
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Carry the variance of each score, and the rounding of each weight, to O.

    A score has the variance scale² (q² @ (k²).T). An error ds of it changes O by p ds (v - O),
    because the weights p are normalised. Rounding p changes O by a part of p v.
    """
    factor, out = scale_of(scale, q, heads), q.new_empty(q.shape)
    geometry = Geometry(heads, kv_heads, batch, block, causal)
    k, v = without_unselected(mask, q, geometry, k, v)
    for part in parts(mask, q, k, geometry):
        of_q, of_k, of_v = q[part.q], k[part.kv], v[part.kv]
        p = weights(of_q, of_k, part.allowed, factor)
        o = p @ of_v
        p.square_()
        moved = (of_q.square() @ of_k.square().mT).mul_(factor**2).mul_(p)
        total = moved.sum(-1, True)
        around = -2 * o * (moved @ of_v) + o.square() * total
        out[part.q] = (p.add_(moved) @ of_v.square()).add_(around).clamp_(min=0).sqrt_()
    return out


def depth(
    mask: Tensor, q: Tensor, k: Tensor, v: Tensor, *, block: int | list[int], batch: int
) -> int:
    """Return the most keys that a query selects."""
    return longest_sum(mask, q, k, block=block, batch=batch)


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add for each of two products, per allowed element."""
    return float(4 * problem["head_dim"] * nnz["mask"])


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of Q and O, and of the keys and values that are selected."""
    return 2 * DTYPES[problem["dtype"]].itemsize * sum(queries_and_keys(problem, nnz))


OP = Op(
    fields=AttentionFields,
    operands={"mask": MASK, "q": QUERIES, "k": KEYS, "v": KEYS},
    definition=definition,
    spread=spread,
    depth=depth,
    flops=flops,
    fewest_bytes=fewest_bytes,
    parts=lambda problem: (problem["batch"] * problem["m"],),
    sizes=sizes,
    example=EXAMPLE,
    counts=counts,
    full=full,
    format_params=format_params,
)
