"""Int4: weights [n, k] in 4 bits, with one scale for each group of 128 weights of a row.

    w[i, j] = (code[i, j] - 8) * scale[i, j // group]        codes 0 to 15, so -8 to 7 scales

    one row, group of 4        codes                      packed, uint8
    -3s 0 s 7s | 2t -8t t t    5 8 9 15 | 10 0 9 9        58 9f | a0 99

codes   uint8 [n, ceil(k / 2)]          two columns per byte, the even one in the high bits
scales  dtype [n, ceil(k / group)]      in the dtype of the weights

Nothing is rounded: the format stores a matrix only if every group consists of multiples of one
scale, and refuses all others. Problems with `weight_bits: 4` (harness/ops/linear.py) have such
weights, and every other format can store them too, so all contenders multiply the same matrix.
With scales of 16 bits and groups of 128, a weight takes 4.125 bits. Zeros are stored, too.

Multiplied by kernels/peers/torch_int4.py and by Marlin (authors/). int4_two_four.py stores half of
the codes of weights that are also 2:4 sparse.
Source: Frantar et al., GPTQ, arXiv 2210.17323, for groups of 128.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import Format, require, require_matrix, require_whole

DTYPES = torch.float16, torch.bfloat16, torch.float32
LEAST, MOST = -8, 7
ZERO = -LEAST  # the code of a zero


@dataclass(frozen=True, repr=False)
class Int4(Format):
    """Packed codes and scales; `group` is the number of weights per scale."""

    shape: tuple[int, int]
    group: int
    codes: Tensor
    scales: Tensor

    @classmethod
    def from_dense(cls, dense: Tensor, /, *, group: int = 128) -> Self:
        """Convert a matrix [n, k] of fp16, bf16 or fp32.

        Raises FormatError naming the first group that has no scale.
        """
        require_matrix(dense)
        require_whole("group", group)
        require(dense.dtype in DTYPES, f"expected fp16, bf16 or fp32, found {dense.dtype}")
        n, k = dense.shape
        groups = pad(dense, (0, -k % group)).view(n, -1, group)
        scales = _scales(groups)
        bad = scales.isnan().nonzero()
        if len(bad):
            row, first = int(bad[0, 0]), int(bad[0, 1]) * group
            where = f"row {row}, columns {first} to {min(first + group, k) - 1}"
            expected = f"every {group} weights of a row to be {LEAST} to {MOST} times one scale"
            require(False, f"expected {expected} in {dense.dtype}; found others in {where}")
        codes = (groups / scales[..., None]).round().to(torch.int8) + ZERO
        codes = codes.view(n, -1)[:, :k].to(torch.uint8)
        return cls((n, k), group, packed(codes), scales)

    @classmethod
    def examples(cls) -> Sequence[Tensor]:
        """Return matrices of multiples of one scale for each row."""
        draw = torch.Generator().manual_seed(0)
        shapes = (1, 1), (3, 5), (33, 64), (70, 300)
        return [
            torch.randint(LEAST, MOST + 1, shape, generator=draw)
            * 2.0 ** -(torch.arange(shape[0]) % 5)[:, None]
            for shape in shapes
        ]

    def unpacked(self) -> Tensor:
        """Return the codes, uint8 [n, k]."""
        n, k = self.shape
        return torch.stack((self.codes >> 4, self.codes & 15), 2).view(n, -1)[:, :k]

    def to_dense(self) -> Tensor:
        scales = self.scales.repeat_interleave(self.group, 1)[:, : self.shape[1]]
        return (self.unpacked().to(scales.dtype) - ZERO) * scales

    def arrays(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "scales": self.scales}


def packed(codes: Tensor) -> Tensor:
    """Return codes [n, k] as two per byte, the even column in the high bits."""
    even, odd = pad(codes, (0, codes.shape[1] % 2)).unflatten(1, (-1, 2)).unbind(2)
    pairs: Tensor = even << 4 | odd
    return pairs.contiguous()


def _scales(groups: Tensor) -> Tensor:
    """Return the largest scale of each group [n, groups, group], 1 without values, NaN if none.

    The largest magnitude is 1 to 8 scales. A quotient is exact in fp64 if it is an integer.
    """
    most = groups.abs().amax(2)
    scales = torch.full_like(most, torch.nan).masked_fill(most == 0, 1)
    exact, largest = groups.double(), most.double()
    for multiple in range(-LEAST, 0, -1):
        scale = largest / multiple
        codes = exact * multiple / largest[..., None]
        whole = (codes == codes.round()) & (codes >= LEAST) & (codes <= MOST)
        fits = whole.all(2) & (scale.to(most.dtype).double() == scale)
        scales = torch.where(fits, scale.to(most.dtype), scales)
    return scales


FORMAT = Int4
