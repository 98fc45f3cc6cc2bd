"""Block-sparse attention: O = softmax(scale Q K.T, over the allowed elements) V, for each head.

The mask says which blocks of keys each block of queries attends to. It is a matrix of cells
(formats/block_mask.py), and _block_attention.py has the shapes. A query without a key gives O = 0.

    FLOPs   4 head_dim for each allowed pair of a query and a key: elements are counted, not blocks
    bytes   Q and O, and the keys and values that some query selects

Contenders of format dense compute attention over all elements, or over all past ones if the problem
is causal, and are checked against that result.

The op `attention_backward` gives dQ, dK and dV, from dO, O and the log-sum-exp:

    P = exp(scale Q K.T - lse), over the allowed elements       dV = P.T dO
    dS = P * (dO V.T - sum of dO * O over a row)                dQ = scale dS K
                                                                dK = scale dS.T Q

             head_dim
             +------+
    dQ       |      | batch * m * heads              each token-major, heads of a token side by side
    dK       |      | batch * context * kv_heads
    dV       |      | batch * context * kv_heads
             +------+

Its output is one tensor with these three, one below the other. The error of each is relative to its
own magnitude. O and lse are those of the forward pass with the mask. The harness computes them in
fp64 from Q, K and V whenever it draws these anew.

    FLOPs   10 head_dim for each allowed pair of a query and a key: five products
    bytes   Q, O, dO, dQ, dK, dV, lse, and the keys and values that some query selects

Contenders of format dense sum over all elements (or all past ones if the problem is causal) with
the same O and lse, which is the work of a dense backward pass. An empty row (lse = -inf) has
gradients of 0; torch's fused backends, where exp(score - lse) would be inf, are unsupported.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsebench.harness.ops import _block_attention as blocks
from sparsebench.harness.ops._block_attention import HeadPart
from sparsebench.harness.ops._op import Op, Operand, Sample, Values
from sparsebench.kernels._kernel import DTYPES
from sparsebench.results.record import Problem


def definition(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, *, fields: Values) -> Tensor:
    """Return O [batch * m, heads * head_dim]."""
    out = q.new_empty(q.shape)
    for part, _, _, of_v, p in _softmax(mask, q, k, v, fields):
        out[part.q] = p @ of_v
    return out


def spread(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, *, fields: Values) -> Tensor:
    """Return the spread of O, which `answer` explains."""
    return answer(mask, q, k, v, fields=fields)[1]


def answer(
    mask: Tensor, q: Tensor, k: Tensor, v: Tensor, *, fields: Values
) -> tuple[Tensor, Tensor]:
    """Return O and its spread, both [batch * m, heads * head_dim].

    The spread carries the variance of each score, and the rounding of each weight, to O. A score
    has the variance scale² (q² @ (k²).T). An error ds of it changes O by p ds (v - O), because the
    weights p are normalised. Rounding p changes O by a part of p v.
    """
    factor, out, spreads = blocks.scale_of(fields), q.new_empty(q.shape), q.new_empty(q.shape)
    for part, of_q, of_k, of_v, p in _softmax(mask, q, k, v, fields):
        out[part.q] = o = p @ of_v
        p.square_()
        moved = (of_q.square().mul_(factor**2) @ of_k.square().mT).mul_(p)
        around = -2 * o * (moved @ of_v) + o.square() * moved.sum(-1, True)
        spreads[part.q] = (p.add_(moved) @ of_v.square()).add_(around).clamp_(min=0).sqrt_()
    return out, spreads


def _softmax(
    mask: Tensor, q: Tensor, k: Tensor, v: Tensor, fields: Values
) -> Iterator[tuple[HeadPart, Tensor, Tensor, Tensor, Tensor]]:
    """Yield each part with its queries, keys, values, and weights [queries, keys].

    The weights are the softmax of the allowed scores, and 0 for a query that sees no key.
    """
    k, v = blocks.without_unselected(mask, fields, k, v)
    for part in blocks.parts(mask, fields):
        of_q, of_k, blind = q[part.q], k[part.kv], part.blind
        p = blocks.scores(of_q, of_k, part, blocks.scale_of(fields)).softmax(-1)
        p = p.masked_fill_(blind, 0) if bool(blind.any()) else p
        yield part, of_q, of_k, v[part.kv], p


def depth(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, *, fields: Values) -> int:
    """Return the most keys that a query selects."""
    return blocks.longest_sum(mask, fields)


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add for each of two products, per allowed element."""
    return float(4 * problem["head_dim"] * nnz["mask"])


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of Q and O, and of the keys and values that are selected."""
    return 2 * DTYPES[problem["dtype"]].itemsize * sum(blocks.queries_and_keys(problem, nnz))


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

    def add(
        self, part: HeadPart, ds: Tensor, p: Tensor, operands: Sequence[Tensor], scale: float
    ) -> None:
        """Add the products of a part with its queries, keys and dO."""
        of_q, of_k, of_do = operands
        self.dq[part.q] += ds @ of_k * scale
        self.dk[part.kv] += ds.mT @ of_q * scale
        self.dv[part.kv] += p.mT @ of_do

    def output(self, fields: Values) -> Tensor:
        return torch.cat([t.view(-1, fields["head_dim"]) for t in (self.dq, self.dk, self.dv)])


def gradients(mask: Tensor, *, fields: Values, **operands: Tensor) -> Tensor:
    """Return dQ, dK and dV, one below the other, [..., head_dim]."""
    q, factor = operands["q"], blocks.scale_of(fields)
    sums = Gradients.zeros(q, operands["k"])
    for part, of_part, _, p, ds in _score_gradients(mask, fields, operands):
        sums.add(part, ds, p, of_part, factor)
    return sums.output(fields).to(q.dtype)


def spread_of_gradients(mask: Tensor, *, fields: Values, **operands: Tensor) -> Tensor:
    """Return the spread of the gradients, which `answer_of_gradients` explains."""
    return answer_of_gradients(mask, fields=fields, **operands)[1]


def answer_of_gradients(
    mask: Tensor, *, fields: Values, **operands: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients and their spread, both [..., head_dim].

    The variances of the scores, of dO V.T and of its row sum are carried to the three gradients. P
    and dS are also rounded, before the products that they enter.
    """
    q, k, o, factor = operands["q"], operands["k"], operands["o"], blocks.scale_of(fields)
    sums, variances = Gradients.zeros(q, k), Gradients.zeros(q, k)
    for part, of_part, of_v, p, ds in _score_gradients(mask, fields, operands):
        sums.add(part, ds, p, of_part, factor)
        q2, k2, do2 = squares = [x.square() for x in of_part]
        around = (do2 * o[part.q].square()).sum(-1, True)
        var_dp = (do2 @ of_v.square().mT).add_(around)
        moved = ((q2 * factor**2) @ k2.mT).add_(1)
        p2 = p.square_()
        var_ds = ds.square_().mul_(moved).addcmul_(var_dp, p2)
        variances.add(part, var_ds, p2.mul_(moved), squares, factor**2)
    return sums.output(fields), variances.output(fields).sqrt()


