"""2:4 inside of the best blocks: one weight that blocks, 2:4 and dense store all.

## . . ##      each block has the best 2 of each 4 elements along k, so half of the density 1 - s
. . ## .       is that of the blocks: at s = 0.9, one block of five is stored
. ## . ##

Contenders in blocks and in 2:4 then multiply the same weights, in one contest.
"""

import torch
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.inputs.grid import Score, ValueGrid, best
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Return the rule; counts are halves of whole blocks. Raises SuiteError."""
    blocks = weight.blocks
    n, k, r, c = blocks.n, blocks.k, blocks.r, blocks.c
    if n % r or k % c or c % 4:
        expected = "expected whole blocks of a multiple of 4 columns"
        raise SuiteError(f"pattern two_four_blocks: {expected}, found {r} x {c} in {n} x {k}")

    def choose(grid: ValueGrid, count: int, score: Score) -> Tensor:
        """Score 1 for the elements to keep, and 0 for the others."""
        stored = best(score(blocks), blocks.cells, 2 * count // (r * c))
        fours = best(score(grid), 4, 2).view(n // r, r, k // c, c)
        return (fours & stored.view(n // r, 1, k // c, 1)).flatten().to(torch.int32)

    counts = range(r * c // 2, blocks.cells * r * c // 2 + 1, r * c // 2)
    return Rule(weight.elements, weight.elements.cells, [*counts], choose)


PATTERN = Pattern(rule)
