"""Summaries of pages of keys: what a decoding step reads of the pages that it does not select.

    keys of a page and a KV head [page_size, D]  ──>  least, greatest  [2, D]    bounds
                                                 ──>  mean             [1, D]

The summary of a page that is partly filled covers the keys that it has. A NaN among them makes the
summary of its channel NaN, so that the page's score does not select it.
"""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.triton import BoundKernel, Template
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.attention._paged import (
    BOUND,
    WARPS,
    PagedShape,
    Pool,
    enqueue,
    unsupported_pool,
)


def summarize(summaries: Tensor, k: Tensor, table: Tensor, lengths: Tensor, appended: int) -> None:
    """Write the summaries of the pages that hold the last `appended` keys of each sequence.

    summaries  [pages, H_kv, 2, D]: bounds; [pages, H_kv, 1, D]: means
    appended   at least 1; without effect beyond the capacity of the table

    Other operands are those of a Pool (_paged.py). Raises Unsupported.
    """
    refuse(unsupported_pool(k.dtype, k.shape[3], k.device))
    shape = Pool(k[:, 0], k, k, table, lengths).shape
    touched = min(-(-(appended - 1) // k.shape[1]) + 1, shape.capacity)  # they may cross an edge
    enqueue(_launch(shape, summaries.shape[2], touched), k, table, lengths, summaries)


@lru_cache(BOUND)
def _launch(shape: PagedShape, kinds: int, touched: int) -> Template:
    """Return the launch of `summarize`, which is bound once on each device."""
    _, k, _, table, lengths = Pool.without_data(shape)
    out = k.new_empty(shape.pages, shape.kv_heads, kinds, shape.head_dim)
    operands = k, table, lengths, out
    sizes = *shape.strides, shape.pages, shape.capacity, shape.kv_heads, shape.row, touched
    constants = {"PAGE": shape.page_size, "KINDS": kinds, "num_warps": WARPS}
    constants |= {"D": shape.head_dim, "DEPTH": shape.tile["DEPTH"]}
    grid = (shape.rows * touched,)
    program = BoundKernel(_summarize, grid, (*operands, *sizes), constants, out)
    return Template([program], operands, [out])


@triton.jit  # type: ignore[untyped-decorator]
def _summarize(  # type: ignore[no-untyped-def]
    k, table, lengths, out,
    page_stride, key_stride, head_stride, pages, capacity, kv_heads, table_row, touched,
    PAGE: tl.constexpr, KINDS: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write the summary of one page, counted from a sequence's last one, and KV head."""
    head, rest = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    sequence, back = rest // touched, rest % touched
    length = tl.minimum(tl.maximum(tl.load(lengths + sequence), 0), capacity * PAGE)
    column = tl.cdiv(length, PAGE) - 1 - back
    page = tl.load(table + sequence.to(tl.int64) * table_row + column, column >= 0, -1)
    if (page >= 0) & (page < pages):
        inside, depth = tl.arange(0, PAGE), tl.arange(0, DEPTH)
        filled = tl.minimum(length - column * PAGE, PAGE)
        line = page.to(tl.int64) * page_stride + head.to(tl.int64) * head_stride
        at = line + inside[:, None].to(tl.int64) * key_stride + depth[None, :]
        some = (inside < filled)[:, None] & (depth < D)[None, :]
        keys = tl.load(k + at, some, 0.0).to(tl.float32)
        to = out + (page.to(tl.int64) * kv_heads + head) * (KINDS * D) + depth
        if KINDS == 1:
            tl.store(to, (tl.sum(keys, 0) / filled).to(out.dtype.element_ty), depth < D)
        else:
            real = some & (keys == keys)  # tl.min and tl.max would drop a NaN
            broken = tl.sum((keys != keys).to(tl.int32), 0) > 0
            least = tl.min(tl.where(real, keys, float("inf")), 0)
            greatest = tl.max(tl.where(real, keys, -float("inf")), 0)
            least = tl.where(broken, float("nan"), least)
            greatest = tl.where(broken, float("nan"), greatest)
            tl.store(to, least.to(out.dtype.element_ty), depth < D)
            tl.store(to + D, greatest.to(out.dtype.element_ty), depth < D)
