"""Lift X for a slide weight, in Triton: X' [m, k'] = X[:, columns] (formats/slide.py).

    program    writes 16 tokens x 256 columns of X', which it reads from X
    bytes      6:8: X is read once, and 1.5 times as many bytes are written

Windows start at even columns, so the kernel copies pairs of elements: 4 bytes of 16 bits, 2 bytes
of 8 bits. Columns of X' that no column of X has are zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats.slide import BLOCK_BYTES, WINDOW, Slide, starts_of
from sparsebench.kernels._common.triton import BoundKernel

TOKENS, PAIRS = 16, 128  # tokens and pairs of a program
OF_PAIRS = {1: torch.int16, 2: torch.int32}  # by the bytes of an element


def lifting(x: Tensor, w: Slide) -> BoundKernel:
    """Return the kernel that writes X' of X [m, k]; k is even, and rows start at even elements."""
    (m, k), out = x.shape, x.new_empty(x.shape[0], w.lifted.shape[1])
    starts = starts_of(w.nonzeros, w.group)
    kind = OF_PAIRS[x.itemsize]
    pairs, written = x.view(kind), out.view(kind)
    tokens = min(TOKENS, triton.next_power_of_2(m))
    grid = triton.cdiv(m, tokens), triton.cdiv(written.shape[1], PAIRS)
    constants = {
        "TOKENS": tokens,
        "PAIRS": PAIRS,
        "GROUP": w.group // 2,
        "GROUPS": BLOCK_BYTES // x.itemsize,
        "EVEN": (len(starts) + 1) // 2 * WINDOW // 2,
        "ODD": len(starts) // 2 * WINDOW // 2,
        "SHIFT": starts[-1] // 2 if len(starts) == 2 else 1,
    }
    sizes = m, k // 2, written.shape[1], pairs.stride(0)
    return BoundKernel(_lift, grid, (pairs, written, *sizes), constants, out)


@triton.jit  # type: ignore[untyped-decorator]
def _lift(  # type: ignore[no-untyped-def]
    x,
    out,
    m,
    k,
    width,
    stride,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUP: tl.constexpr,  # pairs of a group
    GROUPS: tl.constexpr,  # of a block
    EVEN: tl.constexpr,  # pairs of the even windows of a group, and of the odd ones
    ODD: tl.constexpr,
    SHIFT: tl.constexpr,  # pairs before the first odd window
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    block, place = pair // (GROUPS * (EVEN + ODD)), pair % (GROUPS * (EVEN + ODD))
    odd = place - GROUPS * EVEN
    even_source = place // EVEN * GROUP + place % EVEN
    odd_source = odd // max(ODD, 1) * GROUP + odd % max(ODD, 1) + SHIFT
    source = block * GROUPS * GROUP + tl.where(odd < 0, even_source, odd_source)
    source, pair = source[None, :], pair[None, :]
    value = tl.load(x + token * stride + source, (token < m) & (source < k), 0)
    tl.store(out + token * width + pair, value, (token < m) & (pair < width))
