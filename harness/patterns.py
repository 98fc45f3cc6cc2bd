"""Which elements of a weight are kept: those of highest score, one by one or in blocks.

    blocks        balanced_blocks   banded        block_diagonal   unstructured   two_four
    ## . . ##     ## . ## .         ## . . .      ## ## . .        x . . x x .    x x . .  . x . x
    . . ## .      . ## . ##         . ## . .      ## ## . .        . . x . . x    . x x .  x x . .
    . ## ## ##    ## ## . .         . . ## ##     . . ## ##        x . . . x .    x . . x  . . x x

    spense_rows                   spense_columns
    x x . .  . x . x              x x . .  x x x x      two_four in front, everything kept behind
    x x x x  x x x x              . x . x  x x x x

spense_hidden: of an MLP, one or the other, so that all weights are dense in the same hidden units;
and small_world, scale_free: the links of a graph (graphs.py). A weight is cut into a grid of blocks
(of 1x1 where elements are chosen), the grid, row by row, into groups, and every group keeps the
same number of its cells: the best by score, the first of equals. The score of random weights is a
hash, that of real ones their magnitude. A pattern is a function from the weight's sizes and the
block to a Rule; a suite calls it by its name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsebench._discovery import did_you_mean
from sparsebench.errors import SuiteError
from sparsebench.harness import graphs
from sparsebench.harness.grid import Grid, Score, best

TOLERANCE = 0.05
"""How far, relatively, the density may be from the one asked for."""

TILE = 128
"""Rows or columns of a matrix product's tile; the dense part of a Spense matrix is whole tiles."""


@dataclass(frozen=True)
class Rule:
    """Of every `group` cells keep the best, as many as the sparsity asks for.

    kept   the numbers that can be kept, where not every number can; the nearest is
    score  (grid, number kept, the weight's own score) to the score in its place
    front  sparsity to the rows and columns of the grid, from its first, that this is the rule of,
           where it is not all: cells behind them are kept
    """

    grid: Grid
    group: int
    kept: Sequence[int] | None = None
    score: Callable[[Grid, int, Score], Tensor] | None = None
    front: Callable[[float], tuple[int, int]] | None = None


def dense(n: int, k: int, r: int, c: int) -> Rule:
    """Keep everything; the block says nothing."""
    return Rule(Grid(n, k, n, k), group=1)


def unstructured(n: int, k: int, r: int, c: int) -> Rule:
    """Keep the best elements anywhere; the block says nothing."""
    return Rule(Grid(n, k), group=n * k)


def blocks(n: int, k: int, r: int, c: int) -> Rule:
    """Keep the best blocks anywhere."""
    grid = Grid(n, k, r, c)
    return Rule(grid, group=grid.cells)


def balanced_blocks(n: int, k: int, r: int, c: int) -> Rule:
    """Keep the best blocks, equally many in every block row."""
    grid = Grid(n, k, r, c)
    return Rule(grid, group=grid.columns)


def banded(n: int, k: int, r: int, c: int) -> Rule:
    """Keep the blocks nearest the diagonal, which runs from corner to corner."""
    grid = Grid(n, k, r, c)
    return Rule(grid, group=grid.cells, score=_nearness)


def block_diagonal(n: int, k: int, r: int, c: int) -> Rule:
    """Keep square groups of blocks along the diagonal, of equal sizes but for rounding."""
    grid = Grid(n, k, r, c)
    return _graph(grid, graphs.cliques, graphs.clique_cells(grid.rows, grid.columns))


def small_world(n: int, k: int, r: int, c: int) -> Rule:
    """Keep the blocks of a ring with a fifth of its links moved, and the diagonal."""
    grid = _square("small_world", Grid(n, k, r, c))
    return _graph(grid, graphs.ring, graphs.ring_cells(grid.rows))


def scale_free(n: int, k: int, r: int, c: int) -> Rule:
    """Keep the blocks of a graph with hubs, the diagonal and a dense corner."""
    grid = _square("scale_free", Grid(n, k, r, c))
    return _graph(grid, graphs.hubs, graphs.hub_cells(grid.rows))


def two_four(n: int, k: int, r: int, c: int) -> Rule:
    """Keep the best 2 of each 4 elements along k; the block says nothing."""
    if k % 4:
        raise SuiteError(f"pattern two_four: expected k to be a multiple of 4, found {k}")
    return Rule(Grid(n, k), group=4, kept=(2,))


def spense_rows(n: int, k: int, r: int, c: int) -> Rule:
    """Keep 2 of each 4 in the upper rows, and the lower ones whole: Spense's gate and up.

    Sparsity s leaves a part 1 - 2 s of the rows whole. Source: arXiv:2606.10445.
    """
    return replace(two_four(n, k, r, c), front=lambda sparsity: (_front(n, sparsity), k))


def spense_columns(n: int, k: int, r: int, c: int) -> Rule:
    """Keep 2 of each 4 in the left columns, and the right ones whole: Spense's down."""
    return replace(two_four(n, k, r, c), front=lambda sparsity: (n, _front(k, sparsity)))


PATTERNS = {
    "dense": dense,
    "unstructured": unstructured,
    "blocks": blocks,
    "balanced_blocks": balanced_blocks,
    "banded": banded,
    "block_diagonal": block_diagonal,
    "small_world": small_world,
    "scale_free": scale_free,
    "two_four": two_four,
    "spense_rows": spense_rows,
    "spense_columns": spense_columns,
}

