"""Tiles of the Triton kernels of attention: the positions of their tokens, and their masks.

A program computes a tile of rows: some tokens of a block, of `pack` heads that share a list. It
walks the list of this block in steps. The blocks of the list, of SIDE tokens each, are laid end to
end, and a step takes LANES of these tokens:

    SIDE 128, LANES 64    | block        |        two steps a block: places are scalars
    SIDE 16,  LANES 64    |bl|bl|bl|bl|           four blocks a step: places are vectors
    SIDE 24,  LANES 64    |blo|blo|bl             a side that is no power of two costs no lane

A flagged column is an entry of a list: bit 31 is set in partial blocks. A lane behind the last
block has column -1 and token -1.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def rows_of(  # type: ignore[no-untyped-def]
    program, order, tokens, heads, lists,
    D: tl.constexpr, SIDE: tl.constexpr, TOKENS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Return the tile that a program computes: TOKENS tokens of PACK heads.

    stacked  the first head, counted over all sequences; then the sequence and the head
    row      of the lists
    token    the first one; `at` has the token of each row of the tile, `inside` whether it exists
    place    of each row in a matrix of these heads

    Rows come in their order; if that is None, no load precedes that of the list.
    """
    tiles = tl.cdiv(tl.minimum(SIDE, tokens), TOKENS)  # of a block
    blocks = tl.cdiv(tokens, SIDE)
    rank = program % (blocks * tiles)
    stacked = program // (blocks * tiles) * PACK
    sequence, head = stacked // heads, stacked % heads
    list_ = sequence * lists + head * lists // heads
    block = rank // tiles if order is None else tl.load(order + list_ * blocks + rank // tiles)
    token = block * SIDE + rank % tiles * TOKENS
    lane = tl.arange(0, TOKENS * PACK)
    at = token + lane // PACK
    inside = (at < (block + 1) * SIDE) & (at < tokens)
    place = ((sequence * tokens + at).to(tl.int64) * heads + head + lane % PACK) * D
    return stacked, sequence, head, list_ * blocks + block, token, at, inside, place


@triton.jit  # type: ignore[untyped-decorator]
def list_of(  # type: ignore[no-untyped-def]
    offsets, columns, fulls, row, tokens, SIDE: tl.constexpr, LANES: tl.constexpr
):
    """Return where the list of a row starts, its blocks, and the steps before the first mask.

    Without `fulls`, every step has a mask, and the first empty place ends the list.
    """
    start = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - start
    if fulls is None:
        count, whole = present_of(columns, start, count, tokens, SIDE), 0
    else:
        whole = tl.load(fulls + row) * SIDE // LANES
    return start, count, whole


