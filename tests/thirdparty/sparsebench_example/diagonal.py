"""A matrix of its main diagonal alone."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsebench.formats._format import Format, require


@dataclass(frozen=True)
class Diagonal(Format):
    shape: tuple[int, int]
    values: Tensor

    @classmethod
    def from_dense(cls, dense: Tensor, /) -> Self:
        diagonal = dense.diagonal().clone()
        require(bool((dense == torch.diag(diagonal)).all()), "expected zeros off the diagonal")
        return cls((dense.shape[0], dense.shape[1]), diagonal)

    def to_dense(self) -> Tensor:
        return torch.diag(self.values)

    def arrays(self) -> dict[str, Tensor]:
        return {"values": self.values}


FORMAT = Diagonal