HIDDEN = "spense_hidden"
"""Of an MLP: spense_rows for weights to its hidden units, spense_columns for that from them."""

SPLITS = {"spense_rows": "rows", "spense_columns": "columns"}
"""What the format Spense calls a split, by pattern: how the dense part follows the 2:4 part."""

FILE = "file"
"""The pattern that is not chosen here: the source's own."""


def derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a Spense pattern settles: the format's dense_fraction, and split if it is one.

    A suite's `dense_fraction: $dense_fraction` makes the format agree with the pattern.
    """
    name = fields["pattern"]
    if name != HIDDEN and name not in SPLITS:
        return {}
    fraction = {"dense_fraction": round(1 - 2 * fields["sparsity"], 6)}
    return fraction | ({"split": SPLITS[name]} if name in SPLITS else {})


def level(fields: Mapping[str, Any], shape: tuple[str, str] = ("n", "k")) -> float:
    """Return the part of the cells that will be left out, without building anything.

    `shape` names the fields that are the weight's sizes. Raises SuiteError, with the nearest level,
    where the density asked for cannot be met. Cut edge blocks count as whole ones: what is achieved
    in elements is counted when the operands are there.
    """
    asked: float = fields["sparsity"]
    if fields["pattern"] == FILE:
        return asked
    rule = _rule(fields, shape)
    rows, columns = _pruned(rule, asked)
    part = rows * columns / rule.grid.cells
    found = part * (rule.group - _kept(rule, asked)) / rule.group
    if abs(asked - found) > TOLERANCE * (1 - asked):
        grid = f"{rule.grid.rows}x{rule.grid.columns} grid of {rule.grid.r}x{rule.grid.c} blocks"
        what = f"pattern {fields['pattern']}: sparsity {asked:g}"
        raise SuiteError(f"{what} cannot be met by a {grid}: the nearest level is {found:.6g}")
    return found


def mask(
    fields: Mapping[str, Any], shape: tuple[str, str], score: Score, device: torch.device
) -> Tensor:
    """Return a bool matrix: True where an element is kept. Raises SuiteError as `level` does."""
    level(fields, shape)
    rule = _rule(fields, shape)
    grid = rule.grid
    kept = _kept(rule, fields["sparsity"])
    scores = rule.score(grid, kept, score) if rule.score else score(grid)
    chosen = best(scores.to(device), rule.group, kept)
    cells = chosen.view(grid.rows, 1, grid.columns, 1).expand(-1, grid.r, -1, grid.c)
    whole = cells.reshape(grid.rows * grid.r, grid.columns * grid.c)
    rows, columns = _pruned(rule, fields["sparsity"])
    whole[rows * grid.r :] = True
    whole[:, columns * grid.c :] = True
    return whole[: grid.n, : grid.k]


def _rule(fields: Mapping[str, Any], shape: tuple[str, str]) -> Rule:
    name, block = fields["pattern"], fields["block"]
    if name == HIDDEN:  # the sizes of an MLP's weights name its hidden units n
        name = "spense_rows" if shape[0] == "n" else "spense_columns"
    if name not in PATTERNS:
        known = [*PATTERNS, HIDDEN, FILE]
        hint = did_you_mean(name, known)
        raise SuiteError(f"pattern: expected one of {', '.join(known)}; found {name!r}{hint}")
    r, c = (block, block) if isinstance(block, int) else block
    return PATTERNS[name](fields[shape[0]], fields[shape[1]], r, c)


def _kept(rule: Rule, sparsity: float) -> int:
    """Return how many cells of a group are kept: at least one."""
    asked = rule.group * (1 - sparsity)
    if rule.kept is None:
        return max(1, round(asked))
    return min(rule.kept, key=lambda count: abs(count - asked))


def _pruned(rule: Rule, sparsity: float) -> tuple[int, int]:
    """Return the rows and columns of the grid that the rule holds for."""
    return rule.front(sparsity) if rule.front else (rule.grid.rows, rule.grid.columns)


def _front(size: int, sparsity: float) -> int:
    """Return how many rows or columns are 2:4: all but whole tiles, or fours where no tile fits."""
    step = 4 if size % TILE else TILE
    return size - min(size, max(0, step * round(size * (1 - 2 * sparsity) / step)))


def _square(name: str, grid: Grid) -> Grid:
    """Refuse a grid whose rows and columns are not the same nodes of a graph."""
    if grid.rows == grid.columns >= graphs.FEWEST_NODES:
        return grid
    expected = f"as many rows of blocks as columns, at least {graphs.FEWEST_NODES}"
    raise SuiteError(f"pattern {name}: expected {expected}; found {grid.rows}x{grid.columns}")


def _graph(grid: Grid, draw: graphs.Draw, cells: Sequence[int]) -> Rule:
    """Score the cells of a graph 1 and all others 0; graph number i, from 1, has cells[i - 1]."""

    def score(grid: Grid, kept: int, own: Score) -> Tensor:
        dice = own(grid).view(grid.rows, grid.columns).cpu().numpy()
        return torch.from_numpy(draw(dice, 1 + cells.index(kept))).flatten().int()

    return Rule(grid, grid.cells, cells, score)


def _nearness(grid: Grid, kept: int, own: Score) -> Tensor:
    rows, columns = torch.arange(grid.rows), torch.arange(grid.columns)
    distance = ((2 * rows[:, None] + 1) * grid.columns - (2 * columns + 1) * grid.rows).abs()
    return (distance.max() - distance).flatten()
