"""Attention: the chunk of l blocks around a query, and the last block of every other chunk.

l = 2   ## .  .  .  .      chunks 0 1 | 2 3 | 4: all rows of a chunk read the same
        ## ## .  .  .      summaries, and no others
        .  ## ## .  .
        .  ## ## ## .
        .  ## .  ## ##

Source: the fixed pattern of Child et al., arXiv:1904.10509, with c = one block. The level
determines l, which is at least the square root of the number of blocks.
"""

from math import isqrt

import torch
from torch import Tensor

from sparsebench.harness.patterns._attention import diagonal, parameter_rule, visible
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Try every l."""
    stack = weight.stack
    first, last = diagonal(stack)
    ends = visible(stack)
    columns = torch.arange(stack.columns)
    lengths = range(max(1, isqrt(stack.columns)), stack.columns + 1)

    def chunk(length: int) -> tuple[Tensor, Tensor]:
        return first // length * length, (last // length + 1) * length

    def count(length: int) -> int:
        start, end = (edge.minimum(ends) for edge in chunk(length))
        summaries = ends // length - end // length + start // length
        return int((end - start + summaries).sum())

    def keep(number: int) -> Tensor:
        length = lengths[number - 1]
        start, end = chunk(length)
        return ((columns >= start) & (columns < end)) | (columns % length == length - 1)

    return parameter_rule(weight, [count(length) for length in lengths], keep)


PATTERN = Pattern(rule, causal=True)
