"""Groups of blocks along the diagonal, of equal size except for rounding.

## ## . .
## ## . .       rows and columns are divided into as many parts each; a block is kept if its row
. . ## ##       and its column are in the same part
. . ## ##
"""

import numpy as np
from numpy.typing import NDArray

from sparsebench.harness.inputs.grid import ValueGrid
from sparsebench.harness.patterns._graph import Dice, Mask, graph
from sparsebench.harness.patterns._pattern import Pattern


def clique_cells(grid: ValueGrid) -> list[int]:
    """Return the number of cells with 1, 2, ... parts."""
    return [
        int((np.bincount(_part(grid.rows, parts)) * np.bincount(_part(grid.columns, parts))).sum())
        for parts in range(1, min(grid.rows, grid.columns) + 1)
    ]


def cliques(dice: Dice, parts: int) -> Mask:
    """Return a block-diagonal mask; the dice are not used."""
    rows, columns = dice.shape
    same: Mask = _part(rows, parts)[:, None] == _part(columns, parts)
    return same


def _part(nodes: int, parts: int) -> NDArray[np.int64]:
    return np.arange(nodes) * parts // nodes


PATTERN = Pattern(lambda w: graph(w.blocks, cliques, clique_cells(w.blocks)))
