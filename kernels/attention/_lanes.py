"""Rows and lanes of a tile of scores: their sums, their largest scores and words of bits.

tile   [steps, ROWS, LANES, VECTOR]    a lane is a thread; its blocks lie in turn
word   [1, ROWS, LANES, 1]             bit i: block i of the lane
row    [1, ROWS, 1, 1]
"""

import triton
import triton.language as tl


@triton.jit
def as_order(score):  # type: ignore[no-untyped-def]
    """Return the integers that are ordered as scores are."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def as_score(order):  # type: ignore[no-untyped-def]
    """Return the inverse of `as_order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def sum_of_lane(x):  # type: ignore[no-untyped-def]
    """Return the sum of each lane's elements of a tile."""
    return tl.sum(tl.sum(x, 0, keep_dims=True), 3, keep_dims=True)


@triton.jit
def total_of(x):  # type: ignore[no-untyped-def]
    """Return the sum of each row of a tile."""
    return tl.sum(sum_of_lane(x), 2, keep_dims=True)


@triton.jit
def count_of(inside):  # type: ignore[no-untyped-def]
    """Return how many elements of each row are inside; in fp32 an element takes 2 instructions."""
    return tl.sum(sum_of_lane(tl.where(inside, 1.0, 0.0)).to(tl.int32), 2, keep_dims=True)


@triton.jit
def largest_of(x):  # type: ignore[no-untyped-def]
    """Return the largest number of each row of a tile; NaN is none."""
    return tl.max(tl.max(tl.max(x, 0, keep_dims=True), 3, keep_dims=True), 2, keep_dims=True)


@triton.jit
def smallest_of(x):  # type: ignore[no-untyped-def]
    return tl.min(tl.min(tl.min(x, 0, keep_dims=True), 3, keep_dims=True), 2, keep_dims=True)


@triton.jit
def word_of(inside, place):  # type: ignore[no-untyped-def]
    """Return a word for each lane, whose bits say which of its elements are inside."""
    return sum_of_lane(tl.where(inside, 1 << place, 0))


@triton.jit
def sum_before(counts):  # type: ignore[no-untyped-def]
    """Return the sum of a row's lanes before each one."""
    flat = tl.reshape(counts, (counts.shape[1], counts.shape[2]))
    return tl.reshape(tl.cumsum(flat, 1) - flat, counts.shape)


@triton.jit  # type: ignore[untyped-decorator]
def lowest_bits(count, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a word whose lowest bits are set: `count` of them, at least 0 and at most SIDE."""
    count = tl.minimum(tl.maximum(count, 0), SIDE)
    return tl.where(count < 32, (1 << (count & 31)) - 1, -1)


@triton.jit
def count_bits(word):  # type: ignore[no-untyped-def]
    """Return how many bits of a word are set: sums of 2, 4 and 8 bits, then of the four bytes."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
