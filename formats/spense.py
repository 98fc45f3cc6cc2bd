"""Spense: weights [n, k] whose first part is 2:4 sparse and whose last part is dense.

    split rows        s s s s s s      split columns    s s s s | d d      s  sparse: of every 4
                      s s s s s s                       s s s s | d d         elements of a row at
                      -----------                       s s s s | d d         most 2 are stored
                      d d d d d d                       s s s s | d d      d  dense

W is cut into tiles of 64 rows x 256 bytes of each row: 128 columns of 16 bits or 256 of 8 bits. The
sparse part is rounded down to whole tiles; with split rows, to pairs of tiles. If W ends inside a
tile, the rest of the tile is zero.

sparse  uint8 [row tiles, column tiles, 9216 or 10240]
dense   uint8 [row tiles, column tiles, 16384]

    a sparse tile    | values, 64 x 128 bytes            | metadata, 1 or 2 KiB     |
    a dense tile     | half the columns, 64 x 128 bytes  | the others, as much again |

Rows of 128 bytes are swizzled for Hopper's tensor cores: 16-byte piece p of row r is at piece
p ^ r % 8 (the 128-byte swizzle). A tile is contiguous, so that one bulk copy loads it.

A group of 4 has 2 values and a code of 4 bits, first | second << 2: their positions in the group.
A group with fewer than 2 non-zeros also stores zeros, with their positions. Codes are packed into
32-bit words, in the order of wgmma's registers, first codes in the low bits. Instruction s of a
tile covers 8 groups (16 bits) or 16 groups (8 bits) of each of 64 rows. The codes of row
16w + 8h + g are in these words of the tile:

    16 bits   groups 8s + 4c + 0..3 of row h = 0, then of h = 1      word [w, g, c, s]
    8 bits    groups 16s + 8c + 0..7                                 word [w, g, c, h, s]

so that a thread reads its words of all four s together. A sparse tile has 0.5625 of the bytes of a
dense one at 16 bits, and 0.625 at 8 bits.
Multiplied by kernels/spense.
Source: Lee et al., arXiv 2606.10445, section 3; PTX ISA 9.0, wgmma.mma_async.sp.
"""

from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import BITS, Format, has_value, require, require_matrix

DTYPES = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
SPLITS = "rows", "columns"
ROWS, ROW_BYTES = 64, 128  # rows and bytes of a row of a swizzled matrix in shared memory
SPAN_BYTES = 2 * ROW_BYTES  # bytes of a row of W in a tile
VALUE_BYTES, DENSE_BYTES = ROWS * ROW_BYTES, ROWS * SPAN_BYTES
CODE_BYTES = 2048  # of the metadata of a sparse tile, divided by the bytes of an element
ROW_STEP = 128  # split rows: rows of the sparse part are a multiple of it, as a GEMM's tile is
# The positions of the two values of a group, for each mask of stored elements (bits 0 to 3). Masks
# 7, 11, 13, 14 and 15 have more than two elements, and are not used.
PAIRS = [(0, 1), (0, 1), (0, 1), (0, 1), (0, 2), (0, 2), (1, 2), (0, 1)]
PAIRS += [(0, 3), (0, 3), (1, 3), (0, 1), (2, 3), (0, 1), (0, 1), (0, 1)]


