"""A weight as a grid of blocks, the scores of its cells, and the selection of the best ones.

   c   c   c
r ## . . ##      cells row by row: 0 1 2 3 ...; blocks of the last row and column may be cut off
r . . ## . .
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.harness.inputs.bits import CHUNK


@dataclass(frozen=True)
class ValueGrid:
    """A matrix [n, k] in blocks of r x c; those of the last row and column may be cut off."""

    n: int
    k: int
    r: int = 1
    c: int = 1

    @property
    def rows(self) -> int:
        return -(-self.n // self.r)

    @property
    def columns(self) -> int:
        return -(-self.k // self.c)

    @property
    def cells(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Stack:
    """Masks of attention, one below the other, in cells of `block` queries and keys.

    count   masks: one for each list of each sequence (formats/block_mask.py)
    tokens  queries and keys of each
    causal  query q sees keys up to q + keys - queries
    video   frames, rows and columns of the video that the tokens come from, if any
    """

    count: int
    tokens: tuple[int, int]
    block: tuple[int, int]
    causal: bool = False
    video: tuple[int, int, int] | None = None

    @property
    def rows(self) -> int:
        return -(-self.tokens[0] // self.block[0])

    @property
    def columns(self) -> int:
        return -(-self.tokens[1] // self.block[1])


Score = Callable[[ValueGrid], Tensor]
"""Maps a grid to a non-negative integer for each cell, row by row."""


def magnitudes(weight: Tensor, grid: ValueGrid) -> Tensor:
    """Return the L1 norm of each block of a finite weight, as integers.

    Elements are rounded to 2^-40 of the largest before they are summed: a sum of integers is the
    same in any order and so on any device. No element but zero is rounded to 0, so a block that
    has a value scores above one that has none.
    """
    size = weight.abs().float()
    if grid.r == grid.c == 1:
        return size.view(torch.int32).flatten()  # the bits of positive floats keep their order
    bits = min(40, 62 - (grid.r * grid.c).bit_length())  # so that no sum leaves an int64
    _, exponent = size.max().frexp()
    whole = (size.double() * 2.0 ** (bits - int(exponent))).round().long()
    whole.masked_fill_((whole == 0) & (size > 0), 1)
    edge = (0, grid.columns * grid.c - grid.k, 0, grid.rows * grid.r - grid.n)
    return pad(whole, edge).view(grid.rows, grid.r, grid.columns, grid.c).sum((1, 3)).flatten()


def best(scores: Tensor, group: int, count: int) -> Tensor:
    """Return a mask of the `kept` highest of every `group` scores; of equal ones, the first."""
    if group == len(scores):
        return _best_of_all(scores, count)
    chosen = torch.zeros(len(scores) // group, group, dtype=torch.bool, device=scores.device)
    rows = max(1, CHUNK[scores.device.type] // group)
    parts = torch.split(scores.view(-1, group), rows)
    for part, out in zip(parts, torch.split(chosen, rows), strict=True):
        order = part.argsort(dim=1, descending=True, stable=True)
        out.scatter_(1, order[:, :count], True)
    return chosen.flatten()


def _best_of_all(scores: Tensor, count: int) -> Tensor:
    """Find the cut by counting the leading 15 bits, and sort only the scores at the cut."""
    shift = max(int(scores.max()).bit_length() - 15, 0)
    counts = torch.zeros(1 << 15, dtype=torch.int64, device=scores.device)
    for part in torch.split(scores, CHUNK[scores.device.type]):
        counts += torch.bincount(part >> shift, minlength=len(counts))
    at_least = counts.flip(0).cumsum(0).flip(0)  # by leading bits: how many scores reach them
    cut = int((at_least >= count).sum()) - 1
    chosen = scores > ((cut + 1) << shift) - 1
    tied = ((scores >= cut << shift) & ~chosen).nonzero().flatten()
    missing = count - int(at_least[cut]) + len(tied)
    chosen[tied[scores[tied].argsort(descending=True, stable=True)[:missing]]] = True
    return chosen
