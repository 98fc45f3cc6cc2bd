"""Block sparse rows: only the r x c blocks that hold a non-zero are stored.

       c   c   c
    r ## . . ##      offsets  0 2 3      (2 block rows)
    r . . ## . .     columns  0 2 1      (block columns)

offsets  int32 [ceil(n/r) + 1]  where each block row starts in `columns`
columns  int32 [blocks]         block column of each stored block, ascending within a block row
values   dtype [blocks, r, c]   row-major blocks; zeros where an edge block leaves the matrix

Any block fits any matrix: blocks of the last block row and column are padded with zeros.

Multiplied by kernels/bsr.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import (
    Format,
    is_stored,
    offsets_of,
    require_matrix,
    require_size,
    rows_of,
    sides_of,
)


@dataclass(frozen=True, repr=False)
class Bsr(Format):
    """A matrix of r x c blocks; blocks of zeros are not stored."""

    shape: tuple[int, int]
    offsets: Tensor
    columns: Tensor
    values: Tensor

    @classmethod
    def from_dense(cls, dense: Tensor, /, *, block: int | list[int] = 32) -> Self:
        """Convert a matrix [n, k] to blocks of `block`, or [rows, columns]. Raises FormatError."""
        require_matrix(dense)
        r, c = sides_of(block)
        n, k = dense.shape
        blocks = _in_blocks(dense, r, c)
        rows, columns = is_stored(blocks).any(3).any(1).nonzero(as_tuple=True)
        values = blocks[rows, :, columns].contiguous()
        return cls((n, k), offsets_of(rows, len(blocks)), columns.to(torch.int32), values)

    @property
    def block(self) -> tuple[int, int]:
        """Return r and c."""
        return self.values.shape[1], self.values.shape[2]

    def to_dense(self) -> Tensor:
        """Return the matrix: blocks at their positions, padding cut off."""
        (n, k), (r, c) = self.shape, self.block
        block_rows, block_columns = -(-n // r), -(-k // c)
        blocks = self.values.new_zeros(block_rows, block_columns, r, c)
        blocks[rows_of(self.offsets), self.columns.long()] = self.values
        padded = blocks.transpose(1, 2).reshape(block_rows * r, block_columns * c)
        return padded[:n, :k].contiguous()

    def sample(self, dense: Tensor) -> Self:
        """Return all elements of the stored blocks of another matrix; zeros in the padding."""
        require_size(dense, self.shape)
        blocks = _in_blocks(dense, *self.block)
        at = rows_of(self.offsets), slice(None), self.columns.long()
        return replace(self, values=blocks[at].contiguous())

    def arrays(self) -> dict[str, Tensor]:
        return {"offsets": self.offsets, "columns": self.columns, "values": self.values}


def _in_blocks(dense: Tensor, r: int, c: int) -> Tensor:
    """Return a matrix as [block rows, r, block columns, c], padded with zeros to whole blocks."""
    n, k = dense.shape
    padded = pad(dense, (0, -k % c, 0, -n % r)) if n % r or k % c else dense
    return padded.view(padded.shape[0] // r, r, padded.shape[1] // c, c)


FORMAT = Bsr
