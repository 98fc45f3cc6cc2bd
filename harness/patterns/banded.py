"""The blocks nearest the diagonal, which runs from corner to corner.

## . . .
. ## . .
. . ## ##
"""

import torch

from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight


def rule(weight: Weight) -> Rule:
    """Choose among all blocks by their distance."""
    grid = weight.blocks
    rows, columns = torch.arange(grid.rows), torch.arange(grid.columns)
    distance = ((2 * rows[:, None] + 1) * grid.columns - (2 * columns + 1) * grid.rows).abs()
    nearness = (distance.max() - distance).flatten()
    return Rule(grid, group=grid.cells, score=lambda grid, count, base: nearness)


PATTERN = Pattern(rule)
