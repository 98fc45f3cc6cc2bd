"""The blocks of a ring with a fifth of its links moved, and the diagonal.

    ring, m = 1       one link moved: 0-5 to 0-3
    # # . . . #       # # . # . .
    # # # . . .       # # # . . .
    . # # # . .       . # # # . .
    . . # # # .       # . # # # .
    . . . # # #       . . . # # #
    # . . . # #       . . . . # #

The nodes form a circle, each linked to its m nearest on both sides. A fifth of all links, those of
lowest score, move their second end to the unlinked node of highest score. Source: Watts, Strogatz
1998, Collective dynamics of small-world networks.
"""

import numpy as np

from sparsebench.harness.patterns._graph import Dice, Mask, square

MOVED = 0.2


def ring_cells(nodes: int) -> list[int]:
    """Return the number of cells of rings with 1, 2, ... links on each side."""
    return [nodes * (2 * m + 1) for m in range(1, (nodes - 1) // 2 + 1)]


def ring(dice: Dice, m: int) -> Mask:
    """Draw a small world."""
    nodes = len(dice)
    starts = np.tile(np.arange(nodes), m)
    ends = (starts + np.arange(1, m + 1).repeat(nodes)) % nodes
    linked = np.eye(nodes, dtype=bool)
    linked[starts, ends] = linked[ends, starts] = True
    lowest = dice[starts, ends].argsort(kind="stable")[: round(MOVED * len(starts))]
    for link in np.sort(lowest):
        start, end = starts[link], ends[link]
        free = np.where(linked[start], -1, dice[start])
        best = free.argmax()
        if free[best] >= 0:  # a node that is linked to all keeps its links
            linked[start, end] = linked[end, start] = False
            linked[start, best] = linked[best, start] = True
    return linked


PATTERN = square("small_world", ring, ring_cells)
