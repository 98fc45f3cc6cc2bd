"""Attention that selects for each query: sizes, and definitions in fp64, one query at a time."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class TokenCase(NamedTuple):
    """Sizes of a selection."""

    queries: int
    keys: int
    heads: tuple[int, int]
    block: int
    keep: int
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    batch: int = 1

    def operands(self) -> list[Tensor]:
        """Return q, k and v by head, the same each time."""
        draw = torch.Generator().manual_seed(0)
        queries, keys = zip((self.queries, self.keys), self.heads, strict=True)
        sizes = [(self.batch, *size, self.head_dim) for size in (queries, keys, keys)]
        return [torch.randn(size, generator=draw).to(self.dtype) for size in sizes]


def block_means(x: Tensor, block: int) -> Tensor:
    """Return the mean of each block of tokens, of those that there are [batch, n, heads, D]."""
    return torch.stack([part.mean(1) for part in x.double().split(block, 1)], 1).to(x.dtype)


def nsa_of(q: Tensor, k: Tensor, v: Tensor, block: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return O of the compressed branch and the scores in fp64, one query at a time."""
    keys, values = (block_means(x, block).double() for x in (k, v))
    (batch, s, heads, _), groups = q.shape, k.shape[2]
    o = q.new_zeros(q.shape, dtype=torch.float64)
    scores = o.new_zeros(batch, groups, s, keys.shape[1])
    for b, t, h in [(b, t, h) for b in range(batch) for t in range(s) for h in range(heads)]:
        group, position = h * groups // heads, t + k.shape[1] - s
        complete = max(position + 1, 0) // block
        p = (keys[b, :complete, group] @ q[b, t, h].double() * scale).softmax(0)
        o[b, t, h] = p @ values[b, :complete, group]
        scores[b, group, t, :complete] += p
    return o, scores


def moba_of(q: Tensor, k: Tensor, block: int) -> Tensor:
    """Return the scores in fp64."""
    keys = block_means(k, block).double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bshd,bnhd->bhsn", q.double(), keys)


def visible_blocks(case: TokenCase) -> Tensor:
    """Return which blocks each query sees, bool [queries, n]."""
    first = torch.arange(0, case.keys, case.block)
    return first <= (torch.arange(case.queries) + case.keys - case.queries)[:, None]


def softmax_over(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Return attention in fp64 over elements [batch, H, S_q, S_kv]; 0 for a query without any."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) * scale
    p = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p.masked_fill(~allowed.any(-1, True), 0), v)


def best(scores: Tensor, case: TokenCase, first: int, last: int) -> Tensor:
    """Return which keys the selected blocks have, bool like scores [batch, lists, S, keys].

    The definition, one row at a time: forced blocks, then the highest scores, lower blocks first.
    """
    allowed = torch.zeros(*scores.shape[:3], case.keys, dtype=torch.bool)
    visible = visible_blocks(case).sum(1).tolist()
    for row in [
        (b, h, t)
        for b in range(case.batch)
        for h in range(scores.shape[1])
        for t in range(case.queries)
    ]:
        t, count = row[2], visible[row[2]]
        forced = {j for j in range(count) if j < first or j >= count - last}
        rest = sorted(set(range(count)) - forced, key=lambda j: (-float(scores[row][j]), j))
        for j in [*forced, *rest[: case.keep - len(forced)]]:
            allowed[row][j * case.block : (j + 1) * case.block] = True
        allowed[row][max(t + case.keys - case.queries + 1, 0) :] = False
    return allowed


def gates(case: TokenCase) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    size = case.batch, case.queries, case.heads[0]
    return [torch.rand(size, generator=draw).to(case.dtype) for _ in range(3)]


USED = [
    TokenCase(70, 70, (4, 2), 16, 4),
    TokenCase(60, 60, (4, 1), 8, 5, batch=2),
    TokenCase(40, 130, (2, 2), 16, 20),
]
