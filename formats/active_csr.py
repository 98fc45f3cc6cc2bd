"""CSR of hidden activations: the active units, listed by token and again by unit.

    unit    0 1 2 3            by token                     by unit
          +---------+
    token | a . b . |     offsets  0     2   3     5     unit_offsets  0   1   2     4 5
          | . c . . |     columns  0  2  1   2  3        tokens        0   1   0  2  2
          | . . d e |     values   a  b  c   d  e
          +---------+     places   0  2  1   3  4        of each entry in the list by unit

offsets       int32 [m + 1]     start of each token in `columns`; the last: number of entries
columns       int16 [capacity]  unit of each entry, read as unsigned, ascending within a token
values        dtype [capacity]
unit_offsets  int32 [n + 1]     start of each unit in `tokens`
tokens        int32 [capacity]  ascending within a unit
places        int32 [capacity]

The lists may have room for more entries than there are; the rest is undefined. A backward pass
reads them in both orders: dX sums over the units of a token, dW over the tokens of a unit.

Multiplied by kernels/twell, whose _index.py makes these lists on the GPU at every call.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsebench.formats._format import (
    Format,
    is_stored,
    offsets_of,
    require,
    require_matrix,
    rows_of,
)

MOST_UNITS = 2**16  # limit of 16-bit columns
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, repr=False)
class ActiveCsr(Format):
    """The entries of a matrix [tokens, units], by token and by unit."""

    operand = "activations"

    shape: tuple[int, int]
    offsets: Tensor
    columns: Tensor
    values: Tensor
    unit_offsets: Tensor
    tokens: Tensor
    places: Tensor

    @classmethod
    def from_dense(cls, dense: Tensor, /) -> Self:
        """Convert a matrix [m, n] to lists without spare room. Raises FormatError."""
        require_matrix(dense)
        m, n = dense.shape
        require(n <= MOST_UNITS, f"expected at most {MOST_UNITS} units, found {n}")
        rows, columns = is_stored(dense).nonzero(as_tuple=True)
        require(
            len(rows) <= INT32_MAX,
            f"expected at most {INT32_MAX} entries for 32-bit offsets, found {len(rows)}",
        )
        by_unit = columns.argsort(stable=True)
        places = torch.empty_like(by_unit)
        places[by_unit] = torch.arange(len(by_unit), device=dense.device)
        return cls(
            (m, n),
            offsets_of(rows, m),
            columns.to(torch.int16),
            dense[rows, columns],
            offsets_of(columns, n),
            rows[by_unit].to(torch.int32),
            places.to(torch.int32),
        )

    @property
    def capacity(self) -> int:
        """Return the number of entries that fit in the lists."""
        return self.columns.shape[0]

    def to_dense(self) -> Tensor:
        dense = self.values.new_zeros(self.shape)
        rows = rows_of(self.offsets)
        dense[rows, self.columns[: len(rows)].long() & 0xFFFF] = self.values[: len(rows)]
        return dense

    def arrays(self) -> dict[str, Tensor]:
        names = "offsets", "columns", "values", "unit_offsets", "tokens", "places"
        return {name: getattr(self, name) for name in names}


FORMAT = ActiveCsr
