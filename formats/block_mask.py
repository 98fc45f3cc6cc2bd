"""Block mask of attention: which blocks of keys each block of queries attends to.

             kv block
             0  1  2  3
    q    0 | /  .  .  . |      offsets  0 1 3 5 8      row r: columns[offsets[r] : offsets[r + 1]]
    block1 | #  /  .  . |      columns  0  0 1  0 2  0 2 3
         2 | #  .  /  . |               /  # /  # /  # # /     # full   / partial   . absent
         3 | #  .  #  / |

offsets  int32 [batch * lists * q_blocks + 1]  start of each row of blocks in `columns`
columns  int32 [blocks]   kv block, ascending in a row; bit 31 is set if the block is partial
bits     uint8 [partial blocks, b_q, ceil(b_k / 8)]   optional; the lowest bit is the first key
slots    int32 [blocks]   with `bits`: index of a partial block in `bits`, -1 for full blocks. If
                          the mask is selected on the device, it is the column: bits are the same
                          in all rows, uint8 [kv_blocks, b_q, ceil(b_k / 8)]

A block covers b_q queries and b_k keys, or fewer at the edge, where kernels check the bounds; being
at the edge alone does not make a block partial. All elements of a full block are allowed. An
element of a partial block is allowed if every rule of the mask holds:

    causal   k <= q + S_kv - S_q
    bits     the element's bit is set

Blocks without an allowed element are absent. A row without blocks gives an output of 0, a
log-sum-exp of -inf and gradients of 0.

The rows belong to `batch` sequences, each with `lists` lists of q_blocks rows, one below the other.
Head h of H reads list h * lists // H of its sequence, so 1 list serves all heads, and one list per
KV head serves the heads of its group.

A dense matrix of this format has a cell for each block, 1 where the block is present and 0 where it
is absent. The elements themselves are never stored: for 32 heads and 32k tokens they are 34 GB.

Multiplied by kernels/attention.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from sparsebench.formats._blocks import (
    areas,
    blocks_of,
    in_blocks,
    pack_bits,
    token_counts,
    unpack_bits,
)
from sparsebench.formats._format import (
    Format,
    offsets_of,
    require,
    require_matrix,
    require_whole,
    rows_of,
    sides_of,
)
from sparsebench.formats._selection import PARTIAL, Selection, marks_of, select, without_keys

MOST_ELEMENTS = 2**28
"""Most elements that a mask may be expanded to. Tests expand masks, kernels never do."""


class Transposed(NamedTuple):
    """The same blocks by kv block, for gradients of keys and values.

    offsets  int32 [batch * lists * kv_blocks + 1]
    rows     int32 [blocks]   q block, ascending; bit 31 is set if the block is partial
    slots    int32 [blocks]   index in the mask's `bits`, or None
    places   int32 [blocks]   index in the mask's `columns`
    """

    offsets: Tensor
    rows: Tensor
    slots: Tensor | None
    places: Tensor


@dataclass(frozen=True, repr=False)
class BlockMask(Format):
    """A block mask for `tokens` = (S_q, S_kv) in blocks of `block`; `shape` counts its cells.

    keep  of a mask whose blocks are selected on the device: the places of a row, or those that the
          causal rule leaves (_selection.py). 0 for other masks
    """

    operand = "masks"

    shape: tuple[int, int]
    tokens: tuple[int, int]
    block: tuple[int, int]
    batch: int
    lists: int
    causal: bool
    offsets: Tensor
    columns: Tensor
    bits: Tensor | None = None
    slots: Tensor | None = None
    keep: int = 0
    dtype: torch.dtype = torch.float32

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        /,
        *,
        block: int | list[int] = 128,
        tokens: list[int] | None = None,
        batch: int = 1,
        causal: bool = False,
    ) -> Self:
        """Convert cells [batch * lists * q_blocks, kv_blocks] of ones and zeros.

        `tokens` is [S_q, S_kv]; without it, every block is whole and there is one list per
        sequence. Raises FormatError if the cells do not fit, or hold other values.
        """
        require_matrix(dense)
        sides = sides_of(block)
        require_whole("batch", batch)
        rows = dense.shape[0]
        if tokens is None:
            require(rows % batch == 0, f"expected rows for {batch} sequences, found {rows}")
            tokens = [rows // batch * sides[0], dense.shape[1] * sides[1]]
        sizes = token_counts(tokens)
        q_blocks, kv_blocks = blocks_of(sizes, sides)
        lists, rest = divmod(rows, batch * q_blocks)
        fits = rest == 0 and lists > 0 and dense.shape[1] == kv_blocks
        expected = f"rows as a multiple of {batch * q_blocks} and {kv_blocks} columns of blocks"
        require(fits, f"expected {expected} for {list(sizes)} tokens, found {list(dense.shape)}")
        single = dense.float() if dense.element_size() == 1 else dense
        ones = bool(((single == 0) | (single == 1)).all())
        require(ones, "expected cells of 0 and 1, found other values")
        at, columns = (single != 0).nonzero(as_tuple=True)
        mask = cls.build(sizes, sides, at, columns, batch=batch, lists=lists, causal=causal)
        return replace(mask, dtype=dense.dtype)

    @classmethod
    def from_elements(cls, allowed: Tensor, block: int | list[int]) -> Self:
        """Convert allowed elements, bool [batch, lists, S_q, S_kv]; small masks only."""
        require(
            allowed.dtype == torch.bool and allowed.dim() == 4 and 0 not in allowed.shape,
            "expected bool elements [batch, lists, S_q, S_kv], "
            f"found {allowed.dtype} {list(allowed.shape)}",
        )
        batch, lists, s_q, s_kv = allowed.shape
        b_q, b_k = sides = sides_of(block)
        tiles = in_blocks(allowed, sides)
        inside = in_blocks(torch.ones_like(allowed[:1, :1]), sides)
        present = tiles.any(-1).any(-1)
        full = (tiles | ~inside).all(-1).all(-1)
        at, columns = present.flatten(0, 2).nonzero(as_tuple=True)
        partial = ~full.flatten(0, 2)[at, columns]
        bits = None
        if bool(partial.any()):
            bits = pack_bits(tiles.reshape(-1, tiles.shape[3], b_q, b_k)[at, columns][partial])
        geometry = (s_q, s_kv), sides
        return cls.build(
            *geometry, at, columns, partial, batch=batch, lists=lists, causal=False, bits=bits
        )

    @classmethod
    def from_scores(
        cls,
        scores: Tensor,
        keep: int | None = None,
        *,
        mass: float | None = None,
        block: int | list[int] = 128,
        tokens: list[int] | None = None,
        causal: bool = False,
        first: int = 0,
        last: int = 0,
        keys: Tensor | None = None,
    ) -> Self:
        """Select the blocks of each row that have the highest scores, on their device.

        scores       [batch, lists, q_blocks, kv_blocks], floating point. NaN and -inf are selected
                     only by `first` and `last`. If scores are equal, the lower column is selected
        keep         most blocks of a row, `first` and `last` included; all, if there is a mass
        mass         above 0, at most 1: a row keeps the fewest blocks whose weights, a softmax of
                     the scores that it sees, add up to this; or `keep` blocks that add up to less
        tokens       [S_q, S_kv]; without it, every block is whole
        first, last  blocks that each row keeps whatever their scores: those that it sees first
                     (attention sinks) and last (the window before its queries); at most `keep`
                     together, unless that is all
        keys         bool [S_kv]: False for keys that no query sees, such as padding. Some key of
                     each block is there

        Does not wait for a GPU, and can be captured into a CUDA graph, where each replay selects
        anew. Raises FormatError, and on a GPU Unsupported for more than 8192 blocks of keys.
        """
        bounds = keep, mass, first, last
        selection = Selection.of_scores(scores, block, tokens, causal, bounds)
        offsets, columns = select(scores.flatten(0, 2), selection.sizes, selection.mass)
        shape, bits, slots = (selection.rows, selection.grid[1]), None, None
        geometry = selection.tokens, selection.block, scores.shape[0], scores.shape[1], causal
        if keys is not None:
            columns, bits, slots = without_keys(columns, keys, selection)
        return cls(shape, *geometry, offsets, columns, bits, slots, keep=selection.keep)

    @classmethod
    def from_indices(
        cls,
        indices: Tensor,
        *,
        tokens: list[int],
        block: int | list[int] = 128,
        causal: bool = False,
    ) -> Self:
        """Take the blocks of each row from lists of the same length, in any order.

        indices  whole numbers [batch, lists, q_blocks, keep]. One that repeats another is taken
                 once; -1, one that is no block, and one that the causal rule hides are left out

        Does not wait for the device, as `from_scores`. Raises FormatError.
        """
        marks = marks_of(indices, tokens, block)
        keep = min(indices.shape[3], marks.shape[3])
        options: dict[str, Any] = {"block": block, "tokens": tokens, "causal": causal}
        return cls.from_scores(marks, keep, **options)

    @classmethod
    def build(
        cls,
        tokens: tuple[int, int],
        block: tuple[int, int],
        rows: Tensor,
        columns: Tensor,
        partial: Tensor | None = None,
        *,
        batch: int = 1,
        lists: int = 1,
        causal: bool = False,
        bits: Tensor | None = None,
    ) -> Self:
        """Return the mask of blocks in any order; `partial` and `bits` follow that order.

        rows     row of each block, below batch * lists * q_blocks; columns: its kv block
        partial  bool for each block; without it, the causal rule determines it
        bits     uint8 [partial blocks, b_q, ceil(b_k / 8)]

        Drops blocks that lie wholly in the future of a causal mask.
        """
        q_blocks, kv_blocks = blocks_of(tokens, block)
        height = batch * lists * q_blocks
        rows, columns = rows.long(), columns.long()
        for name, index, most in (("row", rows, height), ("column", columns, kv_blocks)):
            inside = len(index) == 0 or bool((index.min() >= 0) & (index.max() < most))
            require(inside, f"expected a {name} index below {most} for every block, found others")
        area = areas(tokens, block, causal, rows.device)[rows % q_blocks, columns]
        whole = areas(tokens, block, False, rows.device)[rows % q_blocks, columns]
        partial = (area < whole) if partial is None else partial
        slots = torch.where(partial, partial.cumsum(0) - 1, -1)
        order = (rows * kv_blocks + columns).argsort(stable=True)
        order = order[area[order] > 0]
        rows, columns, partial = rows[order], columns[order], partial[order]
        twice = (rows[1:] == rows[:-1]) & (columns[1:] == columns[:-1])
        require(not bool(twice.any()), "expected each block once in a row, found a block twice")
        by_bits = None
        if bits is not None:
            shape = (int((slots >= 0).sum()), block[0], -(-block[1] // 8))
            require(
                bits.dtype == torch.uint8 and bits.shape == shape,
                f"expected bits of uint8 {list(shape)}, found {bits.dtype} {list(bits.shape)}",
            )
            bits = bits[slots[order][partial]].contiguous()
            by_bits = torch.where(partial, partial.cumsum(0) - 1, -1).to(torch.int32)
        stored = columns.to(torch.int32)
        return cls(
            (height, kv_blocks),
            tokens,
            block,
            batch,
            lists,
            causal,
            offsets_of(rows, height),
            torch.where(partial, stored | PARTIAL, stored),
            bits,
            by_bits,
        )

    @property
    def q_blocks(self) -> int:
        return blocks_of(self.tokens, self.block)[0]

    @property
    def kv_blocks(self) -> int:
        return blocks_of(self.tokens, self.block)[1]

    @cached_property
    def counts(self) -> Tensor:
        """Return the number of blocks of each row, int32; with `keep`, of its places."""
        return self.offsets.diff()

    @property
    def present(self) -> Tensor:
        """Return a bool for each place: False if it is empty, which `keep` allows."""
        return self.indices < self.kv_blocks

    @property
    def partial(self) -> Tensor:
        """Return a bool for each block: True if only a part of its elements is allowed."""
        return self.columns < 0

    @property
    def indices(self) -> Tensor:
        """Return the columns without the flag, int32."""
        return self.columns & ~PARTIAL

    def compact(self) -> "BlockMask":
        """Return the mask without empty places; waits for the device if `keep` is not 0."""
        if not self.keep:
            return self
        present = self.present
        rows, columns = rows_of(self.offsets)[present], self.indices[present]
        layout: dict[str, Any] = {"batch": self.batch, "lists": self.lists, "causal": self.causal}
        partial = self.partial[present]
        if self.bits is not None and self.slots is not None:
            layout["bits"] = self.bits[self.slots[present][partial]]
        return self.build(self.tokens, self.block, rows, columns, partial, **layout)

    def list_of(self, head: int, heads: int) -> int:
        """Return the list that head `head` of `heads` reads. Raises FormatError."""
        require(
            heads % self.lists == 0,
            f"expected heads as a multiple of the mask's {self.lists} lists, found {heads}",
        )
        return head * self.lists // heads

    @cached_property
    def transposed(self) -> Transposed:
        """Return the blocks by kv block, q blocks ascending."""
        rows = rows_of(self.offsets)
        lists, q = rows // self.q_blocks, rows % self.q_blocks
        by_column = lists * self.kv_blocks + self.indices
        order = (by_column * self.q_blocks + q).argsort(stable=True)
        order = order[self.present[order]] if self.keep else order
        q = q.to(torch.int32)
        stored = torch.where(self.partial, q | PARTIAL, q)[order]
        offsets = offsets_of(by_column[order], self.batch * self.lists * self.kv_blocks)
        slots = None if self.slots is None else self.slots[order]
        return Transposed(offsets, stored, slots, order.to(torch.int32))

    def expand(self, heads: int | None = None) -> Tensor:
        """Return the allowed elements, bool [batch, heads, S_q, S_kv]. Raises FormatError if many.

        `heads` defaults to the number of lists.
        """
        heads = heads or self.lists
        (s_q, s_kv), (b_q, b_k) = self.tokens, self.block
        self.list_of(0, heads)
        size = self.batch * heads * s_q * s_kv
        require(size <= MOST_ELEMENTS, f"expected at most {MOST_ELEMENTS} elements, found {size}")
        cells = self.columns.new_zeros(*self.shape, b_q, b_k, dtype=torch.bool)
        present = self.present
        rows, columns = rows_of(self.offsets)[present], self.indices[present]
        cells[rows, columns.long()] = self.elements()[present]
        cells = cells.view(self.batch, self.lists, self.q_blocks, self.kv_blocks, b_q, b_k)
        whole = cells.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :s_q, :s_kv]
        return whole.repeat_interleave(heads // self.lists, 1)

    def elements(self) -> Tensor:
        """Return the allowed elements of every block, bool [blocks, b_q, b_k]."""
        rows = rows_of(self.offsets) % self.q_blocks
        (s_q, s_kv), (b_q, b_k) = self.tokens, self.block
        device = rows.device
        q = (rows[:, None] * b_q + torch.arange(b_q, device=device))[:, :, None]
        k = (self.indices.long()[:, None] * b_k + torch.arange(b_k, device=device))[:, None]
        allowed = (q < s_q) & (k < s_kv)
        if self.causal:
            allowed &= (k <= q + s_kv - s_q) | ~self.partial[:, None, None]
        if self.bits is not None and self.slots is not None:
            some = self.partial & self.present
            allowed[some] &= unpack_bits(self.bits[self.slots[some]], b_k)
        return allowed

    def to_dense(self) -> Tensor:
        cells, present = torch.zeros(self.shape, device=self.columns.device), self.present
        cells[rows_of(self.offsets)[present], self.indices[present].long()] = 1
        return cells.to(self.dtype)

    def arrays(self) -> dict[str, Tensor]:
        """Return the two arrays of the layout, or four if there are bits."""
        arrays = {"offsets": self.offsets, "columns": self.columns}
        if self.bits is not None and self.slots is not None:
            arrays |= {"bits": self.bits, "slots": self.slots}
        return arrays


FORMAT = BlockMask
