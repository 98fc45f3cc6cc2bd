"""Score the pages of a cache for each KV head, by summaries of their keys, and select the best.

    score    of a page and a KV head: the largest of its query heads' q . mean. With bounds, it is
             what no key of the page exceeds in a product with q:

                 sum over channels of max(q least, q greatest) = min(q, 0) . least
                                                               + max(q, 0) . greatest

             so tensor cores score a page by two products
    inf      the first and the last pages of a sequence, which are kept in any case
    -inf     pages that it does not have, or that are absent; their summaries are not read
    select   the highest scores, by the kernel of _selecting.py

Source: Quest (Tang et al. 2024) for bounds. There, each query head selects for itself.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from sparsebench.formats._selection import Selection
from sparsebench.kernels._common.triton import SMALLEST_TILE, BoundKernel, Template, options
from sparsebench.kernels.attention._paged import (
    BOUND,
    WARPS,
    PagedShape,
    Pool,
    enqueue,
    queries_of,
    starts_early,
)
from sparsebench.kernels.attention._selecting import select

SCORED_BYTES = 32 * 1024  # summaries that a program reads at once
HIGHEST = tl.constexpr(3e38)  # below the score of a page that is kept in any case


def select_pages(pool: Pool, summaries: Tensor, most: int, first: int, last: int) -> Tensor:
    """Return the places in the table of `most` pages for each sequence and KV head, ascending.

    summaries    [pages, H_kv, 2, D]: bounds; [pages, H_kv, 1, D]: means
    first, last  pages that are kept in any case; both count in `most`

    A place that no page takes has bit 31. Raises Unsupported.
    """
    shape, scores = pool.shape, scores_of(pool, summaries, first, last)
    grid, most = (1, shape.capacity), min(most, shape.capacity)
    return select(scores, Selection(shape.rows, grid, (1, 1), False, most).sizes)[1]


def scores_of(pool: Pool, summaries: Tensor, first: int, last: int) -> Tensor:
    """Return the score of each page, fp32 [sequences * H_kv, capacity]."""
    launch = _launch(pool.shape, summaries.shape[2], first, last)
    return enqueue(launch, pool.q, pool.table, pool.lengths, summaries)


@lru_cache(BOUND)
def _launch(shape: PagedShape, kinds: int, first: int, last: int) -> Template:
    """Return the launch of `scores_of`, which is bound once on each device."""
    q, _, _, table, lengths = Pool.without_data(shape)
    summaries = q.new_empty(shape.pages, shape.kv_heads, kinds, shape.head_dim)
    scores = q.new_empty(shape.rows, shape.capacity, dtype=torch.float32)
    row = kinds * shape.tile["DEPTH"] * shape.dtype.itemsize
    block = max(SMALLEST_TILE, min(64, SCORED_BYTES // row))
    operands = q, table, lengths, summaries
    sizes = shape.pages, shape.capacity, shape.kv_heads, shape.row, first, last
    constants = {**shape.tile, "PAGE": shape.page_size, "KINDS": kinds, "BLOCK": block}
    constants |= options(WARPS, "pointers")
    constants["EARLY"] = constants["launch_pdl"] = starts_early(shape.device)
    grid = (shape.rows * -(-shape.capacity // block),)
    program = BoundKernel(_score, grid, (*operands, scores, *sizes), constants, scores)
    return Template([program], operands, [scores])


@triton.jit  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def]
    q, table, lengths, summaries, scores,
    pages, capacity, kv_heads, table_row, first, last,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr,
    PAGE: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write the scores of BLOCK places of a row; programs of the same pages are neighbours."""
    if EARLY:
        gdc_wait()
    head, rest = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    blocks = tl.cdiv(capacity, BLOCK)
    sequence, place = rest // blocks, rest % blocks * BLOCK + tl.arange(0, BLOCK)
    length = tl.minimum(tl.maximum(tl.load(lengths + sequence), 0), capacity * PAGE)
    count = tl.cdiv(length, PAGE)
    page = tl.load(table + sequence.to(tl.int64) * table_row + place, place < count, -1)
    present = (page >= 0) & (page < pages)

    tile, _, _ = queries_of(q, sequence, head, kv_heads, GROUP, ROWS, D, DEPTH)
    depth = tl.arange(0, DEPTH)[None, :]
    at = summaries + (page.to(tl.int64) * kv_heads + head)[:, None] * (KINDS * D) + depth
    stored = present[:, None] & (depth < D)
    near = tl.load(at, stored, 0.0)
    if KINDS == 1:
        products = tl.dot(tile, near.T, input_precision="ieee")
    else:
        far = tl.load(at + D, stored, 0.0)
        falling = tl.minimum(tile, 0.0).to(tile.dtype)
        rising = tl.maximum(tile, 0.0).to(tile.dtype)
        products = tl.dot(falling, near.T, input_precision="ieee")
        products = tl.dot(rising, far.T, products, input_precision="ieee")

    real = tl.arange(0, ROWS)[:, None] < GROUP
    broken = products != products  # tl.max would drop a NaN
    score = tl.max(tl.where(real & (broken == 0), products, -float("inf")), 0)
    score = tl.where(tl.sum((real & broken).to(tl.int32), 0) > 0, float("nan"), score)
    score = tl.where(score == float("inf"), HIGHEST, score)
    score = tl.where((place < first) | (place >= count - last), float("inf"), score)
    score = tl.where(present, score, -float("inf"))
    row = (sequence * kv_heads + head).to(tl.int64) * capacity
    tl.store(scores + row + place, score, place < capacity)
