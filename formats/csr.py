"""Compressed sparse rows: the non-zeros of each row, one after the other.

    1 . 2        offsets  0 2 2 3
    . . .        columns  0 2 1
    . 3 .        values   1 2 3

offsets  int32 [n + 1]  where each row starts
columns  int32 [nnz]    ascending within a row
values   dtype [nnz]

Multiplied by kernels/csr.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from sparsebench.formats._format import (
    Format,
    is_stored,
    offsets_of,
    require,
    require_matrix,
    require_size,
    rows_of,
)

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, repr=False)
class Csr(Format):
    """A matrix of its non-zeros, row by row."""

    shape: tuple[int, int]
    offsets: Tensor
    columns: Tensor
    values: Tensor

    @classmethod
    def from_dense(cls, dense: Tensor, /) -> Self:
        """Convert a matrix [n, k]; NaN is stored, -0.0 is not. Raises FormatError."""
        require_matrix(dense)
        n, k = dense.shape
        rows, columns = is_stored(dense).nonzero(as_tuple=True)
        require(
            len(rows) <= INT32_MAX,
            f"expected at most {INT32_MAX} non-zeros for 32-bit offsets, found {len(rows)}",
        )
        values = dense[rows, columns]
        return cls((n, k), offsets_of(rows, n), columns.to(torch.int32), values)

    def to_dense(self) -> Tensor:
        n, k = self.shape
        dense = self.values.new_zeros(n, k)
        dense[rows_of(self.offsets, len(self.columns)), self.columns.long()] = self.values
        return dense

    def sample(self, dense: Tensor) -> Self:
        """Return the elements of another matrix at the stored positions."""
        require_size(dense, self.shape)
        at = rows_of(self.offsets, len(self.columns)), self.columns.long()
        return replace(self, values=dense[at])

    def arrays(self) -> dict[str, Tensor]:
        return {"offsets": self.offsets, "columns": self.columns, "values": self.values}


FORMAT = Csr
