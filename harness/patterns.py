"""Which elements of a weight are kept: those of highest score, one by one or in blocks.

    blocks        balanced_blocks   banded        unstructured   two_four
    ## . . ##     ## . ## .         ## . . .      x . . x x .    x x . .  . x . x
    . . ## .      . ## . ##         . ## . .      . . x . . x    . x x .  x x . .
    . ## ## ##    ## ## . .         . . ## ##     x . . . x .    x . . x  . . x x

A weight is cut into a grid of blocks (of 1x1 where elements are chosen), the grid, row by row, into
groups, and every group keeps the same number of its cells: the best by score, the first of equals.
The score of random weights is a hash, that of real ones their magnitude. A pattern is a function
from the weight's sizes and the block to a Rule; a suite calls it by its name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.harness._errors import SuiteError
from sparsebench.harness.bits import CHUNK
from sparsebench.harness.catalog import did_you_mean

TOLERANCE = 0.05
"""How far, relatively, the density may be from the one asked for."""


@dataclass(frozen=True)
class Grid:
    """A matrix [n, k] in blocks of r x c; those of the last row and column may be cut."""

    n: int
    k: int
    r: int = 1
    c: int = 1

    @property
    def rows(self) -> int:
        """Count the block rows."""
        return -(-self.n // self.r)

    @property
    def columns(self) -> int:
        """Count the block columns."""
        return -(-self.k // self.c)

    @property
    def cells(self) -> int:
        """Count the blocks."""
        return self.rows * self.columns


Score = Callable[[Grid], Tensor]
"""A grid to a non-negative integer for each cell, row by row."""


@dataclass(frozen=True)
class Rule:
    """Of every `group` cells keep `kept`, or as many as the sparsity asks; best by `score`."""

    grid: Grid
    group: int
    kept: int | None = None
    score: Score | None = None  # in place of the weight's own


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


def two_four(n: int, k: int, r: int, c: int) -> Rule:
    """Keep the best 2 of each 4 elements along k; the block says nothing."""
    if k % 4:
        raise SuiteError(f"pattern two_four: expected k to be a multiple of 4, found {k}")
    return Rule(Grid(n, k), group=4, kept=2)


PATTERNS = {
    "dense": dense,
    "unstructured": unstructured,
    "blocks": blocks,
    "balanced_blocks": balanced_blocks,
    "banded": banded,
    "two_four": two_four,
}

FILE = "file"
"""The pattern that is not chosen here: the source's own."""


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
    found = (rule.group - _kept(rule, asked)) / rule.group
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
    scores = (rule.score or score)(grid).to(device)
    kept = _best(scores, rule.group, _kept(rule, fields["sparsity"]))
    cells = kept.view(grid.rows, 1, grid.columns, 1).expand(-1, grid.r, -1, grid.c)
    whole = cells.reshape(grid.rows * grid.r, grid.columns * grid.c)
    return whole[: grid.n, : grid.k]


def magnitudes(weight: Tensor, grid: Grid) -> Tensor:
    """Return the L1 norm of each block of a finite weight, as integers.

    Elements are rounded to 2^-40 of the largest before they are summed: a sum of integers is the
    same in any order and so on any device.
    """
    size = weight.abs().float()
    if grid.r == grid.c == 1:
        return size.view(torch.int32).flatten()  # the bits of positive floats keep their order
    bits = min(40, 62 - (grid.r * grid.c).bit_length())  # so that no sum leaves an int64
    _, exponent = size.max().frexp()
    whole = (size.double() * 2.0 ** (bits - int(exponent))).round().long()
    edge = (0, grid.columns * grid.c - grid.k, 0, grid.rows * grid.r - grid.n)
    return pad(whole, edge).view(grid.rows, grid.r, grid.columns, grid.c).sum((1, 3)).flatten()


def _rule(fields: Mapping[str, Any], shape: tuple[str, str]) -> Rule:
    name, block = fields["pattern"], fields["block"]
    if name not in PATTERNS:
        known = [*PATTERNS, FILE]
        hint = did_you_mean(name, known)
        raise SuiteError(f"pattern: expected one of {', '.join(known)}; found {name!r}{hint}")
    r, c = (block, block) if isinstance(block, int) else block
    return PATTERNS[name](fields[shape[0]], fields[shape[1]], r, c)


def _kept(rule: Rule, sparsity: float) -> int:
    """Return how many cells of a group are kept: at least one."""
    return rule.kept or max(1, round(rule.group * (1 - sparsity)))


def _nearness(grid: Grid) -> Tensor:
    rows, columns = torch.arange(grid.rows), torch.arange(grid.columns)
    distance = ((2 * rows[:, None] + 1) * grid.columns - (2 * columns + 1) * grid.rows).abs()
    return (distance.max() - distance).flatten()


def _best(scores: Tensor, group: int, kept: int) -> Tensor:
    """Return where the `kept` highest of every `group` scores are; of equals, the first."""
    if group == len(scores):
        return _best_of_all(scores, kept)
    best = torch.zeros(len(scores) // group, group, dtype=torch.bool, device=scores.device)
    rows = max(1, CHUNK[scores.device.type] // group)
    parts = torch.split(scores.view(-1, group), rows)
    for part, out in zip(parts, torch.split(best, rows), strict=True):
        order = part.argsort(dim=1, descending=True, stable=True)
        out.scatter_(1, order[:, :kept], True)
    return best.flatten()


def _best_of_all(scores: Tensor, kept: int) -> Tensor:
    """Count by the leading 15 bits to find where the cut falls, and sort only there."""
    shift = max(int(scores.max()).bit_length() - 15, 0)
    counts = torch.zeros(1 << 15, dtype=torch.int64, device=scores.device)
    for part in torch.split(scores, CHUNK[scores.device.type]):
        counts += torch.bincount(part >> shift, minlength=len(counts))
    at_least = counts.flip(0).cumsum(0).flip(0)  # by leading bits: how many scores reach them
    cut = int((at_least >= kept).sum()) - 1
    best = scores > ((cut + 1) << shift) - 1
    tied = ((scores >= cut << shift) & ~best).nonzero().flatten()
    missing = kept - int(at_least[cut]) + len(tied)
    best[tied[scores[tied].argsort(descending=True, stable=True)[:missing]]] = True
    return best
