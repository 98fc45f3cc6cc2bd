"""The contract that every file in harness/patterns/ keeps: which elements of a weight are kept.

A pattern file names one PATTERN. Its rule says three things of a weight [n, k]:

    grid     the weight cut into blocks of r x c      ## . . ##    cells row by row: 0 1 2 3 ...
    group    the cells, in order, cut into groups     . . ## .     of equal size
    score    every group keeps its best cells         . ## ## ##   the first of equals

The harness turns a rule into a mask (_mask.py). The score of drawn weights is a hash, that of real
ones their magnitude, so that a pattern is the same bits on every device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparsebench.harness.grid import Grid, Score


@dataclass(frozen=True)
class Weight:
    """The weight to prune: `n` rows, `k` columns, and the block `r` x `c` that the problem names.

    `sizes` are the problem's fields that n and k are: ("n", "k"), or ("k", "n") of an MLP's down.
    """

    n: int
    k: int
    r: int
    c: int
    sizes: tuple[str, str]

    @property
    def blocks(self) -> Grid:
        """Return the grid of the problem's blocks."""
        return Grid(self.n, self.k, self.r, self.c)

    @property
    def elements(self) -> Grid:
        """Return the grid of single elements."""
        return Grid(self.n, self.k)


@dataclass(frozen=True)
class Rule:
    """Of every `group` cells keep the best, as many as the sparsity asks for, at least one.

    kept   the numbers that can be kept; the nearest is. Default: every number
    score  (grid, number kept, the weight's own score) to the score in its place: a non-negative
           integer for each cell. Default: the weight's own
    front  sparsity to the first rows and columns of the grid that this is the rule of; all cells
           behind them are kept. Default: the whole grid
    """

    grid: Grid
    group: int
    kept: Sequence[int] | None = None
    score: Callable[[Grid, int, Score], Tensor] | None = None
    front: Callable[[float], tuple[int, int]] | None = None


@dataclass(frozen=True)
class Pattern:
    """A pattern.

    rule     the weight to its Rule. Raises SuiteError where the weight cannot have the pattern
    derived  a problem's fields to what follows from them: a suite writes `$name` for each in the
             params of a format, so that the format agrees with the pattern. Default: nothing
    """

    rule: Callable[[Weight], Rule]
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda fields: {}
