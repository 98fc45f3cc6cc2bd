"""Divide the non-zeros among the CTAs of csr_cuda_wgrad.cu: ranges of items, by chunk, then row.

item     up to 8 non-zeros of a row of W in a chunk of its columns
range    items of neighbouring rows in a chunk; all ranges have about equally many
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebench.formats._format import rows_of
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.declarations import listed, record

ITEM = 8  # non-zeros
WAYS = 4  # items that a warp reads at a time, also past the last one
KERNEL = "csr_cuda_wgrad"
ALIGNMENT = 4  # a panel begins with a row that is a multiple


@dataclass(frozen=True)
class Items:
    """The lists of csr_cuda_wgrad.cu, on the device of the pattern.

    ranges  Range [ranges], as int32
    places  int64 [items + WAYS, ITEM]: columns in the panel
    most_rows  of the largest panel of dY, which is loaded four rows at a time
    heads   Head [items + WAYS], as int32
    """

    ranges: Tensor
    places: Tensor
    heads: Tensor
    most_rows: int


def items_of(w: Csr, chunk: int, count: int, most_rows: int) -> Items:
    """Divide the non-zeros into at least `count` ranges of at most `most_rows` rows."""
    (n, k), device = w.shape, w.columns.device
    chunks, columns = -(-k // chunk), w.columns.long()
    row, of_chunk = rows_of(w.offsets), columns // chunk
    segment = of_chunk * n + row  # in the order of items
    counts = torch.bincount(segment, minlength=n * chunks)
    items = (counts + ITEM - 1) // ITEM
    first = items.cumsum(0) - items

    # The non-zeros of a segment follow each other in W, which is ordered by rows.
    by_row = counts.view(chunks, n).t().reshape(-1)
    begins = (by_row.cumsum(0) - by_row).view(n, chunks).t().reshape(-1)
    rank = torch.arange(len(columns), device=device) - begins[segment]

    owner = torch.arange(n * chunks, device=device).repeat_interleave(items)
    number = (torch.arange(len(owner), device=device) - first[owner]) * ITEM
    bounds = _bounds(owner // n, owner % n, count, most_rows)
    low = owner[bounds[:-1]] % n // ALIGNMENT * ALIGNMENT
    high = owner[bounds[1:] - 1] % n + 1
    column = owner[bounds[:-1]] // n * chunk
    counted = {"item": bounds[:-1], "items": bounds.diff(), "rows": high - low}
    ranges = listed(record(KERNEL, "Range"), row=low, column=column, **counted)
    row, stored = owner % n - low.repeat_interleave(bounds.diff()), counts[owner] - number
    firsts = begins[owner] + number
    heads = listed(record(KERNEL, "Head"), first=firsts, row=row, count=stored.clamp(max=ITEM))
    heads = torch.nn.functional.pad(heads, (0, 0, 0, WAYS))
    places = columns.new_zeros(len(heads) * ITEM)
    places[(first[segment] + rank // ITEM) * ITEM + rank % ITEM] = columns % chunk
    most_rows = -(-int((high - low).max()) // ALIGNMENT) * ALIGNMENT
    return Items(ranges, places.view(-1, ITEM), heads, most_rows)


def _bounds(chunk: Tensor, row: Tensor, count: int, most_rows: int) -> Tensor:
    """Return int64 [ranges + 1]: the first item of each range; no range spans two chunks."""
    number = torch.arange(len(chunk), device=chunk.device)
    while True:
        size = -(-len(chunk) // count)
        new = (number % size == 0) | (chunk.diff(prepend=chunk[:1] - 1) != 0)
        bounds = torch.cat([number[new], number.new_full((1,), len(chunk))])
        low = row[bounds[:-1]] // ALIGNMENT * ALIGNMENT
        if int((row[bounds[1:] - 1] + 1 - low).max()) <= most_rows or size == 1:
            return bounds
        count = count + count // 4 + 1
