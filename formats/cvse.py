"""Column-vector sparse encoding (CVSE): hidden activations in vectors of a few tokens each.

Tokens form groups of `height`. If a unit is active for any token of a group, the group stores one
vector: the unit's values for all tokens of the group, zeros included. Four tokens of four units,
with a height of 2:

    a . b .      offsets  0   2   3      (2 groups)        values  a .     (unit 0)
    . . c .      columns  0 2 3          (units)                   b c     (unit 2)
    . . . .                                                        . d     (unit 3)
    . . . d

offsets  int32 [ceil(m / height) + 1]  start of each group in `columns`
columns  int32 [vectors]               unit of each vector, ascending within a group
values   dtype [vectors, height]       zeros for tokens beyond the last

Multiplied by kernels/twell, which builds the encoding at every call: ffn_sparse.cu with a height of
up to 8, one tensor core operand, and ffn_few.cu with all tokens of a call, 8 to 64, in one vector.
Source: Chen et al., "Efficient Tensor Core-Based GPU Kernels for Structured Sparsity under Reduced
Precision", SC '21.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import (
    Format,
    is_stored,
    offsets_of,
    require_matrix,
    require_whole,
    rows_of,
)


@dataclass(frozen=True, repr=False)
class Cvse(Format):
    """Column vectors of `height` tokens."""

    operand = "activations"

    shape: tuple[int, int]
    offsets: Tensor
    columns: Tensor
    values: Tensor

    @classmethod
    def from_dense(cls, dense: Tensor, /, *, height: int = 8) -> Self:
        """Convert a matrix [tokens, units]. Raises FormatError."""
        require_matrix(dense)
        require_whole("height", height)
        m, n = dense.shape
        groups = pad(dense, (0, 0, 0, -m % height)).view(-1, height, n)
        rows, columns = is_stored(groups).any(1).nonzero(as_tuple=True)
        offsets = offsets_of(rows, len(groups))
        return cls((m, n), offsets, columns.to(torch.int32), groups[rows, :, columns].contiguous())

    @property
    def height(self) -> int:
        """Return the number of tokens in a vector."""
        return self.values.shape[1]

    def to_dense(self) -> Tensor:
        """Return the matrix: vectors at their positions, tokens beyond the last cut off."""
        (m, n), groups = self.shape, len(self.offsets) - 1
        dense = self.values.new_zeros(groups, self.height, n)
        dense[rows_of(self.offsets, len(self.columns)), :, self.columns.long()] = self.values
        return dense.view(-1, n)[:m].contiguous()

    def arrays(self) -> dict[str, Tensor]:
        return {"offsets": self.offsets, "columns": self.columns, "values": self.values}


FORMAT = Cvse
