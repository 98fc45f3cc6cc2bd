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

from math import ceil

from sparsebench.formats.spense import ROW_BYTES, ROWS

FEW_TOKENS = 128  # up to as many, one tile holds them (spense_wgmma.configurations)
MOST = 4
# Tokens of a tile, by warpgroups. Three have stages in flight for more than 176 tokens only in a
# launch of one round (SPLIT = 1), and beyond 192 only the two heights that are two instructions.
TOKENS = {
    2: (96, 112, 128, *range(136, 257, 8)),
    3: (96, 112, 128, *range(136, 193, 8), 208, 224),
}
MOST_OF_THREE = 176
BOX_NS = 0.68  # of a warpgroup's token in a box, on an H200: 62 tiles within 5 % (rms, NOTES.md)
ROUND_NS = 1200  # for a round of a warpgroup
CUT_NS = 7000  # for adding up partial sums, and the rounds they end

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
    for warpgroups, heights in TOKENS.items():
        for shares in range(ceil(m / heights[-1]), ceil(m / heights[0]) + 1):
            tokens = next(height for height in heights if height * shares >= m)
            rounds = ceil(n / (ROWS * warpgroups)) * ceil(m / tokens) / sms
            once = rounds <= 1 and warpgroups == 3
            if warpgroups == 3 and tokens > MOST_OF_THREE and not once:
                continue
            item = boxes * warpgroups * tokens * BOX_NS
            whole, cut = ceil(rounds) * item, rounds * item + CUT_NS
            tiling = (tokens, 8, warpgroups, 1) if once else (tokens, 4, warpgroups, 0)
            predicted[tiling] = min(whole, cut) + ceil(rounds) * warpgroups * ROUND_NS
    return sorted(predicted, key=predicted.__getitem__)[:MOST]
