"""The blocks nearest the diagonal, which runs from corner to corner.

## . . .
. ## . .
. . ## ##
"""

import torch
from torch import Tensor

from sparsebench.harness.grid import Grid, Score
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Choose among all blocks by their distance."""
    return Rule(weight.blocks, group=weight.blocks.cells, score=_nearness)


def _nearness(grid: Grid, kept: int, own: Score) -> Tensor:
    rows, columns = torch.arange(grid.rows), torch.arange(grid.columns)
    distance = ((2 * rows[:, None] + 1) * grid.columns - (2 * columns + 1) * grid.rows).abs()
    return (distance.max() - distance).flatten()


PATTERN = Pattern(rule)
