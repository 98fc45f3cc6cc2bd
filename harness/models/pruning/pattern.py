"""Choose the elements of a weight to keep, and prune by magnitude or by Wanda.

    columns          0 1 2 3   4 5 6 7   |   8 9 10 11        keep(weight, scores, columns=8, ...)
    2:4              x . x .   . x x .   |   x x x  x         group 4: 2 of every aligned 4
    6:8              x . x x   x x x .   |   x x x  x         group 8: 6 of every aligned 8
    0.5              x x x .   . . x .   |   x x x  x         group 0: half of the row's 8
    4x4:0.5          x x x x   . . . .   |   x x x  x         blocks of 4 rows and 4 columns

The remaining columns are the dense region of a weight that is split by columns, and do not change.
Without blocks, every row keeps equally many elements: this loses less accuracy than a threshold
that rows share (Sun et al., arXiv 2306.11695, section 5), and balances the load of a kernel.
Blocks compete over the whole weight, by the sum of the squares of their scores: for scores of
magnitude that is the Euclidean norm, by which BlockSparse (sparsify.py) chooses.
"""

import re
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from sparsebench.errors import SuiteError

FORMS = "N:M such as 2:4, a fraction such as 0.5, or blocks such as 64x64:0.8"


@dataclass(frozen=True)
class Pattern:
    """Prune a fraction of the elements.

    name      N:M, unstructured, or the size of the blocks
    sparsity  fraction to prune, above 0 and below 1
    group     each group of this many columns loses this fraction; 0 for the whole row
    block     side of the square blocks that are kept or pruned as a whole; 1 for single elements
    """

    name: str
    sparsity: float
    group: int = 0
    block: int = 1

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse `2:4`, `0.5` or `64x64:0.8`. Raises SuiteError."""
        shape, _, rest = text.rpartition(":")
        message = f"pattern: expected {FORMS}; found {text!r}"
        try:
            if shape.isdecimal():
                pattern = cls(text, 1 - int(shape) / int(rest), int(rest))
            elif sides := re.fullmatch(r"(\d+)x\1", shape):
                pattern = cls(shape, float(rest), block=int(sides[1]))
            else:
                pattern = cls("unstructured", float(text))
        except (ValueError, ZeroDivisionError) as error:
            raise SuiteError(message) from error
        if not 0 < pattern.sparsity < 1 or pattern.block < 1:
            raise SuiteError(message)
        return pattern

    @property
    def unit(self) -> int:
        """Return the number of columns that are pruned together; 1 if any number can be."""
        return self.group or self.block

    def mask(self, scores: Tensor) -> Tensor:
        """Return a mask [..., columns] of the highest scores; for blocks, scores are [n, columns].

        Among equal scores the first are kept. Raises SuiteError if none would stay, or if the
        groups or blocks do not divide the scores.
        """
        if self.block > 1:
            return self._block_mask(scores)
        size = self.group or scores.shape[-1]
        if size and scores.shape[-1] % size:
            raise SuiteError(f"pattern: expected a multiple of {size}, found {scores.shape[-1]}")
        return self._highest(scores.unflatten(-1, (-1, size))).flatten(-2)

    def _block_mask(self, scores: Tensor) -> Tensor:
        n, k = scores.shape
        if n % self.block or k % self.block:
            raise SuiteError(f"pattern: expected multiples of {self.block}, found {n}x{k}")
        relative = scores / scores.amax().clamp_min(torch.finfo(scores.dtype).tiny)
        means = avg_pool2d(relative.square()[None], self.block)[0]
        stay = self._highest(means.flatten()).view_as(means)
        return stay.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)

    def _highest(self, scores: Tensor) -> Tensor:
        """Return a mask of the highest scores [..., size] along the last axis."""
        size = scores.shape[-1]
        order = scores.argsort(dim=-1, descending=True, stable=True)
        stay = size - round(self.sparsity * size)
        if size and not stay:
            expected = f"a part of every {size} to stay at sparsity {self.sparsity:g}"
            raise SuiteError(f"pattern: expected {expected}, found none")
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :stay], True)


TWO_FOUR = Pattern.of("2:4")


def keep(weight: Tensor, scores: Tensor, columns: int, pattern: Pattern = TWO_FOUR) -> Tensor:
    """Prune the first `columns` columns of a weight [n, k] by scores [n, k]."""
    if not columns:
        return weight.clone()
    sparse = weight[:, :columns].where(pattern.mask(scores[:, :columns]), 0)
    return torch.cat((sparse, weight[:, columns:]), dim=1)


def input_norms(x: Tensor) -> Tensor:
    """Return the norm of each input of x [tokens, k]; in fp32, squares of 1e-30 would be zero."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=0, dtype=torch.float64)
    return norms.to(x.dtype)


def magnitude(weight: Tensor, x: Tensor, columns: int, pattern: Pattern = TWO_FOUR) -> Tensor:
    """Keep the largest |w_ij| of a weight [n, k]; the inputs x [tokens, k] are not used."""
    return keep(weight, weight.abs(), columns, pattern)


def wanda(weight: Tensor, x: Tensor, columns: int, pattern: Pattern = TWO_FOUR) -> Tensor:
    """Keep the largest |w_ij| ||x_j||, with the norm of input j over the tokens of x [tokens, k].

    Source: Sun et al., arXiv 2306.11695, section 3.
    """
    return keep(weight, weight.abs() * input_norms(x), columns, pattern)
