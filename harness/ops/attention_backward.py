"""Backward pass of block-sparse attention: dQ, dK and dV, from dO, O and the log-sum-exp.

    P = exp(scale Q K.T - lse), over the allowed elements       dV = P.T dO
    dS = P * (dO V.T - sum of dO * O over a row)                dQ = scale dS K
                                                                dK = scale dS.T Q

             head_dim
             +------+
    dQ       |      | batch * m * heads              each token-major, heads of a token side by side
    dK       |      | batch * context * kv_heads
    dV       |      | batch * context * kv_heads
             +------+

The output is one tensor with these three, one below the other. The error of each is relative to its
own magnitude. The shapes of the operands are in _block_attention.py. O and lse are those of the
forward pass with the mask. The harness computes them in fp64 from Q, K and V whenever it draws
these anew.

    FLOPs   10 head_dim for each allowed pair of a query and a key: five products
    bytes   Q, O, dO, dQ, dK, dV, lse, and the keys and values that some query selects

Contenders of format dense sum over all elements (or all past ones if the problem is causal) with
the same O and lse, which is the work of a dense backward pass. An empty row (lse = -inf) has
gradients of 0; torch's fused backends, where exp(score - lse) would be inf, are unsupported.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebench.harness.ops._block_attention import (
    EXAMPLE,
    KEYS,
    MASK,
    QUERIES,
    AttentionFields,
    Geometry,
    Part,
    counts,
    format_params,
    full,
    geometry_of,
    longest_sum,
    parts,
    queries_and_keys,
    scale_of,
    scores,
    sizes,
    tokens_of,
    without_unselected,
)
from sparsebench.harness.ops._op import Op, Operand
from sparsebench.kernels._kernel import DTYPES
from sparsebench.results.record import Problem

LSE = Operand("activation", ("lse_rows", "m"), dict.fromkeys(DTYPES, torch.float32))


@dataclass
class Gradients:
    """Sums of dQ [batch * m, heads * D], dK and dV, in fp32 or fp64."""

    dq: Tensor
    dk: Tensor
    dv: Tensor

    @classmethod
    def zeros(cls, q: Tensor, k: Tensor) -> "Gradients":
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        dq, dk, dv = (torch.zeros_like(t, dtype=dtype) for t in (q, k, k))
        return cls(dq, dk, dv)

    def add(self, part: Part, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        self.dq[part.q] += dq
        self.dk[part.kv] += dk
        self.dv[part.kv] += dv

    def output(self, width: int) -> Tensor:
        """Return the three, one below the other."""
        return torch.cat([t.view(-1, width) for t in (self.dq, self.dk, self.dv)])


def definition(
    mask: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    *,
    heads: int,
    kv_heads: int,
    batch: int,
    block: int | list[int],
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Return dQ, dK and dV, one below the other, [..., head_dim]."""
    factor, gradients = scale_of(scale, q, heads), Gradients.zeros(q, k)
    geometry = Geometry(heads, kv_heads, batch, block, causal)
    k, v = without_unselected(mask, q, geometry, k, v)
    for part in parts(mask, q, k, geometry):
        of_q, of_k, of_do = q[part.q], k[part.kv], do[part.q]
        p = _weights(of_q, of_k, part, lse, factor)
        dp = of_do @ v[part.kv].mT
        delta = (of_do * o[part.q]).sum(-1, True)
        ds = (p * (dp - delta)).to(q.dtype)
        gradients.add(part, ds @ of_k * factor, ds.mT @ of_q * factor, p.to(q.dtype).mT @ of_do)
    return gradients.output(q.shape[1] // heads).to(q.dtype)


def spread(
    mask: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    *,
    heads: int,
    kv_heads: int,
    batch: int,
    block: int | list[int],
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Carry the variances of the scores, of dO V.T and of its row sum to the three gradients.

    P and dS are also rounded, before the products that they enter.
    """
    factor, variances = scale_of(scale, q, heads), Gradients.zeros(q, k)
    geometry = Geometry(heads, kv_heads, batch, block, causal)
    k, v = without_unselected(mask, q, geometry, k, v)
    for part in parts(mask, q, k, geometry):
        of_q, of_k, of_do = q[part.q], k[part.kv], do[part.q]
        p = _weights(of_q, of_k, part, lse, factor).to(q.dtype)
        delta = (of_do * o[part.q]).sum(-1, True)
        ds = (of_do @ v[part.kv].mT).sub_(delta).mul_(p).square_()
        q2, k2, do2 = of_q.square(), of_k.square(), of_do.square()
        around = (do2 * o[part.q].square()).sum(-1, True)
        var_dp = (do2 @ v[part.kv].square().mT).add_(around)
        moved = (q2 @ k2.mT).mul_(factor**2).add_(1)
        p2 = p.square_()
        var_ds = ds.mul_(moved).add_(var_dp.mul_(p2)).mul_(factor**2)
        variances.add(part, var_ds @ k2, var_ds.mT @ q2, p2.mul_(moved).mT @ do2)
    return variances.output(q.shape[1] // heads).sqrt()


def _weights(q: Tensor, k: Tensor, part: Part, lse: Tensor, scale: float) -> Tensor:
    """Return P [queries, keys], in fp32 or fp64; 0 where the log-sum-exp is -inf."""
    of_row = lse[part.row][:, None]
    p = ((q @ k.mT) * scale - of_row.to(torch.promote_types(q.dtype, torch.float32))).exp()
    return p.masked_fill(~part.allowed | (of_row == -torch.inf), 0)


def depth(
    mask: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    *,
    block: int | list[int],
    batch: int,
    heads: int,
    kv_heads: int,
) -> int:
    """Return the most keys that a query selects, or queries of a group that select a key."""
    keys = longest_sum(mask, q, k, block=block, batch=batch)
    return max(keys, len(q) // batch * (heads // kv_heads))


def derive(
    problem: Problem, operands: Mapping[str, Tensor], activations: Mapping[str, Tensor]
) -> None:
    """Write O and lse of the forward pass with the mask."""
    mask, q, geometry = operands["mask"], activations["q"], geometry_of(problem)
    factor = scale_of(problem["scale"], q, problem["heads"])
    k, v = without_unselected(mask, q, geometry, activations["k"], activations["v"])
    for part in parts(mask, q, k, geometry):
        of_q, of_k, of_v = q[part.q].double(), k[part.kv].double(), v[part.kv].double()
        of_row = scores(of_q, of_k, part.allowed, factor)
        lse = of_row.logsumexp(-1)
        p = of_row.sub_(lse[:, None]).exp_().masked_fill_((lse == -torch.inf)[:, None], 0)
        activations["o"][part.q] = (p @ of_v).to(q.dtype)
        activations["lse"][part.row] = lse.float()


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add for each of five products, per allowed element."""
    return float(10 * problem["head_dim"] * nnz["mask"])


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of the activations, and of the keys and values that are selected."""
    queries, keys = queries_and_keys(problem, nnz)
    rows, every, _ = results(problem)
    elements = 4 * queries + 2 * keys + 2 * every * problem["head_dim"]
    return int(DTYPES[problem["dtype"]].itemsize * elements + 4 * rows)


def results(problem: Problem) -> tuple[int, ...]:
    """Return the rows of dQ, dK and dV."""
    m, context = tokens_of(problem.fields)
    keys = problem["batch"] * context * problem["kv_heads"]
    return problem["batch"] * m * problem["heads"], keys, keys


OP = Op(
    fields=AttentionFields,
    operands={
        "mask": MASK,
        "q": QUERIES,
        "k": KEYS,
        "v": KEYS,
        "o": QUERIES,
        "lse": LSE,
        "do": QUERIES,
    },
    definition=definition,
    spread=spread,
    depth=depth,
    flops=flops,
    fewest_bytes=fewest_bytes,
    derive=derive,
    derived=("o", "lse"),
    parts=results,
    sizes=sizes,
    example=EXAMPLE,
    counts=counts,
    full=full,
    format_params=format_params,
)