def _score_gradients(
    mask: Tensor, fields: Values, operands: Mapping[str, Tensor]
) -> Iterator[tuple[HeadPart, list[Tensor], Tensor, Tensor, Tensor]]:
    """Yield each part with its queries, keys and dO, its values, and P and dS [queries, keys]."""
    q, k, v, o, lse, do = (operands[name] for name in GRADIENT_OPERANDS)
    k, v = blocks.without_unselected(mask, fields, k, v)
    for part in blocks.parts(mask, fields):
        of_q, of_k, of_v, of_do = q[part.q], k[part.kv], v[part.kv], do[part.q]
        p = _weights(of_q, of_k, part, lse, blocks.scale_of(fields))
        delta = (of_do * o[part.q]).sum(-1, True)
        ds = p * (of_do @ of_v.mT).sub_(delta)
        yield part, [of_q, of_k, of_do], of_v, p.to(q.dtype), ds.to(q.dtype)


def _weights(q: Tensor, k: Tensor, part: HeadPart, lse: Tensor, scale: float) -> Tensor:
    """Return P [queries, keys], in fp32 or fp64; 0 where the log-sum-exp is -inf."""
    of_row = lse[part.row][:, None]
    of_row = of_row.masked_fill(of_row == -torch.inf, torch.inf)  # exp(-inf) is 0
    of_row = of_row.to(torch.promote_types(q.dtype, torch.float32))
    return part.hide(((q @ k.mT).mul_(scale) - of_row).exp_(), 0)


