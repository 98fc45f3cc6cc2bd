"""Which hidden units are on for which token, listed by token and by unit; made on the device.

    G of three    unit 0 1 2 3          by token                     by unit
    tokens and  +---------------+
    four units, |      a . b .  |   offsets  0     2   3     5    unit_offsets  0   1   2     4 5
    where on    |      . c . .  |   columns  0  2  1   2  3    -> tokens        0   1   0  2  2
                |      . . d e  |   values   a  b  c   d  e
                +---------------+   places   0  2  1   3  4       of each entry in the other list

offsets       int32 [m + 1]        columns  int16 [capacity], to be read as unsigned
unit_offsets  int32 [n + 1]        tokens, places  int32 [capacity]        values [capacity], G

A unit of a token is on unless G <= 0: NaN is on. No token and no tile of units has a capacity of
its own, the lists as a whole have: offsets[m] says how many entries there are, and where that is
more than the capacity, nothing is written into the lists, and all that reads them returns at once
(_active_products.py). What lies behind the last entry is undefined.

    count   pieces of 32 tokens by 128 units: the bits of 32 units of a token, and of 32 tokens of
            a unit, and how many there are; their running sums are where each word's entries end
    fill    a lane has 32 units of a token, and lists one after the other; its place by unit is the
            number of bits before it in the unit's word of these tokens

G is read once, and then where units are on. No atomics: lists are in ascending order, the same ones
at every call.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._kernel import Unsupported
from sparsebench.kernels._triton import Program

WORD, UNITS = 32, 128  # bits of a word; a piece is as many tokens by these units
LANES = 512  # words a program lists
SIZES = "m", "eights", "words", "pieces", "capacity"  # compiled once for any
MOST_UNITS = 2**16  # for columns of 16 bits
ELEMENTS = 2**31 - 2**9  # for offsets of 32 bits, and the entries that a loop looks ahead


@dataclass(frozen=True)
class Active:
    """The lists, as the module says."""

    offsets: Tensor
    columns: Tensor
    values: Tensor
    unit_offsets: Tensor
    tokens: Tensor
    places: Tensor

    @property
    def capacity(self) -> int:
        """Return how many entries there is room for."""
        return self.columns.shape[0]


def require_room(m: int, n: int, k: int) -> None:
    """Raise Unsupported where indices would not hold m tokens of n units, or of k features."""
    if n > MOST_UNITS:
        raise Unsupported(f"expected at most {MOST_UNITS} hidden units, found {n}")
    if (most := max(m * n, m * k, n * k)) > ELEMENTS:
        raise Unsupported(f"expected matrices of at most {ELEMENTS} elements, found {most}")


def index_of(g: Tensor, capacity: int) -> Active:
    """List the units that are on in gates g [m, n], contiguous; n is a multiple of 8."""
    m, n = g.shape
    words = words_of(g)
    counting(g, words)()
    ends = words.token_counts.view(-1).cumsum(0, dtype=torch.int32)
    unit_ends = words.unit_counts.view(-1).cumsum(0, dtype=torch.int32)
    active = Active(
        offsets=_from_zero(ends.view(m, -1)[:, -1]),
        columns=g.new_empty(capacity, dtype=torch.int16),
        values=g.new_empty(capacity),
        unit_offsets=_from_zero(unit_ends.view(n, -1)[:, -1]),
        tokens=g.new_empty(capacity, dtype=torch.int32),
        places=g.new_empty(capacity, dtype=torch.int32),
    )
    filling(g, words, ends, unit_ends, active)()
    return active


class Words(NamedTuple):
    """Bits and their counts, int32: by token [m, ceil(n / 32)], by unit [n, ceil(m / 32)]."""

    of_tokens: Tensor
    token_counts: Tensor
    of_units: Tensor
    unit_counts: Tensor


def words_of(g: Tensor) -> Words:
    """Return room for the words of gates [m, n]."""
    m, n = g.shape
    sizes = (m, -(-n // WORD)), (n, -(-m // WORD))
    return Words(*(g.new_empty(size, dtype=torch.int32) for size in sizes for _ in range(2)))


def counting(g: Tensor, words: Words) -> Program:
    """Return the program that writes the bits and both counts."""
    (m, n), widths = g.shape, (words.of_tokens.shape[1], words.of_units.shape[1])
    grid = (-(-n // UNITS) * widths[1],)  # one axis: the others end at 65535
    constants = {"WORD": WORD, "UNITS": UNITS, "num_warps": 4}
    return Program(_count, grid, (g, *words, m, n // 8, *widths), constants, words.unit_counts)


def filling(
    g: Tensor, words: Words, token_ends: Tensor, unit_ends: Tensor, active: Active
) -> Program:
    """Return the program that writes the lists, by inclusive running sums of the counts."""
    (m, n), widths = g.shape, (words.of_tokens.shape[1], words.of_units.shape[1])
    lists = active.offsets, active.columns, active.values, active.tokens, active.places
    args = g, words.of_tokens, token_ends, words.of_units, unit_ends, *lists
    sizes = m, n // 8, *widths, active.capacity
    constants = {"WORD": WORD, "LANES": LANES, "num_warps": 4}
    grid = (-(-words.of_tokens.numel() // LANES),)
    return Program(_fill, grid, (*args, *sizes), constants, active.columns)


def _from_zero(ends: Tensor) -> Tensor:
    return torch.nn.functional.pad(ends, (1, 0))


@triton.jit
def _bits_in(word):  # type: ignore[no-untyped-def]
    """Return how many bits of uint32 are set, as int32: in pairs, fours, bytes, and all."""
    pairs = word - (word >> 1 & 0x55555555)
    fours = (pairs & 0x33333333) + (pairs >> 2 & 0x33333333)
    octets = fours + (fours >> 4) & 0x0F0F0F0F
    return (octets * 0x01010101 >> 24).to(tl.int32)


@triton.jit(do_not_specialize=SIZES[:4])  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    g,
    of_tokens,
    token_counts,
    of_units,
    unit_counts,
    m,
    eights,
    words,
    pieces,
    WORD: tl.constexpr,
    UNITS: tl.constexpr,
):
    n, lanes = eights * 8, tl.arange(0, WORD)
    across = (n + UNITS - 1) // UNITS
    piece, part = tl.program_id(0) // across, tl.program_id(0) % across
    tokens, units = piece * WORD + lanes, part * UNITS + tl.arange(0, UNITS)
    there = (tokens < m)[:, None] & (units < n)[None, :]
    gates = tl.load(g + tokens[:, None] * n + units[None, :], there, 0.0)
    on = tl.where(gates <= 0, 0, 1)  # NaN is on
    at = units * pieces + piece
    tl.store(of_units + at, tl.sum(on << lanes[:, None], 0), units < n)
    tl.store(unit_counts + at, tl.sum(on, 0), units < n)
    parts: tl.constexpr = UNITS // WORD
    on = tl.reshape(on, (WORD, parts, WORD))
    word = part * parts + tl.arange(0, parts)
    at = tokens[:, None] * words + word[None, :]
    there = (tokens < m)[:, None] & (word < words)[None, :]
    tl.store(of_tokens + at, tl.sum(on << lanes[None, None, :], 2), there)
    tl.store(token_counts + at, tl.sum(on, 2), there)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def _fill(  # type: ignore[no-untyped-def]
    g,
    of_tokens,
    token_ends,
    of_units,
    unit_ends,
    offsets,
    columns,
    values,
    tokens,
    places,
    m,
    eights,
    words,
    pieces,
    capacity,
    WORD: tl.constexpr,
    LANES: tl.constexpr,
):
    if tl.load(offsets + m) <= capacity:
        at = tl.program_id(0) * LANES + tl.arange(0, LANES)
        there = at < m * words
        left = tl.load(of_tokens + at, there, 0).to(tl.uint32, bitcast=True)
        entry = tl.load(token_ends + at, there, 0) - _bits_in(left)
        token, first = at // words, at % words * WORD
        ones = tl.full((LANES,), 1, tl.uint32)
        before = (ones << (token % WORD).to(tl.uint32)) - 1
        while tl.max(left, 0) > 0:
            on = left != 0
            unit = first + _bits_in((left & (0 - left)) - 1)  # the lowest one
            word = unit * pieces + token // WORD
            its = tl.load(of_units + word, on, 0).to(tl.uint32, bitcast=True)
            place = tl.load(unit_ends + word, on, 0) - _bits_in(its) + _bits_in(its & before)
            gates = tl.load(g + token * eights * 8 + unit, on)
            tl.store(values + entry, gates, on)
            tl.store(columns + entry, unit.to(tl.int16), on)
            tl.store(places + entry, place, on)
            tl.store(tokens + place, token, on)
            entry += 1
            left = left & left - 1