@dataclass(frozen=True, repr=False)
class Spense(Format):
    """Sparse tiles and dense tiles; `sparse_shape` is rows and columns of the sparse part."""

    shape: tuple[int, int]
    dtype: torch.dtype
    sparse_shape: tuple[int, int]
    sparse: Tensor
    dense: Tensor

    @classmethod
    def from_dense(
        cls, dense: Tensor, /, *, dense_fraction: float = 0.0, split: str = "rows"
    ) -> Self:
        """Convert a matrix [n, k] of fp16, bf16, fp8 (e4m3) or int8 (-127 to 127).

        dense_fraction  fraction of the rows or columns (`split`), the last ones, that are dense

        Every value except zero is an element, including NaN. Raises FormatError naming the first
        group of the sparse part with more than two elements.
        """
        require_matrix(dense, integers=True)
        require(
            dense.dtype in DTYPES,
            f"expected fp16, bf16, fp8 (float8_e4m3fn) or int8, found {dense.dtype}",
        )
        n, k = dense.shape
        rows, columns = sparse_shape_of(n, k, dense.element_size(), dense_fraction, split)
        rest = dense[:, columns:] if columns < k else dense[rows:]
        sparse = _sparse_tiles(dense[:rows, :columns])
        return cls((n, k), dense.dtype, (rows, columns), sparse, _dense_tiles(rest))

    @property
    def span(self) -> int:
        return SPAN_BYTES // self.dtype.itemsize

    @property
    def split(self) -> str:
        """Return "columns" if the last columns are dense, else "rows"."""
        return "columns" if self.sparse_shape[1] < self.shape[1] else "rows"

    def to_dense(self) -> Tensor:
        (n, k), (rows, columns) = self.shape, self.sparse_shape
        dense = torch.zeros(n, k, dtype=BITS[self.dtype.itemsize], device=self.sparse.device)
        rest = dense[:, columns:] if columns < k else dense[rows:]
        rest.copy_(_from_dense_tiles(self.dense, dense.dtype)[: len(rest), : rest.shape[1]])
        dense[:rows, :columns] = _from_sparse_tiles(self.sparse, dense.dtype)[:rows, :columns]
        return dense.view(self.dtype)

    def arrays(self) -> dict[str, Tensor]:
        return {"sparse": self.sparse, "dense": self.dense}