def depth_of_gradients(mask: Tensor, *, fields: Values, **operands: Tensor) -> int:
    """Return the most keys that a query selects, or queries of a group that select a key."""
    queries: int = fields["m"] * (fields["heads"] // fields["kv_heads"])
    return max(blocks.longest_sum(mask, fields), queries)


def derive(
    problem: Problem, operands: Mapping[str, Tensor], activations: Mapping[str, Tensor]
) -> None:
    """Write O and lse of the forward pass with the mask."""
    mask, q, fields = operands["mask"], activations["q"], problem.fields
    k, v = blocks.without_unselected(mask, fields, activations["k"], activations["v"])
    for part in blocks.parts(mask, fields):
        of_q, of_k, of_v = q[part.q].double(), k[part.kv].double(), v[part.kv].double()
        p = blocks.scores(of_q, of_k, part, blocks.scale_of(fields))
        # A query that sees no key has a total of 0, so O = 0 and lse = -inf. Others have 1 or more.
        top = p.amax(-1, True).masked_fill_(part.blind, 0) if p.numel() else p.new_zeros(len(p), 1)
        total = p.sub_(top).exp_().sum(-1, True)
        activations["o"][part.q] = (p @ of_v).div_(total.clamp(min=1)).to(q.dtype)
        activations["lse"][part.row] = total.log_().add_(top).flatten().float()


def flops_of_gradients(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add for each of five products, per allowed element."""
    return float(10 * problem["head_dim"] * nnz["mask"])


def bytes_of_gradients(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of the activations, and of the keys and values that are selected."""
    queries, keys = blocks.queries_and_keys(problem, nnz)
    rows, every, _ = results(problem)
    elements = 4 * queries + 2 * keys + 2 * every * problem["head_dim"]
    return int(DTYPES[problem["dtype"]].itemsize * elements + 4 * rows)


def sample_of_gradients(
    problem: Problem, operands: Mapping[str, Tensor], seed: int
) -> Sample | None:
    """Return the sample of the forward pass, with the rows of its heads in dQ, dK and dV."""
    fields, sample = dict[str, Any](problem.fields), blocks.sample(problem, operands, seed)
    if sample is None:
        return None
    some, parts = blocks.Heads.draw(fields, seed), results(problem)
    chosen = (fields["heads"], some.query), *[(fields["kv_heads"], some.kv)] * 2

    def part(out: Tensor) -> Tensor:
        each = zip(out.split(parts), chosen, strict=True)
        return torch.cat([blocks.in_rows(x, *heads, len(x) // heads[0]) for x, heads in each])

    return replace(sample, shape=(sum(parts), fields["head_dim"]), part=part)


def results(problem: Problem) -> tuple[int, ...]:
    """Return the rows of dQ, dK and dV."""
    m, context = blocks.tokens_of(problem.fields)
    keys = problem["batch"] * context * problem["kv_heads"]
    return problem["batch"] * m * problem["heads"], keys, keys


EXAMPLE = {
    "m": 5, "context": 7, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 4, "block": [2, 3],
    "causal": False, "lists": "heads", "scale": None,
}  # fmt: skip
MASK = Operand("mask", ("mask_rows", "kv_blocks"))
QUERIES = Operand("activation", ("queries", "q_width"))
KEYS = Operand("activation", ("keys", "kv_width"))
LSE = Operand("activation", ("lse_rows", "m"), dict.fromkeys(DTYPES, torch.float32))

OP = Op(
    fields=blocks.AttentionFields,
    operands={"mask": MASK, "q": QUERIES, "k": KEYS, "v": KEYS},
    definition=definition,
    spread=spread,
    both=answer,
    intermediates=("scores", "p"),
    depth=depth,
    flops=flops,
    fewest_bytes=fewest_bytes,
    parts=lambda problem: (problem["batch"] * problem["m"],),
    sizes=blocks.sizes,
    example=EXAMPLE,
    counts=blocks.counts,
    full=blocks.full,
    format_params=blocks.format_params,
    sample=blocks.sample,
)

BACKWARD = replace(
    OP,
    operands={**OP.operands, "o": QUERIES, "lse": LSE, "do": QUERIES},
    definition=gradients,
    spread=spread_of_gradients,
    both=answer_of_gradients,
    intermediates=("scores", "p", "dp", "delta", "ds"),
    depth=depth_of_gradients,
    flops=flops_of_gradients,
    fewest_bytes=bytes_of_gradients,
    derive=derive,
    derived=("o", "lse"),
    parts=results,
    sample=sample_of_gradients,
)
"""Backward pass of block-sparse attention: dQ, dK and dV, from dO, O and the log-sum-exp."""

GRADIENT_OPERANDS = BACKWARD.activations
