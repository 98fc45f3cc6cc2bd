"""Graphs as masks of blocks: a cell is kept where two nodes are linked, or are the same.

    ring, m = 1            ring, one link moved      hubs, m = 2             cliques, 2
    # # . . . #            # # . # . .  0-5 to 0-3   # # # # . #             # # # . . .
    # # # . . .            # # # . . .               # # # . # .             # # # . . .
    . # # # . .            . # # # . .               # # # # . .             # # # . . .
    . . # # # .            # . # # # .               # . # # # .             . . . # # #
    . . . # # #            . . . # # #               . # . # # #             . . . # # #
    # . . . # #            . . . . # #               # . . . # #             . . . # # #

ring     nodes in a circle, each linked to its m nearest on both sides; of all links a fifth, those
         of lowest score, move their second end to the unlinked node of highest score. Watts,
         Strogatz 1998, Collective dynamics of small-world networks.
hubs     each new node is linked to m older ones, drawn with odds as their links so far; the first
         m are linked to each other. Barabasi, Albert 1999, Emergence of scaling in random networks.
cliques  nodes in equal parts, all linked within a part; rows and columns may differ in number.

Ring and hubs with the diagonal, the fifth and the dense corner are those of Gray, Radford, Kingma
2017, GPU kernels for block-sparse weights. The dice are the scores [nodes, nodes] of the cells,
non-negative integers: a hash, or the magnitudes of real weights. All arithmetic is of integers, so
that a seed is the same graph on every machine; a library's generator promises no such thing.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Dice = NDArray[np.integer]
Mask = NDArray[np.bool_]
Draw = Callable[[Dice, int], Mask]
"""Scores and the number of links (of parts, for cliques) to the mask."""

FEWEST_NODES = 3
MOVED = 0.2


def ring_cells(nodes: int) -> list[int]:
    """Return the cells of a ring with 1, 2, ... links on each side."""
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


def hub_cells(nodes: int) -> list[int]:
    """Return the cells of a graph with hubs and 1, 2, ... links of each new node."""
    return [nodes + 2 * m * nodes - m * m - m for m in range(1, nodes)]


def hubs(dice: Dice, m: int) -> Mask:
    """Draw a scale-free graph; die i of a node's row draws its link i."""
    nodes = len(dice)
    linked = np.eye(nodes, dtype=bool)
    linked[:m, :m] = True
    odds = np.zeros(nodes, dtype=np.int64)
    for new in range(m, nodes):
        left = odds[:new].copy() if new > m else np.ones(m, dtype=np.int64)
        for die in dice[new, :m]:
            reached = left.cumsum()
            old = reached.searchsorted(die % reached[-1], side="right")
            linked[new, old] = linked[old, new] = True
            left[old] = 0  # drawn once
            odds[old] += 1
        odds[new] = m
    return linked


def clique_cells(rows: int, columns: int) -> list[int]:
    """Return the cells of 1, 2, ... parts."""
    return [
        int((np.bincount(_part(rows, parts)) * np.bincount(_part(columns, parts))).sum())
        for parts in range(1, min(rows, columns) + 1)
    ]


def cliques(dice: Dice, parts: int) -> Mask:
    """Return a block-diagonal mask; nothing is drawn."""
    rows, columns = dice.shape
    same: Mask = _part(rows, parts)[:, None] == _part(columns, parts)
    return same


def _part(nodes: int, parts: int) -> NDArray[np.int64]:
    return np.arange(nodes) * parts // nodes
