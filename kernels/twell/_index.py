"""Make the lists of formats/active_csr.py on the device: active units by token and by unit.

    G of three    unit 0 1 2 3          by token                     by unit
    tokens and  +---------------+
    four units, |      a . b .  |   offsets  0     2   3     5    unit_offsets  0   1   2     4 5
    if active   |      . c . .  |   columns  0  2  1   2  3    -> tokens        0   1   0  2  2
                |      . . d e  |   values   a  b  c   d  e
                +---------------+   places   0  2  1   3  4       of each entry in the other list

offsets       int32 [m + 1]        columns  int16 [capacity], read as unsigned
unit_offsets  int32 [n + 1]        tokens, places  int32 [capacity]        values [capacity], of G

A unit of a token is active unless G <= 0, so NaN is active. The capacity is that of the whole
lists, not of a token or a tile of units. offsets[m] is the number of entries. If it exceeds the
capacity, the lists are not written, and kernels that read them return at once (_gather.py). Places
beyond the last entry are undefined.

Four kernels make the lists from words of 32 bits:

    count   the bits of G > 0. A warp takes 32 tokens by 256 units of 16 bits: a lane has 8 units of
            each token, so one lane has the bits of 32 tokens, and four have those of 32 units
    before  for each word, the entries before it in its token, or its unit; and the totals
    offset  the running sums of the totals, by one program for tokens and one for units
    fill    the entries. A lane takes 32 units of a token, one after the other; an entry's place by
            unit counts the bits before it in the unit's word of these tokens

Words of units lie token by token, as G does, so the reads and writes of a program are adjacent. G
is read once as a whole, and once where units are active. There are no atomics, so lists are in
ascending order and the same at every call.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.active_csr import MOST_UNITS, ActiveCsr
from sparsebench.kernels._common.triton import BoundKernel

WORD = 32  # bits
LANE_BYTES = 16  # bytes of a token that a lane loads at once
ROWS, STAGES = 8, 4  # tokens that are copied at a time, and copies in flight
BEFORE_PIECES, BEFORE_UNITS = 128, 32  # the tile of words of units that is counted at a time
BEFORE_TOKENS, BEFORE_WORDS = 32, 64  # the same of words of tokens
OFFSETS = 8192  # counts that are summed at a time
LANES = 128  # words that a warp lists
SIZES = "m", "eights", "words", "pieces", "capacity"  # one compile serves all their values
ELEMENTS = 2**31 - 2**9  # offsets have 32 bits, and loops read some entries ahead


def require_room(m: int, n: int, k: int) -> None:
    """Raise Unsupported if indices are too small for m tokens of n units or k features."""
    if n > MOST_UNITS:
        raise Unsupported(f"expected at most {MOST_UNITS} hidden units, found {n}")
    if (most := max(m * n, m * k, n * k)) > ELEMENTS:
        raise Unsupported(f"expected matrices of at most {ELEMENTS} elements, found {most}")


def index_of(g: Tensor, capacity: int) -> ActiveCsr:
    """List the active units of gates g [m, n], contiguous; n is a multiple of 8."""
    programs, active = listing(g, capacity)
    for program in programs:
        program()
    return active


def listing(g: Tensor, capacity: int) -> tuple[list[BoundKernel], ActiveCsr]:
    """Return the kernels that list the active units of gates g [m, n], and the lists."""
    (m, n), int32 = g.shape, torch.int32
    words, pieces = -(-n // WORD), -(-m // WORD)
    sizes = m, n // 8, words, pieces
    of_tokens, before_in_token = (g.new_empty(m, words, dtype=int32) for _ in range(2))
    of_units, before_in_unit = (g.new_empty(pieces, n, dtype=int32) for _ in range(2))
    counts = g.new_empty(m, dtype=int32), g.new_empty(n, dtype=int32)
    offsets = g.new_empty(m + 1, dtype=int32), g.new_empty(n + 1, dtype=int32)
    columns, values = g.new_empty(capacity, dtype=torch.int16), g.new_empty(capacity)
    tokens, places = (g.new_empty(capacity, dtype=int32) for _ in range(2))
    bits, before = (of_tokens, of_units), (before_in_token, before_in_unit)
    lists = columns, values, tokens, places

    def program(
        kernel: Any, programs: int, *args: Any, num_warps: int = 4, **sides: int
    ) -> BoundKernel:
        return BoundKernel(kernel, (programs,), args, sides | {"num_warps": num_warps}, of_units)

    units = 32 * LANE_BYTES // g.element_size()
    rows = {"WORD": WORD, "UNITS": units, "ROWS": ROWS, "STAGES": STAGES, "num_warps": 1}
    by_unit = {"PIECES": BEFORE_PIECES, "UNITS": BEFORE_UNITS}
    by_token = {"TOKENS": BEFORE_TOKENS, "WORDS": BEFORE_WORDS}
    groups = -(-n // BEFORE_UNITS) + -(-m // BEFORE_TOKENS)
    filled, lanes = (*offsets, *lists, *sizes, capacity), {"WORD": WORD, "LANES": LANES}
    return [  # on one axis of the grid, because the other two end at 65535
        program(_count, -(-n // units) * pieces, g, *bits, *sizes, **rows),
        program(_before, groups, *bits, *before, *counts, *sizes, **by_unit, **by_token),
        program(_offset, 2, *counts, *offsets, m, n // 8, EACH=OFFSETS, num_warps=8),
        program(_fill, -(-m * words // LANES), g, *bits, *before, *filled, **lanes, num_warps=1),
    ], ActiveCsr((m, n), offsets[0], columns, values, offsets[1], tokens, places)


@triton.jit
def _bits_in(word):  # type: ignore[no-untyped-def]
    """Return how many bits of a uint32 are set, as int32: sums of pairs, fours, bytes, all."""
    pairs = word - (word >> 1 & 0x55555555)
    fours = (pairs & 0x33333333) + (pairs >> 2 & 0x33333333)
    octets = fours + (fours >> 4) & 0x0F0F0F0F
    return (octets * 0x01010101 >> 24).to(tl.int32)


@triton.jit(do_not_specialize=SIZES[:4])  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    g,
    of_tokens,
    of_units,
    m,
    eights,
    words,
    pieces,
    WORD: tl.constexpr,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = eights * 8
    parts: tl.constexpr = UNITS // WORD
    across = (n + UNITS - 1) // UNITS
    piece, part = tl.program_id(0) // across, tl.program_id(0) % across
    units, word = part * UNITS + tl.arange(0, UNITS), part * parts + tl.arange(0, parts)
    unit_bits, of_unit = 1 << (tl.arange(0, UNITS) % WORD), tl.zeros((UNITS,), tl.int32)
    for first in tl.range(0, WORD, ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        tokens = piece * WORD + rows
        there = (tokens < m)[:, None] & (units < n)[None, :]
        off = tl.load(g + tokens[:, None] * n + units[None, :], there, 0.0) <= 0  # NaN is active
        of_unit += tl.sum(tl.where(off, 0, (1 << rows)[:, None]), 0)
        bits = tl.reshape(tl.where(off, 0, unit_bits[None, :]), (ROWS, parts, WORD))
        at = tokens[:, None] * words + word[None, :]
        tl.store(of_tokens + at, tl.sum(bits, 2), (tokens < m)[:, None] & (word < words)[None, :])
    tl.store(of_units + piece * n + units, of_unit, units < n)


@triton.jit(do_not_specialize=SIZES[:4])  # type: ignore[untyped-decorator]
def _before(  # type: ignore[no-untyped-def]
    of_tokens,
    of_units,
    before_in_token,
    before_in_unit,
    token_counts,
    unit_counts,
    m,
    eights,
    words,
    pieces,
    PIECES: tl.constexpr,
    UNITS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
):
    n = eights * 8
    groups = (n + UNITS - 1) // UNITS
    if tl.program_id(0) < groups:
        units = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
        count = tl.zeros((UNITS,), tl.int32)
        for first in range(0, pieces, PIECES):
            piece = first + tl.arange(0, PIECES)
            at = piece[:, None] * n + units[None, :]
            there = (piece < pieces)[:, None] & (units < n)[None, :]
            bits = _bits_in(tl.load(of_units + at, there, 0).to(tl.uint32, bitcast=True))
            tl.store(before_in_unit + at, count[None, :] + tl.cumsum(bits, 0) - bits, there)
            count += tl.sum(bits, 0)
        tl.store(unit_counts + units, count, units < n)
    else:
        tokens = (tl.program_id(0) - groups) * TOKENS + tl.arange(0, TOKENS)
        count = tl.zeros((TOKENS,), tl.int32)
        for first in range(0, words, WORDS):
            word = first + tl.arange(0, WORDS)
            at = tokens[:, None] * words + word[None, :]
            there = (tokens < m)[:, None] & (word < words)[None, :]
            bits = _bits_in(tl.load(of_tokens + at, there, 0).to(tl.uint32, bitcast=True))
            tl.store(before_in_token + at, count[:, None] + tl.cumsum(bits, 1) - bits, there)
            count += tl.sum(bits, 1)
        tl.store(token_counts + tokens, count, tokens < m)


@triton.jit(do_not_specialize=("m", "eights"))  # type: ignore[untyped-decorator]
def _offset(  # type: ignore[no-untyped-def]
    token_counts, unit_counts, offsets, unit_offsets, m, eights, EACH: tl.constexpr
):
    if tl.program_id(0) == 0:
        _running_sums(token_counts, offsets, m, EACH)
    else:
        _running_sums(unit_counts, unit_offsets, eights * 8, EACH)


@triton.jit  # type: ignore[untyped-decorator]
def _running_sums(counts, offsets, size, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the size + 1 running sums of counts [size]; the first is 0."""
    total, lanes = 0, tl.arange(0, EACH)
    tl.store(offsets, total)
    for first in range(0, size, EACH):
        there = lanes < size - first
        each = tl.load(counts + first + lanes, there, 0)
        tl.store(offsets + first + lanes + 1, total + tl.cumsum(each, 0), there)
        total += tl.sum(each, 0)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def _fill(  # type: ignore[no-untyped-def]
    g,
    of_tokens,
    of_units,
    before_in_token,
    before_in_unit,
    offsets,
    unit_offsets,
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
    n, at = eights * 8, tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = at < m * words
    token, first = at // words, at % words * WORD
    left = tl.load(of_tokens + at, there, 0).to(tl.uint32, bitcast=True)
    entry = tl.load(offsets + token, there, 0) + tl.load(before_in_token + at, there, 0)
    if tl.load(offsets + m) <= capacity:
        ones = tl.full((LANES,), 1, tl.uint32)
        before = (ones << (token % WORD).to(tl.uint32)) - 1
        while tl.max(left, 0) > 0:
            on = left != 0
            unit = first + _bits_in((left & (0 - left)) - 1)  # the lowest bit
            word = token // WORD * n + unit
            its = tl.load(of_units + word, on, 0).to(tl.uint32, bitcast=True)
            place = tl.load(unit_offsets + unit, on, 0) + tl.load(before_in_unit + word, on, 0)
            place += _bits_in(its & before)
            gates = tl.load(g + token * n + unit, on)
            tl.store(values + entry, gates, on)
            tl.store(columns + entry, unit.to(tl.int16), on)
            tl.store(places + entry, place, on)
            tl.store(tokens + place, token, on)
            entry += 1
            left = left & left - 1
