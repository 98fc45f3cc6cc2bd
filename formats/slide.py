"""Slide: weights [n, k] with at most 2N - 2 of each 2N elements, stored as 2:4 by sliding windows.

    a group of 6:8       a b c d e f g h        of 4:6    a b c d e f
    even windows        [a b c d|e f g h]                [a b c d]
    odd windows             [c d e f]                        [c d e f]

Every window of 4 is 2:4. Each element belongs to one window: a window takes the first two elements
that the windows before it left. If a group has at most 2N - 2 elements, the N - 1 windows hold all
of them. The lifted matrix [n, k'] is 2:4; k' is 1.5 k for 6:8 and 1.33 k for 4:6. A product
multiplies it by X', whose columns are copies of those of X:

    Y = X W.T = X' W'.T        X[:, c] is X'[:, j] for every j with columns[j] = c

A block is 16 groups (16 bits) or 32 groups (8 bits). Its lifted columns are the even windows of all
its groups, and then the odd ones. Both runs are whole rows of 128 bytes. In 6:8, the even windows
are X itself, and the odd windows are the middles of its groups of 8:

    X, two rows of 128 bytes         a b c d e f g h  i j k l m n o p ...
    X', three of them                a b c d e f g h  i j k l m n o p ...  c d e f  k l m n ...

W ends with zeros that fill an even number of blocks, so that 6:8 lifts to whole tiles of Spense.

lifted  Spense [n, k'], all of it 2:4 (formats/spense.py)

6:8 takes 1.5 x 0.5625 = 0.84 of the bytes of a dense matrix at 16 bits, and 0.94 at 8 bits.
Multiplied by kernels/spense, if it is 6:8.
Source: SlideSparse, arXiv 2603.05232, which orders the windows of each group side by side.
"""

from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import BITS, Format, has_value, require, require_matrix
from sparsebench.formats.spense import DTYPES, Spense

WINDOW = 4
BLOCK_BYTES = 32  # bytes of an element of each group of a block: 16 groups of 16 bits, 32 of 8


@dataclass(frozen=True, repr=False)
class Slide(Format):
    """The lifted matrix, and the most elements of each group that are not zero."""

    shape: tuple[int, int]
    nonzeros: int
    group: int
    lifted: Spense

    @classmethod
    def from_dense(cls, dense: Tensor, /, *, kept: int = 6, group: int = 8) -> Self:
        """Convert a matrix [n, k] of fp16, bf16, fp8 (e4m3) or int8 (-127 to 127).

        kept, group  at most `kept` of every `group` elements of a row are not zero

        Every value except zero is an element, including NaN. Raises FormatError naming the first
        group with more than `kept` elements.
        """
        require_matrix(dense, integers=True)
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        require(dense.dtype in DTYPES, f"expected one of {names}, found {dense.dtype}")
        starts = starts_of(kept, group)
        n, k = dense.shape
        size = dense.element_size()
        groups = pad(dense.view(BITS[size]), (0, padded(k, group, size) - k)).unflatten(
            1, (-1, group)
        )
        left, windows = has_value(groups), []
        _require_fits(left, kept)
        for start in starts:
            at = slice(start, start + WINDOW)
            taken = left[..., at] & (left[..., at].cumsum(-1) <= 2)
            windows.append(groups[..., at].where(taken, 0))
            left[..., at] &= ~taken
        lifted = _join(windows, BLOCK_BYTES // size).view(dense.dtype)
        return cls((n, k), kept, group, Spense.from_dense(lifted))

    @property
    def dtype(self) -> torch.dtype:
        return self.lifted.dtype

    @property
    def columns(self) -> Tensor:
        """Return the column of X that each column of X' copies, int64 [k']; k and beyond are 0."""
        return columns_of(self.shape[1], self.nonzeros, self.group, self.dtype.itemsize)

    def to_dense(self) -> Tensor:
        """Return the matrix; every element is in one window."""
        n, k = self.shape
        size, starts = self.dtype.itemsize, starts_of(self.nonzeros, self.group)
        width = padded(k, self.group, size)
        bits = self.lifted.to_dense().view(BITS[size])
        dense = bits.new_zeros(n, width // self.group, self.group)
        windows = _cut(bits, len(starts), BLOCK_BYTES // size)
        for start, window in zip(starts, windows, strict=True):
            dense[..., start : start + WINDOW] |= window
        return dense.flatten(1)[:, :k].contiguous().view(self.dtype)

    def arrays(self) -> dict[str, Tensor]:
        return {"sparse": self.lifted.sparse}


def starts_of(kept: int, group: int) -> tuple[int, ...]:
    """Return the first element of each window of a group."""
    right = type(kept) is int and type(group) is int and kept == group - 2 > 0 and group % 2 == 0
    expected = "expected 2N - 2 of 2N, such as 6 of 8"
    require(right, f"kept and group: {expected}; found {kept!r} of {group!r}")
    return tuple(range(0, group - 2, 2))


def padded(k: int, group: int, size: int) -> int:
    """Return k rounded up to an even number of blocks."""
    step = 2 * group * BLOCK_BYTES // size
    return k + -k % step


@cache
def columns_of(k: int, kept: int, group: int, size: int) -> Tensor:
    """Return the column of X that each column of X' copies (Slide.columns)."""
    column = torch.arange(padded(k, group, size)).view(1, -1, group)
    windows = [column[..., start : start + WINDOW] for start in starts_of(kept, group)]
    return _join(windows, BLOCK_BYTES // size)[0]


def _join(windows: list[Tensor], groups: int) -> Tensor:
    """Join windows [n, all groups, 4]: in each block of `groups`, the even ones, then the odd."""
    runs = [torch.stack(windows[parity::2], 2) for parity in (0, 1) if windows[parity::2]]
    return torch.cat([run.unflatten(1, (-1, groups)).flatten(2) for run in runs], 2).flatten(1)


def _cut(lifted: Tensor, windows: int, groups: int) -> list[Tensor]:
    """Undo _join."""
    even, odd = -(-windows // 2), windows // 2
    blocks = lifted.unflatten(1, (-1, WINDOW * windows * groups))
    runs = blocks.split([WINDOW * even * groups, WINDOW * odd * groups], 2)
    of_runs = [
        run.unflatten(2, (groups, count, WINDOW)).flatten(1, 2).unbind(2) if count else ()
        for run, count in zip(runs, (even, odd), strict=True)
    ]
    return [of_runs[window % 2][window // 2] for window in range(windows)]


def _require_fits(stored: Tensor, kept: int) -> None:
    """Raise FormatError if a group of [n, groups, group] has more than `kept` elements."""
    counts, group = stored.sum(-1), stored.shape[-1]
    if not (counts > kept).any():
        return
    row, at = (counts > kept).nonzero()[0].tolist()
    require(
        False,
        f"expected at most {kept} of {group} elements, found {int(counts[row, at])} in row {row}, "
        f"group {at} (columns {group * at} to {group * at + group - 1})",
    )


FORMAT = Slide
