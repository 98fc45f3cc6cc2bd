"""Bitmap: zeros anywhere. A bit for each element, and the non-zeros in the tensor core's order.

W is cut into tiles of 16 rows x 256 columns. A lane of a warp owns 128 elements of a tile: those
that mma.sync expects in its registers. In each strip of 32 columns, lane 4 g + q owns columns 8 q
to 8 q + 7 of rows g and g + 8. Its elements are in this order, and so are its bits, lowest first:

    strip 0                                          strip 1 ...
    columns 8 q + 0..3         columns 8 q + 4..7
    row g | row g + 8          row g | row g + 8     8 groups of 4 make a 32-bit word of 2 strips

The non-zeros of a lane are its stream: packed in this order, and padded to whole 32-bit words. The
tile's record holds the 32 streams so that each lane reads a different bank of shared memory:

    bits    uint32 [4, 32 lanes]    a bit for each element
    starts  uint16 [33]             word of `tails` where each lane's tail starts; the last: its end
    full    uint16                  words stored side by side: the length of the 8th shortest stream
    (zeros  12 bytes)
    tails   uint32 [starts[32]]     words of the streams beyond `full`, lane by lane
    (zeros  up to a multiple of 16 bytes)
    words   uint32 [full, 32]       word j of every lane; zero where a stream is shorter

records  uint8 [bytes]              the tiles' records, row by row of tiles
offsets  int32 [tiles + 1]          start of each record, in units of 16 bytes

The starts are prefix counts, so a lane counts only its own bits. At 50 % zeros and 16 bits, a
record has 0.578 of the dense bytes: values 0.5, bits 0.0625, the rest 0.0155.

Multiplied by kernels/bitmap.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import BITS, Format, has_value, require, require_matrix

ROWS, COLUMNS = 16, 256
LANES, PER_LANE = 32, 128  # elements of a lane in a tile
SHORT = 8  # streams that may be padded: costs 1 % of the bytes, and tails are a third shorter
UNIT = 16  # bytes: bulk copies start at multiples
BITS_BYTES, HEAD_BYTES = 4 * PER_LANE, 4 * PER_LANE + 80
AT_ONCE = 2**24  # elements that are converted at a time: about 1 GB of temporaries
MOST_UNITS = 2**31 - 1


@dataclass(frozen=True, repr=False)
class Bitmap(Format):
    """Records of tiles of 16 x 256, and their offsets."""

    shape: tuple[int, int]
    dtype: torch.dtype
    offsets: Tensor
    records: Tensor

    @classmethod
    def from_dense(cls, dense: Tensor, /) -> Self:
        """Convert a matrix [n, k] of a dtype of 8 to 32 bits; NaN is stored. Raises FormatError."""
        require_matrix(dense)
        size = dense.element_size()
        require(size <= 4, f"expected a dtype of 8, 16 or 32 bits, found {dense.dtype}")
        bits = dense.view(BITS[size])
        parts = [_pack(_cut(rows)) for rows in bits.split(_rows_at_once(dense.shape[1]))]
        units = torch.cat([torch.zeros(1, device=dense.device).long(), *(u for u, _ in parts)])
        offsets = units.cumsum(0)
        last = int(offsets[-1])
        require(last <= MOST_UNITS, f"expected at most {MOST_UNITS} x {UNIT} bytes, found {last} x")
        records = torch.cat([records for _, records in parts])
        return cls((*dense.shape,), dense.dtype, offsets.to(torch.int32), records)

    def to_dense(self) -> Tensor:
        n, k = self.shape
        dense = torch.empty(n, k, dtype=BITS[self.dtype.itemsize], device=self.records.device)
        tile = 0
        for rows in dense.split(_rows_at_once(k)):
            count = -(-len(rows) // ROWS) * -(-k // COLUMNS)
            starts = self.offsets[tile : tile + count].long() * UNIT
            rows.copy_(_join(_unpack(self.records, starts, dense.dtype), *rows.shape))
            tile += count
        return dense.view(self.dtype)

    def arrays(self) -> dict[str, Tensor]:
        return {"offsets": self.offsets, "records": self.records}

    @property
    def room(self) -> int:
        """Return the bytes of the largest record with every tail put below `words`.

        A kernel joins the tails there. Waits for the device.
        """
        first = self.offsets[:-1, None].long() * UNIT + BITS_BYTES
        heads = self.records[first + torch.arange(2 * LANES + 4, device=first.device)]
        starts, full = heads.view(torch.int16).int().split((LANES + 1, 1), -1)
        tails = -(-starts[:, -1:] * 4 // UNIT) * UNIT
        words = full + starts.diff().amax(-1, keepdim=True)
        return int((HEAD_BYTES + tails + words * LANES * 4).amax()) if len(first) else 0


def _rows_at_once(k: int) -> int:
    """Return the number of rows, in whole tiles, with AT_ONCE elements."""
    return max(AT_ONCE // max(-(-k // COLUMNS) * COLUMNS * ROWS, 1), 1) * ROWS


# ---- a matrix and the elements of each lane ----


def _cut(matrix: Tensor) -> Tensor:
    """Cut [n, k] into [tiles, 32 lanes, 128], with zeros beyond its edges."""
    n, k = matrix.shape
    whole = pad(matrix, (0, -k % COLUMNS, 0, -n % ROWS))
    r_h_g_c_i_q_s_j = whole.view(-(-n // ROWS), 2, 8, -(-k // COLUMNS), 8, 4, 2, 4)
    return r_h_g_c_i_q_s_j.permute(0, 3, 2, 5, 4, 6, 1, 7).reshape(-1, LANES, PER_LANE)


def _join(by_lane: Tensor, n: int, k: int) -> Tensor:
    """Undo _cut."""
    r_c_g_q_i_s_h_j = by_lane.view(-(-n // ROWS), -(-k // COLUMNS), 8, 4, 8, 2, 2, 4)
    whole = r_c_g_q_i_s_h_j.permute(0, 6, 2, 1, 4, 3, 5, 7)
    return whole.reshape(-(-n // ROWS) * ROWS, -(-k // COLUMNS) * COLUMNS)[:n, :k]


# ---- elements of each lane and a record ----


@dataclass(frozen=True)
class _Layout:
    """The positions of the parts of records, computed from the positions of non-zeros.

    head   int16 [tiles, 40]             starts, full and zeros
    units  int64 [tiles]                 size in UNITs
    place  int64 [tiles, 32 lanes, 128]  position of each non-zero in the record, in elements;
                                         undefined for zeros
    """

    head: Tensor
    units: Tensor
    place: Tensor


def _layout(stored: Tensor, size: int) -> _Layout:
    per = 4 // size
    rank = stored.cumsum(-1, dtype=torch.int32) - 1
    words = -(-(rank[..., -1] + 1) // per)
    full = words.kthvalue(SHORT, -1, keepdim=True).values
    starts = pad((words - full).clamp(min=0).cumsum(-1, dtype=torch.int32), (1, 0))
    tails = -(-starts[:, -1:] // (UNIT // 4)) * (UNIT // 4)
    word, full_words = rank // per, full[..., None]
    lane = torch.arange(LANES, device=stored.device)[:, None]
    in_tail = starts[:, :-1, None] + word - full_words
    in_words = tails[..., None] + word * LANES + lane
    place = (HEAD_BYTES // 4 + in_words.where(word < full_words, in_tail)) * per + rank % per
    units = (HEAD_BYTES // 4 + tails + full * LANES)[:, 0] // (UNIT // 4)
    return _Layout(pad(torch.cat((starts, full), -1), (0, 6)).short(), units.long(), place.long())


def _pack(by_lane: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sizes of the records, int64 [tiles] in UNITs, and the records, uint8."""
    tiles, size = len(by_lane), by_lane.element_size()
    if not tiles:
        return by_lane.new_zeros(0, dtype=torch.int64), by_lane.new_zeros(0, dtype=torch.uint8)
    stored = has_value(by_lane)
    layout = _layout(stored, size)
    ends = layout.units.cumsum(0)
    starts = (ends - layout.units) * UNIT
    records = torch.zeros(int(ends[-1]) * UNIT, dtype=torch.uint8, device=by_lane.device)
    place = layout.place + (starts // size)[:, None, None]
    records.view(by_lane.dtype)[place[stored]] = by_lane[stored]
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=by_lane.device)
    bits = (stored.view(tiles, LANES, 4, 4, 8) * weights).sum(-1, dtype=torch.uint8)
    head = torch.cat((bits.transpose(1, 2).flatten(1), layout.head.view(torch.uint8)), -1)
    records[starts[:, None] + torch.arange(HEAD_BYTES, device=by_lane.device)] = head
    return layout.units, records


def _bits_of(records: Tensor, starts: Tensor) -> Tensor:
    """Return bool [tiles, 32 lanes, 128]: the elements stored by the records at these bytes."""
    stored = records[starts[:, None] + torch.arange(BITS_BYTES, device=records.device)]
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=records.device)
    bits = (stored[..., None] & weights) != 0
    return bits.view(-1, 4, LANES, PER_LANE // 4).transpose(1, 2).flatten(2)


def _unpack(records: Tensor, starts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the elements of each lane, [tiles, 32, 128], of the records at these bytes."""
    stored = _bits_of(records, starts)
    place = _layout(stored, dtype.itemsize).place + (starts // dtype.itemsize)[:, None, None]
    by_lane = torch.zeros(stored.shape, dtype=dtype, device=records.device)
    by_lane[stored] = records.view(dtype)[place[stored]]
    return by_lane


FORMAT = Bitmap
