"""Attention: the last l positions, and every l-th one before them (Child et al., arXiv:1904.10509).

l = 2   ## .  .  .  .      l is in blocks; in a mask that is not causal,
        ## ## .  .  .      positions after a query's own count likewise
        ## ## ## .  .
        .  ## ## ## .
        ## .  ## ## ##

The level determines l, which is at least the square root of the number of blocks. A larger l gives
a longer window.
"""

from math import isqrt

import torch
from torch import Tensor

from sparsebench.harness.patterns._attention import distance, parameter_rule, past
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Try every l; the counts need no mask, because only distances matter."""
    stack = weight.stack
    away = distance(stack)
    at = torch.bincount(away[past(stack)])
    steps = torch.arange(len(at))
    lengths = range(max(1, isqrt(stack.columns)), stack.columns + 1)
    counts = [int(at[(steps < length) | (steps % length == 0)].sum()) for length in lengths]

    def keep(number: int) -> Tensor:
        length = lengths[number - 1]
        return (away < length) | (away % length == 0)

    return parameter_rule(weight, counts, keep)


PATTERN = Pattern(rule, causal=True)
