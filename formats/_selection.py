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
              until the row has no place left, or its blocks have the wanted mass
    never     a block whose score is NaN or -inf, unless it is one of the first or the last

The mass of a block is its weight in a softmax of the scores that the row sees.

What is selected is defined here, in torch. kernels/attention/_selecting.py computes the same on a
GPU in one launch, and takes its place in SELECTORS.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.errors import FormatError
from sparsebench.formats._blocks import blocks_of, pack_bits, token_counts
from sparsebench.formats._format import describe, require, sides_of

PARTIAL = torch.iinfo(torch.int32).min
"""Bit 31 of a column."""
MOST_LOGIT = 1e38
"""An infinite score weighs as this one: blocks that have it share the mass."""

Bounds = tuple[int | None, float | None, int, int]


class Selection(NamedTuple):
    """Sizes of a mask whose blocks are selected: all that its plans depend on.

    rows         of blocks, of all sequences and lists
    first, last  blocks that a row sees first and last, and always keeps
    mass         of the blocks that a row keeps; 1 if only `keep` bounds them
    """

    rows: int
    tokens: tuple[int, int]
    block: tuple[int, int]
    causal: bool
    keep: int
    first: int = 0
    last: int = 0
    mass: float = 1.0

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

    @classmethod
    def of_scores(
        cls, scores: Tensor, block: object, tokens: object, causal: bool, bounds: Bounds
    ) -> "Selection":
        """Return what `BlockMask.from_scores` selects. Raises FormatError.

        bounds  its keep, mass, first and last
        """
        sides, actual = sides_of(block), describe(scores)
        expected = "scores [batch, lists, q_blocks, kv_blocks] in floating point of 16 bits or more"
        fits = isinstance(scores, Tensor) and scores.dim() == 4 and 0 not in scores.shape
        fits = fits and scores.is_floating_point() and scores.element_size() > 1
        require(fits, f"expected {expected}, found {actual}")
        require(type(causal) is bool, f"causal: expected True or False, found {causal!r}")
        batch, lists, *grid = scores.shape
        whole = [count * side for count, side in zip(grid, sides, strict=True)]
        sizes = token_counts(whole if tokens is None else tokens)
        blocks, (most, mass, first, last) = blocks_of(sizes, sides), bounds
        require((*grid,) == blocks, f"expected {expected}: {list(blocks)}, found {actual}")
        keep = blocks[1] if most is None and mass is not None else most
        # torch.compile makes numbers that change symbolic, and writes none into a text
        if not (type(keep) is int and 1 <= keep <= blocks[1]):
            expected = f"a whole number from 1 to {blocks[1]} blocks"
            raise FormatError(f"keep: expected {expected}, found {keep}")
        part = 1.0 if mass is None else mass
        if not (type(part) in (int, float) and 0 < part <= 1):
            raise FormatError(f"mass: expected a number above 0, at most 1; found {mass!r}")
        few = all(type(n) is int and n >= 0 for n in (first, last))
        if not (few and min(first + last, blocks[1]) <= keep):  # with a place for all, all stay
            expected = f"whole numbers from 0 on, and first + last up to keep = {keep}"
            raise FormatError(f"first, last: expected {expected}; found {first} and {last}")
        return cls(batch * lists * blocks[0], sizes, sides, causal, keep, first, last, float(part))


def marks_of(indices: Tensor, tokens: object, block: object) -> Tensor:
    """Return scores of blocks, fp32: 0 for those that `indices` lists, -inf for others.

    indices  [batch, lists, q_blocks, keep], of which those that are no block are left out

    Raises FormatError.
    """
    rows, count = blocks_of(token_counts(tokens), sides_of(block))
    whole = isinstance(indices, Tensor) and indices.dtype in (torch.int32, torch.int64)
    fits = whole and indices.dim() == 4 and indices.shape[2] == rows and 0 not in indices.shape
    expected = f"int32 or int64 [batch, lists, {rows} q_blocks, keep], of at least 1 each"
    require(fits, f"indices: expected {expected}; found {describe(indices)}")
    inside = torch.where((indices >= 0) & (indices < count), indices, count).long()
    marks = indices.new_full((*indices.shape[:3], count + 1), -torch.inf, dtype=torch.float32)
    return marks.scatter_(3, inside, 0.0)[..., :count]


