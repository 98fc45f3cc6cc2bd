"""Tiles of the Triton kernels of attention: the positions of their tokens, and their masks.

A row's blocks of SIDE tokens each are laid end to end; a tile is LANES of these tokens:

    SIDE 128, LANES 64    | block        |        two tiles a block: places are scalars
    SIDE 16,  LANES 64    |bl|bl|bl|bl|           four blocks a tile: places are vectors
    SIDE 24,  LANES 64    |blo|blo|bl             a side that is no power of two costs no lane

A flagged column is an entry of a list: bit 31 is set in partial blocks. A lane behind the last
block has column -1 and token -1.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def queries_of(  # type: ignore[no-untyped-def]
    program,
    order,
    q_tokens,
    heads,
    kv_heads,
    lists,
    D: tl.constexpr,
    Q_SIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    PACK: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Return what a program computes: a tile of TOKENS queries of PACK heads.

    stacked  the first head, counted over all sequences; then the sequence, head and key head
    row      of the lists
    token    the first query; `at` has the query of each row of the tile, `inside` whether it exists
    place    of each row in q and o

    ORDERED  rows with many blocks come first; otherwise no load precedes that of the list
    """
    tiles = tl.cdiv(tl.minimum(Q_SIDE, q_tokens), TOKENS)  # of a block
    q_blocks = tl.cdiv(q_tokens, Q_SIDE)
    rank = program % (q_blocks * tiles)
    stacked = program // (q_blocks * tiles) * PACK
    sequence, head = stacked // heads, stacked % heads
    list_ = sequence * lists + head * lists // heads
    block = tl.load(order + list_ * q_blocks + rank // tiles) if ORDERED else rank // tiles
    token = block * Q_SIDE + rank % tiles * TOKENS
    lane = tl.arange(0, TOKENS * PACK)
    at = token + lane // PACK
    inside = (at < (block + 1) * Q_SIDE) & (at < q_tokens)
    place = ((sequence * q_tokens + at).to(tl.int64) * heads + head + lane % PACK) * D
    kv_head = head // (heads // kv_heads)
    return stacked, sequence, head, kv_head, list_ * q_blocks + block, token, at, inside, place


@triton.jit  # type: ignore[untyped-decorator]
def load_queries(  # type: ignore[no-untyped-def]
    matrix,
    sequence,
    token,
    head,
    place,
    inside,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return the tile [ROWS, DEPTH] of q, or of a matrix like it."""
    if TMA:
        tile = matrix.load([sequence, token, head, 0]).reshape(ROWS, DEPTH)
    else:
        depth = tl.arange(0, DEPTH)[None, :]
        tile = tl.load(matrix + place[:, None] + depth, inside[:, None] & (depth < D), 0.0)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def column_of(  # type: ignore[no-untyped-def]
    columns, start, count, tile, SIDE: tl.constexpr, LANES: tl.constexpr
):
    """Return the flagged column of a tile, a scalar if the tile lies in one block.

    A loop carries what this returns, unchanged, to its next step. If it carries anything computed
    from it, Triton does not pipeline the loads of the tile.
    """
    if SIDE % LANES == 0:
        column = tl.load(columns + start + tile // (SIDE // LANES))
    else:
        lane = tile * LANES + tl.arange(0, LANES)
        column = tl.load(columns + start + lane // SIDE, lane < count * SIDE, -1)
    return column


@triton.jit  # type: ignore[untyped-decorator]
def token_of(column, tile, SIDE: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first token of a tile in one block, or else the token of each lane."""
    if SIDE % LANES == 0:
        token = (column & 0x7FFFFFFF) * SIDE + tile % (SIDE // LANES) * LANES
    else:
        lane = tile * LANES + tl.arange(0, LANES)
        token = tl.where(column == -1, -1, (column & 0x7FFFFFFF) * SIDE + lane % SIDE)
    return token


@triton.jit  # type: ignore[untyped-decorator]
def entry_of(start, tile, SIDE: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the place of a tile's block in the lists, or that of each lane."""
    if SIDE % LANES == 0:
        entry = start + tile // (SIDE // LANES)
    else:
        entry = start + (tile * LANES + tl.arange(0, LANES)) // SIDE
    return entry


@triton.jit  # type: ignore[untyped-decorator]
def each_token(token, SIDE: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the token of each lane."""
    return token + tl.arange(0, LANES) if SIDE % LANES == 0 else token


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(  # type: ignore[no-untyped-def]
    matrix,
    sequence,
    token,
    tokens,
    head,
    heads,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    SIDE: tl.constexpr,
    LANES: tl.constexpr,
    TMA: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Return a tile [LANES, DEPTH] of one head; zeros where there is no token.

    WHOLE  each lane has a token
    """
    if TMA:
        tile = matrix.load([sequence, token, head, 0]).reshape(LANES, DEPTH)
    else:
        at = each_token(token, SIDE, LANES)
        depth = tl.arange(0, DEPTH)
        row = (sequence * tokens + at).to(tl.int64) * heads + head
        place = matrix + row[:, None] * D + depth[None, :]
        if WHOLE and DEPTH == D:
            tile = tl.load(place)
        elif WHOLE:
            tile = tl.load(place, (depth < D)[None, :], 0.0)
        else:
            inside = ((at >= 0) & (at < tokens))[:, None] & (depth < D)[None, :]
            tile = tl.load(place, inside, 0.0)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def is_allowed(  # type: ignore[no-untyped-def]
    token,
    key,
    partial,
    entry,
    slots,
    bits,
    q_tokens,
    kv_tokens,
    Q_SIDE: tl.constexpr,
    KV_SIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BITS: tl.constexpr,
):
    """Return which elements of a tile are allowed: all of a full block, up to the last key.

    token, key  of each row and column, shaped to broadcast to the tile
    partial     whether the element's block is partial; it and `entry` broadcast, too
    """
    allowed = (token >= 0) & (key >= 0) & (key < kv_tokens)
    if CAUSAL:
        allowed = allowed & ((key <= token + (kv_tokens - q_tokens)) | (partial == 0))
    if BITS:
        BYTES: tl.constexpr = (KV_SIDE + 7) // 8
        slot = tl.load(slots + entry, partial, -1)
        row, column = token % Q_SIDE, key % KV_SIDE
        place = bits + slot.to(tl.int64) * (Q_SIDE * BYTES) + row * BYTES + column // 8
        byte = tl.load(place, allowed & (slot >= 0), 255).to(tl.int32)
        allowed = allowed & (((byte >> (column % 8)) & 1) == 1)
    return allowed


@triton.jit  # type: ignore[untyped-decorator]
def fold(  # type: ignore[no-untyped-def]
    scores, v_tile, total, weight, top, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """Add a tile of scores and values to the sums of each row.

    top     the largest scaled score so far, in units of log2; weight: the sum of exponentials
    MASKED  a row may have no allowed element yet
    """
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    safe = tl.where(new == -float("inf"), 0.0, new) if MASKED else new
    p = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(top - safe)
    weight = weight * shrink + tl.sum(p, 1)
    total = total * shrink[:, None]
    total = tl.dot(p.to(v_tile.dtype), v_tile, total, input_precision=PRECISION)
    return total, weight, new
