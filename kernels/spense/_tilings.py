"""Predict the fastest tiles for more than 128 tokens: a model of spense_wgmma.cu.

    tokens 0 to 135      |= 192 features =|= 192 features =|= 192 features =| ...
    tokens 136 to 271    |= 192 features =|= 192 features =|= 192 features =| ...

wgmma takes any multiple of 8 tokens up to 256. So a tile can be as high as its share of the tokens
(264 are two tiles of 136, not three of 128), and what counts is whether the tiles fill all SMs in
whole rounds. The model, in ns:

    rounds x (boxes of k x warpgroups x tokens x BOX_NS  +  first tiles and stores)

The last round may be cut along k (_stream_k.py), which costs partial sums. Two CTAs that share X
were slower on an H200 nearly everywhere (NOTES.md), so there are none.
"""

from itertools import product
from math import ceil

from sparsebench.formats.spense import ROW_BYTES, ROWS

FEW_TOKENS = 128  # up to as many, one tile holds them (spense_wgmma.configurations)
MOST = 3  # for each number of warpgroups
# Tokens of a tile, by warpgroups. Three have registers for 192, and stages in flight for more than
# 176 only in a launch of one round (SPLIT = 1).
FEW = 96, 112, 128
TOKENS = {2: (*FEW, *range(136, 257, 8)), 3: (*FEW, *range(136, 193, 8))}
MOST_OF_THREE = 176
COARSE = 32  # of heights in the closed set: six, and three for three warpgroups
WHOLE = 16  # tokens of a store: others end with half a store, which costs time in each round
BOX_NS = 0.68  # of a warpgroup's token in a box, on an H200: 62 tiles within 6 % (rms, NOTES.md)
ROUND_NS, HALF_NS = 1200, 600  # for a round of a warpgroup; more for a round with half stores
CUT_NS = 5000  # for adding up partial sums, and the rounds they end

Tiling = tuple[int, int, int, int]
"""Tokens of a tile, tiles of W ahead, warpgroups of a CTA; 1 if all tiles are CTAs of one round."""


def likeliest(
    m: int, shape: tuple[int, int], itemsize: int, sms: int, *, closed: bool = False
) -> list[Tiling]:
    """Return likely tilings for m tokens, the likeliest first; none up to FEW_TOKENS.

    shape   n and k, with `itemsize` bytes per element; W counts as if all of it were 2:4
    closed  all tilings whose heights are multiples of COARSE: few kernels for all numbers of tokens
    """
    if m <= FEW_TOKENS:
        return []
    n, boxes = shape[0], ceil(shape[1] * itemsize / ROW_BYTES)
    listed: dict[Tiling, float] = {}
    for warpgroups, every in TOKENS.items():
        heights = tuple(t for t in every if not closed or t % COARSE == 0)
        predicted: dict[Tiling, float] = {}
        tiles = range(ceil(m / heights[-1]), ceil(m / heights[0]) + 1)
        for shares, step in product(tiles, (1, WHOLE)):
            tokens = next(t for t in heights if t * shares >= m and t % step == 0)
            rounds = ceil(n / (ROWS * warpgroups)) * ceil(m / tokens) / sms
            once = rounds <= 1 and warpgroups == 3
            if warpgroups == 3 and tokens > MOST_OF_THREE and not once:
                continue
            item = boxes * warpgroups * tokens * BOX_NS
            whole, cut = ceil(rounds) * item, rounds * item + CUT_NS
            round_ns = warpgroups * ROUND_NS + (HALF_NS if tokens % WHOLE and not once else 0)
            tiling = (tokens, 8, warpgroups, 1) if once else (tokens, 4, warpgroups, 0)
            predicted[tiling] = min(whole, cut) + ceil(rounds) * round_ns
        ranked = sorted(predicted, key=predicted.__getitem__)
        listed |= {t: predicted[t] for t in (ranked if closed else ranked[:MOST])}
    return sorted(listed, key=listed.__getitem__)
