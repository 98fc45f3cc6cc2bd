"""Predict the fastest clusters of CTAs for a work item: a model of spense_wgmma.cu.

    W, k tiles           0      1      2      3          a cluster of `split` = 2 for each item:
    warpgroup 0       +------+------+ +------+------+    64 warpgroups features x tokens
    warpgroup 1       |   CTA 0     | |   CTA 1     |    sums of all but its own share of tokens
                      +------+------+ +------+------+    go to the other CTA

More warpgroups share X, more splits keep all SMs busy, and sums take time. The model, in ns:

    rounds of CTAs x (start + bytes of W and X / rate)  +  sums that a CTA sends
    rate    the least of what an SM takes in, its share of the L2 cache, and its stages in flight

The rates are an H200's (NOTES.md). In each of 30 problems from 33 to 256 tokens, the fastest
cluster was among the first five.
"""

from collections.abc import Mapping
from itertools import product

from sparsebench.formats.spense import ROWS, SPAN_BYTES, VALUE_BYTES

FEW_TOKENS = 256  # beyond, the lists of _stream_k.py are faster
TOKENS = range(16, 129, 16)  # tokens of a tile
SPLITS = 1, 2, 3, 4, 5, 8
MEMORY_RATE, L2_RATE, SM_RATE = 4300, 9000, 116  # bytes per ns
SHARED_BYTES = 226 * 1024
LATENCY_NS = 2100  # latency of a copy while all SMs copy
ROUND_NS = 2000  # from a CTA's start to its first tile, and for its last stores
SUMS_NS, SUMS_RATE = 700, 20  # for the barrier; bytes per ns that a CTA sends

Shape = tuple[int, int, int, int]
"""Tokens of a tile, tiles of W ahead, warpgroups of a CTA, CTAs of a cluster."""


def likeliest(
    m: int, shape: tuple[int, int], itemsize: int, at_once: Mapping[int, int], most: int
) -> list[Shape]:
    """Return at most `most` likely clusters for m tokens; none beyond FEW_TOKENS.

    shape    n and k, with `itemsize` bytes per element; W counts as if all of it were 2:4
    at_once  clusters that the GPU runs at a time, by their number of CTAs
    """
    if m > FEW_TOKENS:
        return []
    (n, k), predicted = shape, {}
    tile = VALUE_BYTES + (1024 if itemsize == 2 else 2048)
    read = n * k * itemsize * tile / (2 * VALUE_BYTES) / MEMORY_RATE
    for pieces, warpgroups, split in product((1, 2, 3, 4), (1, 2, 3), SPLITS):
        tokens = next((tokens for tokens in TOKENS if tokens * pieces >= m), None)
        if tokens is None:
            continue
        ahead = {1: 8, 2: 6 if tokens > 64 else 4, 3: 4}[warpgroups]
        k_tiles, columns = -(-k * itemsize // SPAN_BYTES // split), -(-m // tokens)
        clusters = -(-n // (ROWS * warpgroups)) * columns
        sums = (split - 1) / split * warpgroups * ROWS * tokens * 4
        stage = warpgroups * tile + SPAN_BYTES * tokens
        in_flight = min(ahead, (SHARED_BYTES - sums) // stage) * stage
        ctas = min(clusters, at_once[split]) * split
        rate = min(SM_RATE, L2_RATE / ctas, in_flight / LATENCY_NS)
        copied = k_tiles * (warpgroups * tile + SPAN_BYTES * m / columns)
        rounds = -(-clusters // at_once[split])
        exchange = SUMS_NS * (split > 1) + sums / SUMS_RATE
        time = max(rounds * copied / rate, read) + rounds * ROUND_NS + exchange
        predicted[tokens, ahead, warpgroups, split] = time
    return sorted(predicted, key=predicted.__getitem__)[:most]
