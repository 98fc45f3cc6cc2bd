"""The blocks of a graph with hubs, the diagonal and a dense corner.

m = 2             each new node is linked to m older ones, drawn with odds proportional to their
# # # # . #       links so far; the first m are linked to each other
# # # . # .
# # # # . .       Source: Barabasi, Albert 1999, Emergence of scaling in random networks.
# . # # # .
. # . # # #
# . . . # #
"""

import numpy as np

from sparsebench.harness.patterns._graph import Dice, Mask, square


def hub_cells(nodes: int) -> list[int]:
    """Return the number of cells of graphs with 1, 2, ... links for each new node."""
    return [nodes + 2 * m * nodes - m * m - m for m in range(1, nodes)]


def hubs(dice: Dice, m: int) -> Mask:
    """Draw a scale-free graph; die i of a node's row draws its link i."""
    nodes = len(dice)
    linked = np.eye(nodes, dtype=bool)
    linked[: m + 1, : m + 1] = True  # the first new node has only m older ones
    odds = np.zeros(nodes, dtype=np.int64)
    odds[:m], odds[m] = 1, m
    for new in range(m + 1, nodes):
        reached = odds[:new].cumsum()  # once for all links: a sum for each took 5 times as long
        for die in dice[new, :m]:
            old = reached.searchsorted(die % reached[-1], side="right")
            linked[new, old] = linked[old, new] = True
            reached[old:] -= odds[old]  # drawn once
            odds[old] += 1
        odds[new] = m
    return linked


PATTERN = square("scale_free", hubs, hub_cells)
