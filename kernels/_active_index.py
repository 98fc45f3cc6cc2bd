"""Which hidden units are on for which token, listed by token and by unit; made on the device.

    act(G) of     unit 0 1 2 3          by token                     by unit
    three       +---------------+
    tokens,     |      a . b .  |   offsets  0     2   3     5    unit_offsets  0   1   2     4 5
    four units  |      . c . .  |   columns  0  2  1   2  3    -> tokens        0   1   0  2  2
                |      . . d e  |   values   a  b  c   d  e
                +---------------+   places   0  2  1   3  4       of each entry in the other list

offsets       int32 [m + 1]        columns  int16 [capacity], to be read as unsigned
unit_offsets  int32 [n + 1]        tokens, places  int32 [capacity]        values [capacity], G

A unit of a token is on unless G <= 0: NaN is on. No token and no tile of units has a capacity of
its own, the lists as a whole have: offsets[m] says how many entries there are, and where that is
more than the capacity, nothing is written into the lists, and all that reads them returns at once
(_active_products.py). What lies behind the last entry is undefined.

    count   each 128 tokens by 32 units: the bits of a token, how many a token has, and a unit has
            running sums of both: where each of them starts
    fill    the same pieces: an entry's place is its start and the number of bits before it

No atomics: lists are in ascending order, the same ones at every call.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._kernel import Unsupported
from sparsebench.kernels._triton import Program

TOKENS, UNITS = 128, 32  # of a piece; a word has 32 bits
SIZES = "m", "eights", "words", "pieces", "capacity"  # compiled once for any
MOST_UNITS, MOST_ELEMENTS = 2**16, 2**31  # for columns of 16 bits, and offsets of 32


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
    if (wide := max(m, n) * max(n, k)) >= MOST_ELEMENTS:
        raise Unsupported(f"expected matrices of fewer than {MOST_ELEMENTS} elements, found {wide}")


def index_of(g: Tensor, capacity: int) -> Active:
    """List the units that are on in gates g [m, n], contiguous; n is a multiple of 8."""
    m, n = g.shape
    words, of_tokens, of_units = pieces_of(g)
    counting(g, words, of_tokens, of_units)()
    token_ends, unit_ends = (
        each.view(-1).cumsum(0, dtype=torch.int32) for each in (of_tokens, of_units)
    )
    active = Active(
        offsets=_from_zero(token_ends.view(m, -1)[:, -1]),
        columns=g.new_empty(capacity, dtype=torch.int16),
        values=g.new_empty(capacity),
        unit_offsets=_from_zero(unit_ends.view(n, -1)[:, -1]),
        tokens=g.new_empty(capacity, dtype=torch.int32),
        places=g.new_empty(capacity, dtype=torch.int32),
    )
    filling(g, words, token_ends, unit_ends, active)()
    return active


def pieces_of(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for the bits [m, words], and the counts [m, words] and [n, pieces of tokens]."""
    (m, n), counts = g.shape, partial(g.new_empty, dtype=torch.int32)
    words, pieces = -(-n // UNITS), -(-m // TOKENS)
    return counts((m, words)), counts((m, words)), counts((n, pieces))


def counting(g: Tensor, words: Tensor, of_tokens: Tensor, of_units: Tensor) -> Program:
    """Return the program that writes the bits and both counts."""
    args = g, words, of_tokens, of_units
    return _program(_count, g, args, (), of_units)


def filling(
    g: Tensor, words: Tensor, token_ends: Tensor, unit_ends: Tensor, active: Active
) -> Program:
    """Return the program that writes the lists, by inclusive running sums of the counts."""
    lists = active.columns, active.values, active.tokens, active.places
    args = g, words, token_ends, unit_ends, active.offsets, *lists
    return _program(_fill, g, args, (active.capacity,), active.columns)


def _program(
    kernel: Any, g: Tensor, args: tuple[Tensor, ...], more: tuple[int, ...], out: Tensor
) -> Program:
    (m, n), constants = g.shape, {"TOKENS": TOKENS, "UNITS": UNITS, "num_warps": 8}
    grid = -(-n // UNITS), -(-m // TOKENS)
    return Program(kernel, grid, (*args, m, n // 8, *grid, *more), constants, out)


def _from_zero(ends: Tensor) -> Tensor:
    return torch.nn.functional.pad(ends, (1, 0))


@triton.jit(do_not_specialize=SIZES[:4])  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    g,
    bits,
    of_tokens,
    of_units,
    m,
    eights,
    words,
    pieces,
    TOKENS: tl.constexpr,
    UNITS: tl.constexpr,
):
    n, lanes = eights * 8, tl.arange(0, UNITS)
    word, piece = tl.program_id(0), tl.program_id(1)
    tokens, units = piece * TOKENS + tl.arange(0, TOKENS), word * UNITS + lanes
    there = (tokens < m)[:, None] & (units < n)[None, :]
    gates = tl.load(g + tokens[:, None] * n + units[None, :], there, 0.0)
    on = tl.where(gates <= 0, 0, 1)  # NaN is on
    at = tokens * words + word
    tl.store(bits + at, tl.sum(on << lanes[None, :], 1), tokens < m)
    tl.store(of_tokens + at, tl.sum(on, 1), tokens < m)
    tl.store(of_units + units * pieces + piece, tl.sum(on, 0), units < n)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def _fill(  # type: ignore[no-untyped-def]
    g,
    bits,
    token_ends,
    unit_ends,
    offsets,
    columns,
    values,
    tokens_of,
    places,
    m,
    eights,
    words,
    pieces,
    capacity,
    TOKENS: tl.constexpr,
    UNITS: tl.constexpr,
):
    if tl.load(offsets + m) <= capacity:
        n, lanes = eights * 8, tl.arange(0, UNITS)
        word, piece = tl.program_id(0), tl.program_id(1)
        tokens, units = piece * TOKENS + tl.arange(0, TOKENS), word * UNITS + lanes
        at = tokens * words + word
        on = tl.load(bits + at, tokens < m, 0)[:, None] >> lanes[None, :] & 1
        token_end = tl.load(token_ends + at, tokens < m, 0)
        unit_end = tl.load(unit_ends + units * pieces + piece, units < n, 0)
        entry = (token_end - tl.sum(on, 1))[:, None] + tl.cumsum(on, 1) - on
        place = (unit_end - tl.sum(on, 0))[None, :] + tl.cumsum(on, 0) - on
        mask = on != 0
        gates = tl.load(g + tokens[:, None] * n + units[None, :], mask)
        tl.store(values + entry, gates, mask)
        tl.store(columns + entry, (units[None, :] + tl.zeros_like(entry)).to(tl.int16), mask)
        tl.store(places + entry, place, mask)
        tl.store(tokens_of + place, tokens[:, None] + tl.zeros_like(place), mask)
