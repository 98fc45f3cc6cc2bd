"""Dense row-major storage: the matrix itself, and the input of every dense baseline.

values  dtype [n, k]

Multiplied by kernels/dense.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from sparsebench.formats._format import Format, require_matrix


@dataclass(frozen=True, repr=False)
class Dense(Format):
    """A matrix stored as itself."""

    shape: tuple[int, int]
    values: Tensor

    @classmethod
    def from_dense(cls, dense: Tensor, /) -> Self:
        """Keep the matrix [n, k], without a copy. Raises FormatError."""
        require_matrix(dense, integers=True)
        return cls((dense.shape[0], dense.shape[1]), dense)

    def to_dense(self) -> Tensor:
        return self.values

    def arrays(self) -> dict[str, Tensor]:
        return {"values": self.values}


FORMAT = Dense
