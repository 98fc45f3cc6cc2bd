"""Choose the elements of a weight to keep, and prune by magnitude or by Wanda.

    columns          0 1 2 3   4 5 6 7   |   8 9 10 11        keep(weight, scores, columns=8, ...)
    2:4              x . x .   . x x .   |   x x x  x         group 4: 2 of every aligned 4
    unstructured     x x x .   . . x .   |   x x x  x         group 0: half of the row's 8

The remaining columns are the dense region of a weight that is split by columns, and do not change.
Every row keeps equally many elements: this loses less accuracy than a threshold that rows share
(Sun et al., arXiv 2306.11695, section 5), and balances the load of a kernel.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsebench.errors import SuiteError


@dataclass(frozen=True)
class Pattern:
    """Prune the fraction `sparsity` of every `group` columns; a group of 0 is the whole row."""

    name: str
    sparsity: float
    group: int

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse `2:4`, or a fraction to prune anywhere such as `0.5`. Raises SuiteError."""
        if text == "2:4":
            return cls(text, 0.5, 4)
        expected = f"pattern: expected 2:4, or a fraction such as 0.5; found {text!r}"
        try:
            sparsity = float(text)
        except ValueError as error:
            raise SuiteError(expected) from error
        if not 0 < sparsity < 1:
            raise SuiteError(expected)
        return cls("unstructured", sparsity, 0)

    def mask(self, scores: Tensor) -> Tensor:
        """Return a mask of the highest scores [..., columns] in each group along the last axis.

        Among equal scores the first are kept. Raises SuiteError if none would stay.
        """
        size = self.group or scores.shape[-1]
        groups = scores.unflatten(-1, (-1, size))
        order = groups.argsort(dim=-1, descending=True, stable=True)
        stay = size - round(self.sparsity * size)
        if size and not stay:
            expected = f"an element of every {size} to stay at sparsity {self.sparsity:g}"
            raise SuiteError(f"pattern: expected {expected}, found none")
        mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., :stay], True)
        return mask.flatten(-2)


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
