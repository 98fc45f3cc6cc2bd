"""Patterns of attention. Blocks have ranks; every mask of a stack keeps those of lowest rank.

    rank     a non-negative integer for each block; the level determines how many of the lowest stay
    nearest  blocks that hold the key at a query's own position are kept first, so that no row is
             empty
    future   blocks that a causal mask cannot see are never kept, and the level does not count them

Blocks may have unequal sides, and queries and keys unequal lengths. In a causal mask the last query
is at the last key; otherwise positions are proportional. All arithmetic is in integers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sparsebench.harness.inputs.grid import Score, Stack, ValueGrid
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight

Rank = Callable[[Stack, Tensor], Tensor]
"""Maps the scores of a stack's blocks [masks, rows, columns] to their ranks, of that shape or
[rows, columns] if all masks have the same, on any device."""

LAST = 2**40
"""Above any rank."""


def by_rank(rank: Rank) -> Pattern:
    """Return the pattern that keeps the lowest ranks of each mask, and the nearest blocks first."""
    return Pattern(lambda weight: _rule_by_rank(weight, rank), causal=True)


def _rule_by_rank(weight: Weight, rank: Rank) -> Rule:
    stack = weight.stack

    def score(grid: ValueGrid, count: int, base: Score) -> Tensor:
        scores = base(grid).view(stack.count, stack.rows, stack.columns)
        near, allowed = (distance(stack) == 0).to(scores.device), past(stack).to(scores.device)
        ranks = rank(stack, scores).to(scores.device).expand(scores.shape)
        ranks = ranks.masked_fill(near, 0).add(~near)
        return (LAST - ranks.long()).masked_fill_(~allowed, 0).flatten()

    (first, last), counts = diagonal(stack), visible(stack)
    of = int(counts.sum())
    fewest = int((counts.minimum(last + 1) - first).clamp(min=0).sum())
    levels = range(max(1, fewest), of + 1)
    return Rule(weight.blocks, stack.rows * stack.columns, levels, of=of, score=score)


def parameter_rule(weight: Weight, counts: list[int], keep: Callable[[int], Tensor]) -> Rule:
    """Return the rule of masks with a parameter 1, 2, ...; `counts` has their visible blocks."""
    stack = weight.stack

    def score(grid: ValueGrid, count: int, base: Score) -> Tensor:
        present = keep(1 + counts.index(count)) & past(stack)
        return present.int().expand(stack.count, -1, -1).flatten()

    size = stack.rows * stack.columns
    return Rule(weight.blocks, size, counts, of=int(visible(stack).sum()), score=score)


def past(stack: Stack) -> Tensor:
    """Return the blocks that have a visible element, bool [rows, columns]."""
    return torch.arange(stack.columns) < visible(stack)


def visible(stack: Stack) -> Tensor:
    """Return how many blocks of each row have a visible element, int64 [rows, 1]."""
    rows = torch.arange(stack.rows)[:, None]
    if not stack.causal:
        return torch.full_like(rows, stack.columns)
    (queries, keys), (b_q, b_k) = stack.tokens, stack.block
    last = ((rows + 1) * b_q).clamp(max=queries) - 1 + keys - queries
    return (last // b_k + 1).clamp(min=0)


def diagonal(stack: Stack) -> tuple[Tensor, Tensor]:
    """Return the first and the last block that hold a row's own positions, int64 [rows, 1]."""
    rows = torch.arange(stack.rows)[:, None]
    (queries, keys), (b_q, b_k) = stack.tokens, stack.block
    first, last = rows * b_q, ((rows + 1) * b_q).clamp(max=queries) - 1
    if stack.causal:
        first, last = first + keys - queries, last + keys - queries
    else:
        first, last = ((2 * q + 1) * keys // (2 * queries) for q in (first, last))
    return first.clamp(0, keys - 1) // b_k, last.clamp(0, keys - 1) // b_k


def distance(stack: Stack) -> Tensor:
    """Return how many blocks a block is away from a row's own, int64 [rows, columns]."""
    first, last = diagonal(stack)
    columns = torch.arange(stack.columns)
    return (first - columns).clamp(min=0) + (columns - last).clamp(min=0)


def in_rows(scores: Tensor, eligible: Tensor) -> Tensor:
    """Return the place of each block among the eligible ones of its row, by descending score."""
    ineligible = ~eligible.to(scores.device)
    order = scores.long().masked_fill(ineligible, -1).argsort(dim=-1, descending=True, stable=True)
    return order.argsort(dim=-1)
