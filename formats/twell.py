"""TwELL, tile-wise ELLPACK: sparse activations [tokens, features] in tiles of a few slots each.

A tile covers `tile` columns of one token and has `capacity` slots. With 4 columns and 2 slots:

    a . b . | . . . .      counts  2 0      columns  0 2  . .      values  a b  . .
    . c . . | d e f .              1 2               1 .  4 5              c .  d e

                           spill_offsets  0 0 1      spill_columns  6      spill_values  f

counts         int32 [m, tiles]            entries in each tile, at most the capacity
columns        int16 [m, tiles, capacity]  columns of the matrix, to be read as unsigned
values         dtype [m, tiles, capacity]  free slots are zero, in `columns` too
spill_offsets  int32 [m + 1]               where each token starts in the spill
spill_columns  int16 [spilled]             as `columns`: ascending within a token
spill_values   dtype [spilled]

tiles is ceil(n / tile). A tile takes its entries from the left. Entries beyond the capacity go to
the spill, so any matrix fits. The published layout has tiles of 256 columns, 31 slots, bf16 values
and no spill. A tile is then 32 words of 32 bits, which one warp loads at once:

    words  [m, tiles * (capacity + 1)]    count  e0  e1  ...  | count  e0  e1  ... |
           an entry e: column in bits 15..0, bits of the bf16 value in bits 31..16

The published kernel drops entries beyond the capacity. `from_words` and `words` raise FormatError
instead. Our kernel (twell_gate.cu) counts them all, and writes such a tile to a dense matrix.
Multiplied by kernels/twell.
Source: Cetin et al., arXiv 2603.23198, section 3.2; github SakanaAI/sparser-faster-llms.
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
    require_whole,
    rows_of,
)

INT32_MAX = 2**31 - 1
MOST_COLUMNS = 2**16


@dataclass(frozen=True, repr=False)
class Twell(Format):
    """Tiles of `capacity` slots each, and a spill."""

    operand = "activations"

    shape: tuple[int, int]
    tile: int
    counts: Tensor
    columns: Tensor
    values: Tensor
    spill_offsets: Tensor
    spill_columns: Tensor
    spill_values: Tensor

    @classmethod
    def from_dense(cls, dense: Tensor, /, *, tile: int = 256, capacity: int = 31) -> Self:
        """Convert a matrix [m, n]. Every non-zero is an entry, in column order.

        `tile` and `capacity` are the columns and slots of a tile. Raises FormatError.
        """
        require_matrix(dense)
        m, n = dense.shape
        tiles = _tiles(n, tile, capacity)
        rows, columns = is_stored(dense).nonzero(as_tuple=True)
        entries, narrow = dense[rows, columns], columns.to(torch.int16)
        tile_of = rows * tiles + columns // tile
        counts = torch.bincount(tile_of, minlength=m * tiles)
        first = counts.cumsum(0) - counts
        rank = torch.arange(len(rows), device=dense.device) - first[tile_of]
        spills = rank >= capacity
        fits = ~spills
        spilled = int(spills.sum())
        require(
            spilled <= INT32_MAX,
            f"expected a spill of at most {INT32_MAX} for 32-bit offsets, found {spilled}",
        )
        at = tile_of[fits], rank[fits]
        slots, blank = (m, tiles, capacity), (m * tiles, capacity)
        return cls(
            (m, n),
            tile,
            counts.clamp(max=capacity).to(torch.int32).view(m, tiles),
            narrow.new_zeros(blank).index_put_(at, narrow[fits]).view(slots),
            dense.new_zeros(blank).index_put_(at, entries[fits]).view(slots),
            offsets_of(rows[spills], m),
            narrow[spills],
            entries[spills],
        )

    @classmethod
    def from_words(
        cls,
        words: Tensor,
        shape: tuple[int, int],
        *,
        tile: int = 256,
        capacity: int = 31,
        dense: Tensor | None = None,
    ) -> Self:
        """Read the published layout: 32-bit words [m, tiles * (capacity + 1)].

        `dense` [m, n] holds the tiles whose count exceeds the capacity, and determines the dtype of
        the values; without it they are bf16. Entries keep their order, because the published kernel
        writes them as its threads arrive. Words after a tile's last entry are ignored. Raises
        FormatError if a column is outside its tile, or if a count exceeds the capacity and there
        is no `dense`, since entries are lost then.
        """
        m, n = shape
        tiles = _tiles(n, tile, capacity)
        _require_packable(tile, capacity)
        expected = [m, tiles * (capacity + 1)]
        require(
            words.dtype in (torch.uint32, torch.int32) and list(words.shape) == expected,
            f"expected 32-bit words {expected}, found {words.dtype} {list(words.shape)}",
        )
        split = words.contiguous().view(torch.int32).view(m, tiles, capacity + 1)
        counts = split[..., 0].clone()
        full = (counts < 0) | (counts > capacity)
        require(
            dense is not None or not full.any(),
            f"expected counts of at most {capacity}, found more in {int(full.sum())} tiles: "
            "their entries are lost",
        )
        counts[full] = 0
        used = _slots_in_use(counts, capacity)
        entries = split[..., 1:].where(used, 0)
        halves = entries.view(torch.int16).view(m, tiles, capacity, 2)
        columns = halves[..., 0].contiguous()
        wide = _unsigned(columns)
        owner = torch.arange(tiles, device=words.device)[:, None]
        astray = used & ((wide // tile != owner) | (wide >= n))
        require(
            not astray.any(),
            f"expected columns inside their tiles of {tile} and below {n}, "
            f"found {int(astray.sum())} outside",
        )
        kind = torch.bfloat16 if dense is None else dense.dtype
        values = halves[..., 1].contiguous().view(kind)
        none = torch.zeros(m + 1, dtype=torch.int32, device=words.device)
        listed = cls(
            shape, tile, counts, columns, values, none, columns.new_empty(0), values.new_empty(0)
        )
        if dense is None or not full.any():
            return listed
        whole = full.repeat_interleave(tile, 1)[:, :n]
        both = torch.where(whole, dense, listed.to_dense())
        return cls.from_dense(both, tile=tile, capacity=capacity)

    @property
    def capacity(self) -> int:
        return self.values.shape[2]

    def words(self) -> Tensor:
        """Return the published layout: uint32 [m, tiles * (capacity + 1)], unused words zero.

        Raises FormatError if values are not bf16, entries are spilled, or capacity + 1 does not
        divide the tile.
        """
        dtype, spilled = self.values.dtype, len(self.spill_values)
        _require_packable(self.tile, self.capacity)
        require(dtype == torch.bfloat16, f"expected bfloat16 values in words, found {dtype}")
        require(
            spilled == 0,
            f"expected at most {self.capacity} entries in each tile, found {spilled} beyond",
        )
        # GPUs and their hosts are little-endian: the low half of a word comes first in memory.
        halves = torch.stack((self.columns, self.values.view(torch.int16)), dim=-1)
        entries = halves.view(torch.int32).squeeze(-1)
        packed = torch.cat((self.counts[..., None], entries), dim=-1)
        return packed.flatten(1).view(torch.uint32)

    def to_dense(self) -> Tensor:
        """Return the matrix: the entries of the tiles and of the spill."""
        dense = self.values.new_zeros(self.shape)
        used = _slots_in_use(self.counts, self.capacity)
        dense[used.nonzero()[:, 0], _unsigned(self.columns[used])] = self.values[used]
        dense[rows_of(self.spill_offsets), _unsigned(self.spill_columns)] = self.spill_values
        return dense

    def arrays(self) -> dict[str, Tensor]:
        return {
            "counts": self.counts,
            "columns": self.columns,
            "values": self.values,
            "spill_offsets": self.spill_offsets,
            "spill_columns": self.spill_columns,
            "spill_values": self.spill_values,
        }


def _tiles(n: int, tile: int, capacity: int) -> int:
    """Return the number of tiles for n features. Raises FormatError."""
    require_whole("tile", tile)
    require_whole("capacity", capacity)
    require(
        0 < capacity <= tile,
        f"expected a capacity of 1 to {tile}, the columns of a tile, found {capacity}",
    )
    require(
        n <= MOST_COLUMNS, f"expected at most {MOST_COLUMNS} columns for 16-bit indices, found {n}"
    )
    return -(-n // tile)


def _require_packable(tile: int, capacity: int) -> None:
    """Raise FormatError unless capacity + 1, the words of a tile, divides the tile."""
    require(
        tile % (capacity + 1) == 0,
        f"expected a capacity that is one less than a divisor of the tile of {tile} for packed "
        f"words, found {capacity}",
    )


def _slots_in_use(counts: Tensor, capacity: int) -> Tensor:
    """Return which slots hold an entry, bool [m, tiles, capacity]."""
    return torch.arange(capacity, device=counts.device) < counts[..., None]


def _unsigned(columns: Tensor) -> Tensor:
    """Return 16-bit columns as int64, read as unsigned, because torch cannot index by uint16."""
    return columns.long() & 0xFFFF


FORMAT = Twell
