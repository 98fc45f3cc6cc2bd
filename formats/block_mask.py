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
slots    int32 [blocks]   with `bits`: index of a partial block in `bits`, -1 for full blocks

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
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import (
    Format,
    offsets_of,
    require,
    require_matrix,
    require_whole,
    rows_of,
    sides_of,
)

PARTIAL = torch.iinfo(torch.int32).min
"""Bit 31 of a column."""

MOST_ELEMENTS = 2**28
"""Most elements that a mask may be expanded to. Tests expand masks, kernels never do."""


class Transposed(NamedTuple):
    """The same blocks by kv block, for gradients of keys and values.

    offsets  int32 [batch * lists * kv_blocks + 1]
    rows     int32 [blocks]   q block, ascending; bit 31 is set if the block is partial
    slots    int32 [blocks]   index in the mask's `bits`, or None
    places   int64 [blocks]   index in the mask's `columns`
    """

    offsets: Tensor
    rows: Tensor
    slots: Tensor | None
    places: Tensor


@dataclass(frozen=True)
class BlockMask(Format):
    """A block mask for `tokens` = (S_q, S_kv) in blocks of `block`; `shape` counts its cells."""

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
        sizes = _sizes(tokens)
        q_blocks, kv_blocks = _blocks(sizes, sides)
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
        tiles = _in_blocks(allowed, sides)
        inside = _in_blocks(torch.ones_like(allowed[:1, :1]), sides)
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
        q_blocks, kv_blocks = _blocks(tokens, block)
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
        return _blocks(self.tokens, self.block)[0]

    @property
    def kv_blocks(self) -> int:
        return _blocks(self.tokens, self.block)[1]

    @cached_property
    def counts(self) -> Tensor:
        """Return the number of blocks of each row, int32."""
        return self.offsets.diff()

    @property
    def partial(self) -> Tensor:
        """Return a bool for each block: True if only a part of its elements is allowed."""
        return self.columns < 0

    @property
    def indices(self) -> Tensor:
        """Return the columns without the flag, int32."""
        return self.columns & ~PARTIAL

    def list_of(self, head: int, heads: int) -> int:
        """Return the list that head `head` of `heads` reads. Raises FormatError."""
        require(
            heads % self.lists == 0,
            f"expected heads as a multiple of the mask's {self.lists} lists, found {heads}",
        )
        return head * self.lists // heads

    def transpose(self) -> Transposed:
        """Return the blocks by kv block, q blocks ascending."""
        rows = rows_of(self.offsets)
        lists, q = rows // self.q_blocks, rows % self.q_blocks
        by_column = lists * self.kv_blocks + self.indices
        order = (by_column * self.q_blocks + q).argsort(stable=True)
        q = q.to(torch.int32)
        stored = torch.where(self.partial, q | PARTIAL, q)[order]
        offsets = offsets_of(by_column, self.batch * self.lists * self.kv_blocks)
        slots = None if self.slots is None else self.slots[order]
        return Transposed(offsets, stored, slots, order)

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
        cells[rows_of(self.offsets), self.indices.long()] = self.elements()
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
        if self.bits is not None:
            allowed[self.partial] &= unpack_bits(self.bits, b_k)
        return allowed

    def to_dense(self) -> Tensor:
        cells = torch.zeros(self.shape, device=self.columns.device)
        cells[rows_of(self.offsets), self.indices.long()] = 1
        return cells.to(self.dtype)

    def arrays(self) -> dict[str, Tensor]:
        """Return the two arrays of the layout, or four if there are bits."""
        arrays = {"offsets": self.offsets, "columns": self.columns}
        if self.bits is not None and self.slots is not None:
            arrays |= {"bits": self.bits, "slots": self.slots}
        return arrays


def areas(
    tokens: tuple[int, int], block: tuple[int, int], causal: bool, device: torch.device
) -> Tensor:
    """Return the allowed elements of each block of one list, int64 [q_blocks, kv_blocks]."""
    (s_q, s_kv), (b_q, b_k) = tokens, block
    q_blocks, kv_blocks = _blocks(tokens, block)
    starts = torch.arange(kv_blocks, device=device) * b_k
    width = (s_kv - starts).clamp(max=b_k)
    first = torch.arange(q_blocks, device=device)[:, None] * b_q
    if not causal:
        return (s_q - first).clamp(max=b_q) * width
    area = torch.zeros(q_blocks, kv_blocks, dtype=torch.int64, device=device)
    for row in range(b_q):
        q = first + row
        visible = (q + s_kv - s_q + 1 - starts).clamp(min=0).minimum(width)
        area += visible * (q < s_q)
    return area


def pack_bits(elements: Tensor) -> Tensor:
    """Return bool [blocks, b_q, b_k] as uint8 [blocks, b_q, ceil(b_k / 8)], lowest bit first."""
    eights = pad(elements, (0, -elements.shape[-1] % 8)).unflatten(-1, (-1, 8))
    values = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], device=elements.device)
    bits: Tensor = (eights * values).sum(-1)
    return bits.to(torch.uint8)


def unpack_bits(bits: Tensor, b_k: int) -> Tensor:
    """Return the inverse of `pack_bits`."""
    shifts = torch.arange(8, device=bits.device)
    eights: Tensor = ((bits[..., None] >> shifts) & 1).bool()
    return eights.flatten(-2)[..., :b_k]


def _blocks(tokens: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-tokens[0] // block[0]), -(-tokens[1] // block[1])


def _sizes(tokens: object) -> tuple[int, int]:
    """Return S_q and S_kv. Raises FormatError."""
    if isinstance(tokens, list | tuple) and len(tokens) == 2:
        s_q, s_kv = tokens
        if all(type(size) is int and size > 0 for size in (s_q, s_kv)):
            return s_q, s_kv
    require(False, f"tokens: expected [queries, keys], each at least 1; found {tokens!r}")
    raise AssertionError


def _in_blocks(elements: Tensor, block: tuple[int, int]) -> Tensor:
    """Return [batch, lists, q_blocks, kv_blocks, b_q, b_k], padded with False."""
    (b_q, b_k), (batch, lists, s_q, s_kv) = block, elements.shape
    padded = pad(elements, (0, -s_kv % b_k, 0, -s_q % b_q))
    return padded.view(batch, lists, -1, b_q, padded.shape[3] // b_k, b_k).transpose(3, 4)


FORMAT = BlockMask
