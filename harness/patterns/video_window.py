"""Attention: the frames, rows and columns of a video around a query (STA, arXiv:2502.04507).

Tokens are in cubes of 4 x 4 x 4, cube by cube, so that a block of 64 tokens is near one cube; cubes
at the end of a side are cut off. A block's place is the mean of its tokens. The window has the
proportions of the video, and the level determines its size. A problem's field `video` gives the
frames, rows and columns. Without it, the tokens form a video with one frame and one row.
"""

import torch
from torch import Tensor

from sparsebench.harness.inputs.grid import Stack
from sparsebench.harness.patterns._attention import by_rank

CUBE = 4
FINE = 2**20  # steps into which a side of the video is divided


def rank(stack: Stack, scores: Tensor) -> Tensor:
    """Rank blocks by their distance along the side on which they are furthest apart."""
    q, k = (places(stack, side) for side in (0, 1))
    return (q[:, None] - k).abs().amax(-1)


def places(stack: Stack, side: int) -> Tensor:
    """Return the mean place of each block's tokens, int64 [blocks, 3] as a part of FINE."""
    tokens, block = stack.tokens[side], stack.block[side]
    video = stack.video or (1, 1, tokens)
    at = torch.cartesian_prod(*(torch.arange(size) for size in video)).view(-1, 3)
    cubes, inside = at // CUBE, at % CUBE
    key = torch.zeros(len(at), dtype=torch.int64)
    for part, base in ((cubes, 1 << 16), (inside, CUBE)):
        for axis in range(3):
            key = key * base + part[:, axis]
    at = (2 * at[key.argsort(stable=True)] + 1) * FINE // (2 * torch.tensor(video))
    rows = torch.arange(tokens) // block
    sums = torch.zeros(-(-tokens // block), 3, dtype=torch.int64).index_add_(0, rows, at)
    return sums // torch.bincount(rows)[:, None]


PATTERN = by_rank(rank)
