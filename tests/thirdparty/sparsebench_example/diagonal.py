"""A matrix of its main diagonal alone."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsebench.formats._format import Format, require, require_matrix


@dataclass(frozen=True)
class Diagonal(Format):
    shape: tuple[int, int]
    values: Tensor

    @classmethod
    def from_dense(cls, dense: Tensor, /) -> Self:
        require_matrix(dense)
        rows, columns = dense.shape
        require(rows == columns, f"expected a square matrix, found {rows} x {columns}")
        diagonal = dense.diagonal().clone()
        beside = int(dense.count_nonzero() - diagonal.count_nonzero())
        require(not beside, f"expected zeros off the diagonal, found {beside} others")
        return cls((rows, columns), diagonal)

    def to_dense(self) -> Tensor:
        return torch.diag(self.values)

    def arrays(self) -> dict[str, Tensor]:
        return {"values": self.values}


FORMAT = Diagonal
