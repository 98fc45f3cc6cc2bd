"""Lists of blocks that are selected on the device, from scores, without waiting for it.

    keep 3, causal            scores of row 3            row 3 of the mask
    offsets  0 1 3 6 9        .3  .9  nan  .1 | future   0 1 3
    row r has min(keep, r + 1) places                    ascending; bit 31 is set if partial

How many places a row has follows from the sizes alone. So memory and plans have a fixed capacity,
and a captured graph may select other blocks in each replay. A place that no block takes is empty:
its column is one beyond the last block, with bit 31. Empty places come last, and kernels stop at
the first one, so their time follows the blocks that are there.

    always    the first and the last blocks that a row sees, whatever their scores
    then      the blocks with the highest scores; of equal ones, the lower column
    never     a block whose score is NaN or -inf, unless it is one of the first or the last

What is selected is defined here, in torch. kernels/attention/_selecting.py computes the same on a
GPU in one launch, and takes its place in SELECTORS.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._blocks import blocks_of

PARTIAL = torch.iinfo(torch.int32).min
"""Bit 31 of a column."""


class Selection(NamedTuple):
    """Sizes of a mask whose blocks are selected: all that its plans depend on.

    rows         of blocks, of all sequences and lists
    first, last  blocks that a row sees first and last, and always keeps
    """

    rows: int
    tokens: tuple[int, int]
    block: tuple[int, int]
    causal: bool
    keep: int
    first: int = 0
    last: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        """Return the rows of a list, and the blocks of keys: also the column of an empty place."""
        return blocks_of(self.tokens, self.block)

    def visible(self) -> list[int]:
        """Return how many blocks each row of a list sees."""
        (s_q, s_kv), (b_q, b_k), (height, width) = self.tokens, self.block, self.grid
        if not self.causal:
            return [width] * height
        last = (min(row * b_q, s_q) - 1 + s_kv - s_q for row in range(1, height + 1))
        return [min(max(key // b_k + 1, 0), width) for key in last]

    def offsets(self) -> Tensor:
        """Return where the places of each row start, int64 [rows + 1], on the CPU."""
        places = torch.tensor(self.visible()).clamp(max=self.keep)
        return pad(places.repeat(self.rows // self.grid[0]).cumsum(0), (1, 0))

    @property
    def places(self) -> int:
        """Return the number of places of all rows."""
        of_list = sum(min(self.keep, visible) for visible in self.visible())
        return of_list * (self.rows // self.grid[0])

    @property
    def sizes(self) -> list[int]:
        """Return the sizes as the operator takes them."""
        places = self.keep, self.first, self.last
        return [self.rows, *self.tokens, *self.block, int(self.causal), *places]

    @classmethod
    def of(cls, sizes: list[int]) -> "Selection":
        """Return the inverse of `sizes`."""
        rows, s_q, s_kv, b_q, b_k, causal, *rest = sizes
        return cls(rows, (s_q, s_kv), (b_q, b_k), bool(causal), *rest)


def select_in_torch(scores: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Return offsets and columns (formats/block_mask.py) of scores [rows, kv_blocks]."""
    selection = Selection.of(sizes)
    (s_q, s_kv), (b_q, b_k) = selection.tokens, selection.block
    device, (height, empty) = scores.device, selection.grid
    row = torch.arange(selection.rows, device=device) % height
    visible = torch.tensor(selection.visible(), device=device)[row, None]
    block = torch.arange(empty, device=device)

    bits = (scores.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = bits ^ ((bits >> 31) & ~PARTIAL)  # of integers, as the scores are ordered
    order = order.masked_fill(scores.isnan() | (scores == -torch.inf), PARTIAL)
    order = order.masked_fill(
        (block < selection.first) | (block >= visible - selection.last), ~PARTIAL
    )
    order = order.masked_fill(block >= visible, PARTIAL)
    best, columns = order.sort(dim=1, descending=True, stable=True)
    columns = columns.masked_fill(best == PARTIAL, empty)[:, : selection.keep].sort(dim=1).values

    last_key = ((columns + 1) * b_k).clamp(max=s_kv) - 1
    partial = columns == empty
    if selection.causal:
        partial |= last_key > (row * b_q + s_kv - s_q)[:, None]
    offsets = selection.offsets().to(device)
    place = torch.arange(columns.shape[1], device=device)
    place = (offsets[:-1, None] + place).where(place < offsets.diff()[:, None], selection.places)
    stored = torch.where(partial, columns | PARTIAL, columns).to(torch.int32)
    out = stored.new_empty(selection.places + 1).scatter_(0, place.flatten(), stored.flatten())
    return offsets.to(torch.int32), out[:-1].clone()


Selector = Callable[[Tensor, list[int]], tuple[Tensor, Tensor]]
SELECTORS: dict[str, Selector] = {}
"""What selects instead of torch, by type of device."""


def select(scores: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Return offsets and columns as `select_in_torch` defines them."""
    is_watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    arrays: tuple[Tensor, Tensor] = (_operator if is_watched else _select)(scores, sizes)
    return arrays


def _select(scores: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    return SELECTORS.get(scores.device.type, select_in_torch)(scores, sizes)


_operator = torch.library.custom_op("sparsebench::select_blocks", _select, mutates_args=())


@_operator.register_fake
def _(scores: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    selection = Selection.of(sizes)
    lengths = selection.rows + 1, selection.places
    offsets, columns = (scores.new_empty(length, dtype=torch.int32) for length in lengths)
    return offsets, columns
