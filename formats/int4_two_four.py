"""2:4 weights [n, k] in 4 bits: of every 4 elements of a row 2 are stored, in 4 bits each.

    a group of 4     codes, + 8    position of each          packed
    0 3s -s 0        11 7          1 2                       codes b7   positions 1 | 2 << 2 = 9

codes      uint8 [n, ceil(k / 8), 2]      a byte per group, the first element in the high bits
positions  uint8 [n, ceil(k / 8)]         4 bits per group, the first group in the low bits
scales     dtype [n, ceil(k / group)]     as in int4.py, one for each 128 columns

Like int4, it stores only multiples of one scale per group, and never rounds. A group with
fewer than 2 non-zeros also stores zeros, with their positions. With scales of 16 bits, a weight
takes 3.125 bits. Multiplied by authors/, by Sparse-Marlin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import Format, require
from sparsebench.formats.int4 import ZERO, Int4


@dataclass(frozen=True, repr=False)
class Int4TwoFour(Format):
    """Packed codes, positions and scales; `group` is the number of columns per scale."""

    shape: tuple[int, int]
    group: int
    codes: Tensor
    positions: Tensor
    scales: Tensor

    @classmethod
    def from_dense(cls, dense: Tensor, /, *, group: int = 128) -> Self:
        """Convert a matrix [n, k] of fp16, bf16 or fp32. Raises FormatError."""
        whole = Int4.from_dense(dense, group=group)
        (n, k), codes = whole.shape, whole.unpacked()
        fours = pad(codes, (0, -k % 8), value=ZERO).view(n, -1, 4)
        nonzero = fours != ZERO
        bad = (nonzero.sum(2) > 2).nonzero()
        if len(bad):
            row, column = int(bad[0, 0]), 4 * int(bad[0, 1])
            where = f"row {row}, columns {column} to {column + 3}"
            require(False, f"expected at most 2 elements of every 4; found more in {where}")
        order = nonzero.byte().argsort(dim=2, descending=True, stable=True)
        places = order[..., :2].sort(2).values
        first, second = fours.gather(2, places).unbind(2)
        four_bits = (places[..., 0] | places[..., 1] << 2).to(torch.uint8)
        low, high = four_bits.view(n, -1, 2).unbind(2)
        stored = (first << 4 | second).view(n, -1, 2).contiguous()
        return cls((n, k), group, stored, (low | high << 4).contiguous(), whole.scales)

    @classmethod
    def examples(cls) -> Sequence[Tensor]:
        """Return the examples of int4 with the second half of every 4 elements zero."""
        return [dense.where(torch.arange(dense.shape[1]) % 4 < 2, 0) for dense in Int4.examples()]

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Return codes and positions of the stored elements, int64 [n, groups of 4, 2]."""
        codes = self.codes.flatten(1).long()
        four_bits = torch.stack((self.positions & 15, self.positions >> 4), 2).flatten(1).long()
        return (
            torch.stack((codes >> 4, codes & 15), 2),
            torch.stack((four_bits & 3, four_bits >> 2), 2),
        )

    def to_dense(self) -> Tensor:
        codes, places = self.unpacked()
        n, groups, _ = codes.shape
        fours = codes.new_full((n, groups, 4), ZERO).scatter(2, places, codes)
        k = self.shape[1]
        scales = self.scales.repeat_interleave(self.group, 1)[:, :k]
        return (fours.flatten(1)[:, :k] - ZERO).to(scales.dtype) * scales

    def arrays(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "positions": self.positions, "scales": self.scales}


FORMAT = Int4TwoFour
