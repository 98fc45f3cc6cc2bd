"""Which elements of a weight stay: 2 of every 4, or the highest of all wherever they are.

    columns          0 1 2 3   4 5 6 7   |   8 9 10 11        keep(weight, scores, columns=8, ...)
    2:4              x . x .   . x x .   |   x x x  x         group 4: 2 of every aligned 4
    unstructured     x x x .   . . x .   |   x x x  x         group 0: half of the row's 8

Columns from there on are left as they are: the dense region of a weight that is split by columns.
Of a row, for rows that keep equally many lose less than rows that share a threshold (Sun et al.,
arXiv 2306.11695, section 5), and load a kernel evenly.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsebench.errors import SuiteError


@dataclass(frozen=True)
class Pattern:
    """How many elements go, `sparsity` of every group of columns, or of all with a group of 0."""

    name: str
    sparsity: float
    group: int

    @classmethod
    def of(cls, text: str) -> Self:
        """Read 2:4, or the fraction that is pruned anywhere; SuiteError for anything else."""
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

    def kept(self, scores: Tensor) -> Tensor:
        """Return where the highest scores of each group are, a bool tensor; of equals, the first.

        Scores [..., columns]; groups are along the last axis.
        """
        size = self.group or scores.shape[-1]
        groups = scores.unflatten(-1, (-1, size))
        order = groups.argsort(dim=-1, descending=True, stable=True)
        stay = size - round(self.sparsity * size)
        chosen = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., :stay], True)
        return chosen.flatten(-2)


TWO_FOUR = Pattern.of("2:4")


def keep(weight: Tensor, scores: Tensor, columns: int, pattern: Pattern = TWO_FOUR) -> Tensor:
    """Prune the first `columns` columns of a weight [n, k] by scores [n, k]; the rest stay."""
    if not columns:
        return weight.clone()
    sparse = weight[:, :columns].where(pattern.kept(scores[:, :columns]), 0)
    return torch.cat((sparse, weight[:, columns:]), dim=1)