def sparse_shape_of(n: int, k: int, size: int, fraction: float, split: str) -> tuple[int, int]:
    """Return rows and columns of the sparse part."""
    require(split in SPLITS, f"expected a split by rows or columns, found {split!r}")
    right = isinstance(fraction, int | float) and 0 <= fraction <= 1
    require(right, f"expected a dense_fraction of 0 to 1, found {fraction!r}")
    if fraction == 0:
        return n, k
    whole, step = (n, ROW_STEP) if split == "rows" else (k, SPAN_BYTES // size)
    part = int(round(whole * (1 - fraction), 6)) // step * step  # 0.1 * 2560 is below 256
    return (part, k) if split == "rows" else (n, part)


def tile_shapes(
    shape: tuple[int, int], sparse_shape: tuple[int, int], size: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the shapes of the sparse and the dense tiles of W [n, k], uint8.

    size  bytes of an element
    """
    (n, k), (rows, columns) = shape, sparse_shape
    rest = (n, k - columns) if columns < k else (n - rows, k)
    sparse, dense = ((-(-r // ROWS), -(-c * size // SPAN_BYTES)) for r, c in (sparse_shape, rest))
    return (*sparse, VALUE_BYTES + CODE_BYTES // size), (*dense, DENSE_BYTES)


# ---- bytes: tiles of 64 rows, swizzled ----


@cache
def _swizzled(device: torch.device) -> Tensor:
    """Return int64 [512], the 128-byte swizzle of 16-byte pieces of 64 rows, an involution."""
    row, piece = torch.arange(ROWS, device=device)[:, None], torch.arange(8, device=device)
    return (row * 8 + (piece ^ row % 8)).flatten()


def _swizzle(tiles: Tensor) -> Tensor:
    """Swizzle uint8 [..., 8192]; a second call undoes it."""
    pieces: Tensor = tiles.unflatten(-1, (-1, 16))
    return pieces.index_select(-2, _swizzled(tiles.device)).flatten(-2)


def _cut(matrix: Tensor, width: int) -> Tensor:
    """Cut [n, k] into [row tiles, column tiles, 64, width], with zeros beyond its edges."""
    n, k = matrix.shape
    padded = pad(matrix, (0, -k % width, 0, -n % ROWS))
    return padded.view(-(-n // ROWS), ROWS, -(-k // width), width).transpose(1, 2)


def _join(tiles: Tensor) -> Tensor:
    """Undo _cut: [row tiles, column tiles, 64, width] to a matrix."""
    rows, columns, height, width = tiles.shape
    return tiles.transpose(1, 2).reshape(rows * height, columns * width)


def _dense_tiles(matrix: Tensor) -> Tensor:
    size = matrix.element_size()
    tiles = _cut(matrix.view(BITS[size]), SPAN_BYTES // size)
    halves = tiles.unflatten(-1, (2, -1)).transpose(-3, -2).contiguous()
    return _swizzle(halves.view(torch.uint8).flatten(-2)).flatten(-2)


def _from_dense_tiles(tiles: Tensor, bits: torch.dtype) -> Tensor:
    halves = _swizzle(tiles.unflatten(-1, (2, VALUE_BYTES))).unflatten(-1, (ROWS, ROW_BYTES))
    return _join(halves.transpose(-3, -2).flatten(-2).contiguous().view(bits))


# ---- groups of 4: two values and a code ----


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return PAIRS on a device, uint8 [2, 16]."""
    return torch.tensor(PAIRS, dtype=torch.uint8, device=device).T.contiguous()


def _sparse_tiles(matrix: Tensor) -> Tensor:
    size = matrix.element_size()
    bits = _cut(matrix.view(BITS[size]), SPAN_BYTES // size)
    groups = bits.unflatten(-1, (-1, 4))
    stored = has_value(groups).to(torch.uint8)
    _require_two_of_four(stored)
    weights = torch.tensor([1, 2, 4, 8], dtype=torch.uint8, device=matrix.device)
    which = (stored * weights).sum(-1, dtype=torch.uint8).int()
    first, second = (positions[which] for positions in _pairs(matrix.device))
    a, b, c, d = groups.unbind(-1)
    low = a.where(first == 0, b.where(first == 1, c))
    high = d.where(second == 3, c.where(second == 2, b))
    values = torch.stack((low, high), -1).flatten(-2).view(torch.uint8).flatten(-2)
    return torch.cat((_swizzle(values), _words(first | second << 2, size)), -1)


def _from_sparse_tiles(tiles: Tensor, bits: torch.dtype) -> Tensor:
    values = _swizzle(tiles[..., :VALUE_BYTES]).view(bits).unflatten(-1, (ROWS, -1, 2))
    codes = _codes(tiles[..., VALUE_BYTES:], bits.itemsize)
    places = torch.arange(4, dtype=torch.uint8, device=tiles.device)
    first, second = (codes & 3)[..., None] == places, (codes >> 2)[..., None] == places
    zero = values.new_zeros(())
    return _join(values[..., :1].where(first, values[..., 1:].where(second, zero)).flatten(-2))


def _words(codes: Tensor, size: int) -> Tensor:
    """Pack codes uint8 [..., 64 rows, groups] into the metadata of a tile, uint8 [..., bytes]."""
    w_h_g_s_c_j = codes.unflatten(-1, (4, 2, -1)).unflatten(-4, (4, 2, 8))
    order = (-6, -4, -2, -3, -5, -1) if size == 2 else (-6, -4, -2, -5, -3, -1)
    nibbles = _permute(w_h_g_s_c_j, order).flatten(-6).unflatten(-1, (-1, 2))
    words: Tensor = nibbles[..., 0] | nibbles[..., 1] << 4
    return words


def _codes(words: Tensor, size: int) -> Tensor:
    """Undo _words."""
    nibbles = torch.stack((words & 15, words >> 4), -1).flatten(-2)
    sizes, back = (
        ((4, 8, 2, 4, 2, 4), (-6, -2, -5, -3, -4, -1))
        if size == 2
        else ((4, 8, 2, 2, 4, 8), (-6, -3, -5, -2, -4, -1))
    )
    w_h_g_s_c_j = _permute(nibbles.unflatten(-1, sizes), back)
    return w_h_g_s_c_j.flatten(-3).flatten(-4, -2)


def _permute(tensor: Tensor, last: tuple[int, ...]) -> Tensor:
    """Permute the last axes, named from the end."""
    leading = tensor.dim() - len(last)
    return tensor.permute(*range(leading), *(tensor.dim() + axis for axis in last))


def _require_two_of_four(stored: Tensor) -> None:
    """Raise FormatError if a group of [row tiles, column tiles, 64, groups, 4] has more than 2."""
    counts = stored.sum(-1, dtype=torch.uint8)
    if not (counts > 2).any():
        return
    by_row = counts.transpose(1, 2).flatten(2).flatten(0, 1)
    row, group = (by_row > 2).nonzero()[0].tolist()
    require(
        False,
        f"expected at most 2 of 4 elements in the sparse part, found {int(by_row[row, group])} in "
        f"row {row}, group {group} (columns {4 * group} to {4 * group + 3})",
    )


FORMAT = Spense