def select_in_torch(scores: Tensor, sizes: list[int], mass: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return offsets and columns (formats/block_mask.py) of scores [rows, kv_blocks]."""
    selection = Selection.of(sizes)
    (s_q, s_kv), (b_q, b_k) = selection.tokens, selection.block
    device, (height, empty) = scores.device, selection.grid
    row = torch.arange(selection.rows, device=device) % height
    visible = torch.tensor(selection.visible(), device=device)[row, None]
    block = torch.arange(empty, device=device)

    bits = (scores.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = bits ^ ((bits >> 31) & ~PARTIAL)  # of integers, as the scores are ordered
    seen = block < visible
    usable = seen & (scores > -torch.inf)  # False for NaN
    always = seen & ((block < selection.first) | (block >= visible - selection.last))
    order = order.masked_fill(~usable, PARTIAL).masked_fill(always, ~PARTIAL)
    best, columns = order.sort(dim=1, descending=True, stable=True)
    if mass < 1:
        logits = scores.double().clamp(-MOST_LOGIT, MOST_LOGIT).where(usable, -MOST_LOGIT)
        weights = (logits - logits.amax(1, keepdim=True)).exp() * usable
        before = weights.gather(1, columns).cumsum(1).roll(1, 1)
        goal = before[:, :1] * mass  # of the sum of all
        before[:, 0] = 0
        best = best.masked_fill((before >= goal) & (best != ~PARTIAL), PARTIAL)
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


def without_keys(
    columns: Tensor, keys: Tensor, selection: Selection
) -> tuple[Tensor, Tensor, Tensor]:
    """Return columns, bits and slots without the keys that are not there, bool [S_kv].

    A block that lacks some is partial in every row. Its bits are those of its keys, so the slot of
    a place is its column. Raises FormatError.
    """
    (b_q, b_k), count, s_kv = selection.block, selection.grid[1], selection.tokens[1]
    fits = isinstance(keys, Tensor) and keys.dtype == torch.bool and keys.shape == (s_kv,)
    require(fits, f"keys: expected bool [{s_kv}], found {describe(keys)}")
    devices = f"keys: expected them on {columns.device}, as the scores; found {keys.device}"
    require(keys.device == columns.device, devices)
    there = pad(keys, (0, -s_kv % b_k), value=True).view(count, 1, b_k)
    blocks = columns & ~PARTIAL
    lacks = pad(~there.flatten(1).all(1), (0, 1))[blocks.long()]  # False for an empty place
    bits = pack_bits(there.expand(count, b_q, b_k))
    return torch.where(lacks, columns | PARTIAL, columns), bits, blocks.clamp(max=count - 1)


Selector = Callable[[Tensor, list[int], float], tuple[Tensor, Tensor]]
SELECTORS: dict[str, Selector] = {}
"""What selects instead of torch, by type of device."""


def select(scores: Tensor, sizes: list[int], mass: float) -> tuple[Tensor, Tensor]:
    """Return offsets and columns as `select_in_torch` defines them."""
    has_mode = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    arrays: tuple[Tensor, Tensor] = (_operator if has_mode else _select)(scores, sizes, mass)
    return arrays


def _select(scores: Tensor, sizes: list[int], mass: float) -> tuple[Tensor, Tensor]:
    return SELECTORS.get(scores.device.type, select_in_torch)(scores, sizes, mass)


_operator = torch.library.custom_op("sparsebench::select_blocks", _select, mutates_args=())


@_operator.register_fake
def _(scores: Tensor, sizes: list[int], mass: float) -> tuple[Tensor, Tensor]:
    selection = Selection.of(sizes)
    lengths = selection.rows + 1, selection.places
    offsets, columns = (scores.new_empty(length, dtype=torch.int32) for length in lengths)
    return offsets, columns
