"""Block sparse rows: only the r x c blocks that hold a non-zero are stored.

       c   c   c
    r ## . . ##      offsets  0 2 3      (2 block rows)
    r . . ## . .     columns  0 2 1      (block columns)

offsets  int32 [ceil(n/r) + 1]  where each block row starts in `columns`
columns  int32 [blocks]         block column of each stored block, ascending within a block row
values   dtype [blocks, r, c]   row-major blocks; zeros where an edge block leaves the matrix

Any block fits any matrix: blocks of the last block row and column are padded with zeros.

`freeze` declares that a weight is not written again, so that `sparsebench.matmul` packs it once.

Multiplied by kernels/bsr.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import (
    Format,
    is_stored,
    offsets_of,
    require,
    require_matrix,
    require_size,
    rows_of,
    sides_of,
)

WRITES = "_sparsebench_writes"  # attribute of a frozen weight: torch's counts of writes by array


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
        blocks[rows_of(self.offsets, len(self.columns)), self.columns.long()] = self.values
        padded = blocks.transpose(1, 2).reshape(block_rows * r, block_columns * c)
        return padded[:n, :k].contiguous()

    def sample(self, dense: Tensor) -> Self:
        """Return all elements of the stored blocks of another matrix; zeros in the padding."""
        require_size(dense, self.shape)
        blocks = _in_blocks(dense, *self.block)
        at = rows_of(self.offsets, len(self.columns)), slice(None), self.columns.long()
        return replace(self, values=blocks[at].contiguous())

    def freeze(self) -> Self:
        """Return this weight, in the same memory, as one that is not written again.

        `sparsebench.matmul` packs it once, also if a CUDA graph captures the call. It has no
        gradient. The next call after a write that torch counts raises FormatError, unless
        torch.compile compiled it. A graph that was captured before the write replays the old
        values. Copies and pickles are not frozen. Raises FormatError for arrays made in inference
        mode.
        """
        index, values = (self.offsets.detach(), self.columns.detach()), self.values.detach()
        uncounted = "expected a weight made outside of inference mode, where torch counts no write"
        require(not any(a.is_inference() for a in (*index, values)), f"freeze: {uncounted}")
        frozen = type(self)(self.shape, *index, values)
        object.__setattr__(frozen, WRITES, frozen._writes())
        return frozen

    @property
    def is_frozen(self) -> bool:
        """Return whether `freeze` made it. Raises FormatError if it was written since then."""
        if (before := self.__dict__.get(WRITES)) is None:
            return False
        changed = [name for name, count in self._writes().items() if count != before[name]]
        expected = "expected no write after Bsr.freeze(), found one: freeze the weight again"
        require(not changed, f"{', '.join(changed)}: {expected}")
        return True

    def _writes(self) -> dict[str, int]:
        return {name: array._version for name, array in self.arrays().items()}

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the arrays, without what was made for these addresses."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def arrays(self) -> dict[str, Tensor]:
        return {"offsets": self.offsets, "columns": self.columns, "values": self.values}


def _in_blocks(dense: Tensor, r: int, c: int) -> Tensor:
    """Return a matrix as [block rows, r, block columns, c], padded with zeros to whole blocks."""
    n, k = dense.shape
    padded = pad(dense, (0, -k % c, 0, -n % r)) if n % r or k % c else dense
    return padded.view(padded.shape[0] // r, r, padded.shape[1] // c, c)


FORMAT = Bsr