@triton.jit  # type: ignore[untyped-decorator]
def present_of(columns, start, count, tokens, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the blocks in front of the first empty place of a list."""
    lane, present = tl.arange(0, 128), count
    for at in range(0, count, 128):
        block = tl.load(columns + start + at + lane, at + lane < count, 0) & 0x7FFFFFFF
        empty = tl.where(block >= tl.cdiv(tokens, SIDE), at + lane, count)
        present = tl.minimum(present, tl.min(empty, 0))
    return present


@triton.jit  # type: ignore[untyped-decorator]
def load_rows(  # type: ignore[no-untyped-def]
    matrix, sequence, token, head, place, stored, DEPTH: tl.constexpr, TMA: tl.constexpr
):
    """Return the tile [rows, DEPTH] of a matrix; zeros where it is not `stored` [rows, DEPTH]."""
    if TMA:
        tile = matrix.load([sequence, token, head, 0]).reshape(stored.shape)
    else:
        tile = tl.load(matrix + place[:, None] + tl.arange(0, DEPTH)[None, :], stored, 0.0)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def column_of(  # type: ignore[no-untyped-def]
    columns, start, count, step, SIDE: tl.constexpr, LANES: tl.constexpr
):
    """Return the flagged column of a step, a scalar if the step lies in one block.

    A loop carries what this returns, unchanged, to its next step. If it carries anything computed
    from it, Triton does not pipeline the loads of the step.
    """
    if SIDE % LANES == 0:
        column = tl.load(columns + start + step // (SIDE // LANES))
    else:
        lane = step * LANES + tl.arange(0, LANES)
        column = tl.load(columns + start + lane // SIDE, lane < count * SIDE, -1)
    return column


@triton.jit  # type: ignore[untyped-decorator]
def load_step(  # type: ignore[no-untyped-def]
    first, second, sequence, tokens, head, heads, column, step,
    D: tl.constexpr, DEPTH: tl.constexpr, SIDE: tl.constexpr, LANES: tl.constexpr,
    TMA: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the tiles [LANES, DEPTH] of two matrices of one head, and the token of each lane.

    The tiles have zeros where there is no token. WHOLE says that each lane has a token.
    """
    if SIDE % LANES == 0:
        token = (column & 0x7FFFFFFF) * SIDE + step % (SIDE // LANES) * LANES
        at = token + tl.arange(0, LANES)
    else:
        lane = step * LANES + tl.arange(0, LANES)
        at = tl.where(column == -1, -1, (column & 0x7FFFFFFF) * SIDE + lane % SIDE)
    if TMA:
        first_tile = first.load([sequence, token, head, 0]).reshape(LANES, DEPTH)
        second_tile = second.load([sequence, token, head, 0]).reshape(LANES, DEPTH)
    else:
        depth = tl.arange(0, DEPTH)[None, :]
        line = ((sequence * tokens + at).to(tl.int64) * heads + head)[:, None] * D
        inside, other = None, None
        if DEPTH != D:
            inside, other = depth < D, 0.0
        if not WHOLE:
            inside, other = ((at >= 0) & (at < tokens))[:, None] & (depth < D), 0.0
        first_tile = tl.load(first + line + depth, inside, other)
        second_tile = tl.load(second + line + depth, inside, other)
    return first_tile, second_tile, at


@triton.jit  # type: ignore[untyped-decorator]
def add_step(  # type: ignore[no-untyped-def]
    scores, v_tile, scale, top, weight, total, MASK: tl.constexpr
):
    """Return the maxima, the sums and the weighted values of rows after a step of keys.

    scores  [ROWS, KEYS]; -inf for a key that a row does not see
    scale   to the base 2
    MASK    whether a row may have seen no key yet
    """
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    safe = tl.where(new == -float("inf"), 0.0, new) if MASK else new
    p = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(top - safe)
    weight = weight * shrink + tl.sum(p, 1)
    total = total * shrink[:, None]
    total = tl.dot(p.to(v_tile.dtype), v_tile, total, input_precision="ieee")
    return new, weight, total


@triton.jit  # type: ignore[untyped-decorator]
def mask_of(  # type: ignore[no-untyped-def]
    token, key, column, start, step, slots, bits, q_tokens, kv_tokens,
    Q_SIDE: tl.constexpr, KV_SIDE: tl.constexpr, SIDE: tl.constexpr, LANES: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return which elements of a step are allowed: all of a full block, up to the last key.

    token, key  of each row and column, shaped to broadcast to the tile, whose last side is LANES
    bits        of the partial blocks, or None
    """
    partial = column < 0
    allowed = (token >= 0) & (key >= 0) & (key < kv_tokens)
    if CAUSAL:
        allowed = allowed & ((key <= token + (kv_tokens - q_tokens)) | (partial == 0))
    if bits is not None:
        BYTES: tl.constexpr = (KV_SIDE + 7) // 8
        if SIDE % LANES == 0:
            entry = start + step // (SIDE // LANES)
        else:
            entry = start + (step * LANES + tl.arange(0, LANES)) // SIDE
        slot = tl.load(slots + entry, partial & (column != -1), -1)
        row, bit = token % Q_SIDE, key % KV_SIDE
        place = bits + slot.to(tl.int64) * (Q_SIDE * BYTES) + row * BYTES + bit // 8
        byte = tl.load(place, allowed & (slot >= 0), 255).to(tl.int32)
        allowed = allowed & (((byte >> (bit % 8)) & 1) == 1)
    return allowed
