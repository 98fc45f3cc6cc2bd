"""Graphs as masks of blocks: a cell is kept if its nodes are linked, or are the same.

small_world and scale_free, with the diagonal, the fifth of moved links and the dense corner, follow
Gray, Radford, Kingma 2017, GPU kernels for block-sparse weights. The dice are the scores
[nodes, nodes] of the cells, non-negative integers: a hash, or the magnitudes of real weights. All
arithmetic is in integers, so that a seed gives the same graph on every machine, which a library's
generator does not guarantee.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.inputs.grid import Score, ValueGrid
from sparsebench.harness.patterns._pattern import Pattern, Rule, Weight

Dice = NDArray[np.integer]
Mask = NDArray[np.bool_]
Draw = Callable[[Dice, int], Mask]
"""Maps scores and the number of links (in block_diagonal: of parts) to the mask."""

FEWEST_NODES = 3


def graph(grid: ValueGrid, draw: Draw, cells: Sequence[int]) -> Rule:
    """Return the rule whose cells score 1 in the graph and 0 elsewhere.

    `cells` has the number of cells of the graphs with 1, 2, ... links; one of them is kept.
    """

    def score(grid: ValueGrid, count: int, base: Score) -> Tensor:
        dice = base(grid).view(grid.rows, grid.columns).cpu().numpy()
        return torch.from_numpy(draw(dice, 1 + cells.index(count))).flatten().int()

    return Rule(grid, grid.cells, cells, score)


def square(name: str, draw: Draw, cells: Callable[[int], Sequence[int]]) -> Pattern:
    """Return the pattern of a graph whose nodes are the rows and columns of blocks.

    `cells` maps the number of nodes to those of the cells, as in `graph`.
    """

    def rule(weight: Weight) -> Rule:
        grid = weight.blocks
        if grid.rows == grid.columns >= FEWEST_NODES:
            return graph(grid, draw, cells(grid.rows))
        expected = f"as many rows of blocks as columns, at least {FEWEST_NODES}"
        raise SuiteError(f"pattern {name}: expected {expected}; found {grid.rows}x{grid.columns}")

    return Pattern(rule)
