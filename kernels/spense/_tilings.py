"""Predict the fastest tiles for more than 128 tokens: a model of spense_wgmma.cu.

    tokens 0 to 143      |= 192 features =|= 192 features =|= 192 features =| ...
    tokens 144 to 287    |= 192 features =|= 192 features =|= 192 features =| ...

wgmma takes any multiple of 8 tokens up to 256. So a tile can be as high as its share of the tokens
(264 are two tiles of 144, not three of 128), and what counts is whether the tiles fill all SMs in
whole rounds. Shared memory is the limit of a CTA: every warpgroup reads each box of X and its half
tile of W, and the copies write both. The model, in ns:

    rounds x (boxes x clocks of shared memory / clock  +  first tiles and stores)

The last round may be cut along k (_stream_k.py), which costs partial sums. Two CTAs that share X
were slower on an H200 nearly everywhere (NOTES.md), so there are none.
"""

from itertools import product
from math import ceil

from sparsebench.formats.spense import ROW_BYTES, ROWS, VALUE_BYTES

FEW_TOKENS = 128  # up to as many, one tile holds them (spense_wgmma.configurations)
MOST = 4
TOKENS = range(96, 257, 16)  # tokens of a tile
MOST_OF_THREE = 176  # tokens for which three warpgroups have registers
CLOCK, CLOCK_BYTES = 1.9, 128  # clocks per ns, and bytes of shared memory in a clock
ROUND_NS, CUT_NS = 2000, 7000  # for a round; for adding up partial sums, and the rounds they end

Tiling = tuple[int, int, int, int]
"""Tokens of a tile, tiles of W ahead, warpgroups of a CTA; 1 if all tiles are CTAs of one round."""


def likeliest(m: int, shape: tuple[int, int], itemsize: int, sms: int) -> list[Tiling]:
    """Return at most MOST likely tilings for m tokens, the likeliest first; none up to FEW_TOKENS.

    shape  n and k, with `itemsize` bytes per element; W counts as if all of it were 2:4
    """
    if m <= FEW_TOKENS:
        return []
    (n, k), predicted = shape, {}
    boxes = ceil(k * itemsize / ROW_BYTES)
    half = (VALUE_BYTES + (1024 if itemsize == 2 else 2048)) // 2  # bytes of half a tile of W
    for tokens, warpgroups in product(TOKENS, (3, 2)):
        tiles = ceil(m / tokens)
        if tiles == ceil(m / (tokens - 16)) or (warpgroups == 3 and tokens > MOST_OF_THREE):
            continue
        box = tokens * ROW_BYTES
        read = warpgroups * (box + ROWS * ROW_BYTES // 2)
        item = boxes * (read + box + warpgroups * half) / CLOCK_BYTES / CLOCK
        rounds = ceil(n / (ROWS * warpgroups)) * tiles / sms
        whole, cut = ceil(rounds) * item, rounds * item + CUT_NS
        one = (8, warpgroups, 1) if rounds <= 1 and warpgroups == 3 else (4, warpgroups, 0)
        predicted[tokens, *one] = min(whole, cut) + ceil(rounds) * ROUND_NS
    return sorted(predicted, key=predicted.__getitem__)[:MOST]
