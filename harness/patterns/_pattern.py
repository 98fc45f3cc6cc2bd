"""The contract of every file in harness/patterns/: which elements of a weight are kept.

A pattern file defines one PATTERN. Its rule determines three things for a weight [n, k]:

    grid     the weight cut into blocks of r x c      ## . . ##    cells row by row: 0 1 2 3 ...
    group    the cells, in order, cut into groups     . . ## .     of equal size
    score    every group keeps its best cells         . ## ## ##   the first of equals

The harness turns a rule into a mask (_mask.py). The score is a hash for drawn weights and the
magnitude for real ones, so a pattern has the same bits on every device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.inputs.grid import Score, Stack, ValueGrid


@dataclass(frozen=True)
class Weight:
    """The weight to prune: `n` rows, `k` columns, and the block `r` x `c` that the problem names.

    `sizes` names the fields of n and k: ("n", "k"), or ("k", "n") for the down weight of an MLP.

    The mask of an attention is a weight, each element of which represents a block. `masks` has its
    geometry.
    """

    n: int
    k: int
    r: int
    c: int
    sizes: tuple[str, str]
    masks: Stack | None = None

    @property
    def stack(self) -> Stack:
        """Return the geometry of the masks; another weight is one mask of its blocks."""
        return self.masks or Stack(1, (self.n, self.k), (self.r, self.c))

    @property
    def blocks(self) -> ValueGrid:
        return ValueGrid(self.n, self.k, self.r, self.c)

    @property
    def elements(self) -> ValueGrid:
        return ValueGrid(self.n, self.k)


@dataclass(frozen=True)
class Rule:
    """Keep the best of every `group` cells, as many as the sparsity requires, at least one.

    counts the numbers of cells that can be kept; the nearest is used. Default: any number
    score  maps (grid, number kept, the weight's score) to a replacement for that score: a
           non-negative integer for each cell. Default: the weight's score
    of     the cells of a group that the sparsity counts; the others score 0. Default: all
    front  maps the sparsity to the first rows and columns of the grid to which the rule applies;
           all cells behind them are kept. Default: the whole grid
    """

    grid: ValueGrid
    group: int
    counts: Sequence[int] | None = None
    score: Callable[[ValueGrid, int, Score], Tensor] | None = None
    front: Callable[[float], tuple[int, int]] | None = None
    of: int | None = None


@dataclass(frozen=True)
class Pattern:
    """A pattern.

    rule     maps the weight to its Rule. Raises SuiteError if the weight cannot have the pattern
    derived  maps a problem's fields to further values: a suite writes `$name` for them in the
             params of a format, so that the format agrees with the pattern. Default: none
    causal   the rule leaves out what a causal mask cannot have. Default: it does not
    """

    rule: Callable[[Weight], Rule]
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda fields: {}
    causal: bool = False


def n_of_m(name: str, nonzeros: int, group: int) -> Pattern:
    """Return the pattern `name`, which keeps the best N of each M elements along k.

    A suite may write $kept and $group in the params of a format.
    """

    def rule(weight: Weight) -> Rule:
        if weight.k % group:
            expected = f"expected k to be a multiple of {group}"
            raise SuiteError(f"pattern {name}: {expected}, found {weight.k}")
        return Rule(weight.elements, group=group, counts=(nonzeros,))

    return Pattern(rule, lambda fields: {"kept": nonzeros, "group": group})
