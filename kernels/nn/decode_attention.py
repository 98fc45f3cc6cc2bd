"""Decoding attention over pages of a cache, of which each KV head selects a few.

    summarize_pages(bounds, k_pages, table, lengths, appended=1)     after keys were appended
    o = sparsebench.decode_attention(q, k_pages, v_pages, table, lengths, bounds, keep=32)

kernels/attention has the kernels: _summaries.py, _page_scores.py and _paged.py, and a reference for
a CPU, _paged_in_torch.py. Nothing waits for the device, and memory depends on the sizes alone, so a
captured graph replays with other lengths, tables and keys.
"""

from typing import Any

import torch
from torch import Tensor
from triton import knobs

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import ALIGNMENT, aligned, is_traced
from sparsebench.kernels._kernel import NAMES, refuse
from sparsebench.kernels.attention._page_scores import select_pages
from sparsebench.kernels.attention._paged import PAGE_SIZES, Pool, attend, unsupported_pool
from sparsebench.kernels.attention._paged_in_torch import attend_in_torch, summarize_in_torch
from sparsebench.kernels.attention._selecting import MOST_BLOCKS
from sparsebench.kernels.attention._summaries import summarize

DTYPES = "fp16", "bf16", "fp32"
MOST_GROUP = 64  # query heads of a KV head: the rows of a tile


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    summaries: Tensor | None,
    numbers: list[int],
    scale: float,
) -> Tensor:
    """Return O; `numbers` are the pages to keep, and how many first and last ones in any case."""
    if _in_torch(k):
        keep, first, last = numbers
        pool = Pool(q, k, v, table, lengths)
        with torch.autocast("cpu", enabled=False):  # the products are in fp32
            return attend_in_torch(pool, summaries, keep, first, last, scale)
    refuse(unsupported_pool(k.dtype, k.shape[3], k.device))
    pool = Pool(aligned(q), k, v, table, lengths)
    columns = None if summaries is None else select_pages(pool, summaries, *numbers)
    return attend(pool, columns, scale)


def _write_summaries(
    summaries: Tensor, k: Tensor, table: Tensor, lengths: Tensor, appended: int
) -> None:
    write = summarize_in_torch if _in_torch(k) else summarize
    write(summaries, k, table, lengths, appended)


def _in_torch(k: Tensor) -> bool:
    return k.device.type == "cpu" and not knobs.runtime.interpret


_operator = torch_operator("decode_attention", _decode, lambda q, *_: torch.empty_like(q))
_summarize = torch.library.custom_op(
    "sparsebench::summarize_pages", _write_summaries, mutates_args=("summaries",)
)
_summarize.register_fake(lambda *_: None)


def decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    summaries: Tensor | None = None,
    *,
    keep: int | None = None,
    first: int = 1,
    last: int = 1,
    scale: float | None = None,
) -> Tensor:
    """Return the attention of one query of each sequence over pages of its cache, shaped like q.

    q                 [sequences, H, D], contiguous; fp16, bf16 or fp32
    k_pages, v_pages  the pool, [pages, page_size, H_kv, D], of 16, 32, 64 or 128 keys a page. Both
                      have the same strides, in any order, and D is contiguous; H_kv divides H
    table             int32 [sequences, capacity]: the pages of each sequence, in their order
    lengths           int32 [sequences]: keys of each sequence, up to capacity * page_size
    summaries         of the pool's pages, by `summarize_pages`; without them, a query attends to
                      all pages
    keep              pages of a sequence and KV head, `first` and `last` included; needs summaries
    first, last       pages that are kept in any case: those at the start (attention sinks) and at
                      the end of a sequence (its newest keys)
    scale             factor of the scores, above 0; by default D ** -0.5

    The query heads of a KV head select together. The score of a page is the largest of theirs: the
    product of q with the page's mean key, or the largest product that its bounds allow. If scores
    are equal, the earlier page is selected. A page whose score is NaN or -inf is selected only as
    one of the first or the last. A page is absent if its entry in the table is outside of the pool:
    it is never read, selected or attended to, but counts as one of the first or the last. The
    output is 0 if a sequence has no key, or if all its pages are absent. A length below 0 means 0,
    and one beyond the table means all its pages.

    Lengths, tables, summaries and pages are read on the device. Calls of the same sizes must run
    one after the other, as on one stream. There is no gradient. Raises Unsupported.
    """
    _require_pool(k_pages, table, lengths, summaries)
    (_, _, kv_heads, head_dim), shape = k_pages.shape, [*q.shape]
    groups = [n for n in shape[1:2] if n % kv_heads == 0 and n <= MOST_GROUP * kv_heads]
    expected = f"a multiple of {kv_heads} KV heads, up to {MOST_GROUP} times as many"
    _require(q.dim() == 3 and bool(groups), f"q [sequences, H, D] with H {expected}", shape)
    _require_tensor("q", q, [len(table), *groups, head_dim], k_pages.dtype, k_pages)
    _require_tensor("v_pages", v_pages, [*k_pages.shape], k_pages.dtype, k_pages)
    strides = v_pages.stride()
    _require(strides == k_pages.stride(), f"v_pages with strides {k_pages.stride()}", strides)
    both = (summaries is None) == (keep is None)
    _require(both, "both summaries and keep, or neither", "one of them")
    whole = all(type(n) is int and n >= 0 for n in (first, last, keep or 0))
    few = keep is None or (whole and keep >= max(1, first + last))
    expected = "keep, first and last as whole numbers, and keep at least 1 and first + last"
    _require(whole and few, expected, (keep, first, last))  # torch.compile formats no symbol
    count = table.shape[1]
    _require(keep is None or count <= MOST_BLOCKS, f"at most {MOST_BLOCKS} pages a row", count)
    factor = head_dim**-0.5 if scale is None else float(scale)
    _require(0 < factor < torch.inf, "a scale above 0, and finite", scale)
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_pages, v_pages))
    _require(not gradient, "torch.no_grad() or operands without a gradient", "a gradient")
    if not q.numel() or not table.shape[1] or not len(k_pages):
        return torch.zeros_like(q)
    run: Any = _operator if is_traced() else _decode
    numbers = [keep or 0, first, last]
    o: Tensor = run(q, k_pages, v_pages, table, lengths, summaries, numbers, factor)
    return o


def summarize_pages(
    summaries: Tensor,
    k_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    appended: int | None = None,
) -> None:
    """Write the summaries of pages from their keys, in place.

    summaries  in the dtype of the keys: [pages, H_kv, 2, D] for the least and the greatest key of
               each channel, or [pages, H_kv, 1, D] for the mean key
    appended   the most keys that were appended to a sequence: only the pages that may hold them are
               summarized, as many in each sequence. Without it, all pages of the tables are

    Other arguments are those of `decode_attention`. The summary of the last page of a sequence
    covers the keys that it has. Entries outside of the pool are skipped. Raises Unsupported.
    """
    _require_pool(k_pages, table, lengths, summaries)
    whole = appended is None or (type(appended) is int and appended > 0)
    _require(whole, "appended as a whole number from 1 on", appended)
    if table.numel() and k_pages.numel():
        most = table.shape[1] * k_pages.shape[1]
        run: Any = _summarize if is_traced() else _write_summaries
        run(summaries, k_pages, table, lengths, most if appended is None else appended)


def _require_pool(k: Tensor, table: Tensor, lengths: Tensor, summaries: Tensor | None) -> None:
    """Raise Unsupported unless the pool, its tables and its summaries fit each other."""
    layout = f"{k.dtype} {list(k.shape)} with strides {list(k.stride())}"
    dtypes, sizes = ", ".join(DTYPES), ", ".join(map(str, PAGE_SIZES))
    expected = f"k_pages [pages, page_size, H_kv, D] in {dtypes}, with a page_size of {sizes}"
    fits = k.dim() == 4 and k.shape[1] in PAGE_SIZES and NAMES.get(k.dtype) in DTYPES
    fits = fits and 0 not in k.shape[2:]
    _require(fits, expected, layout)
    row = ALIGNMENT // k.element_size()
    fits = k.stride(3) == 1 and not any(step % row for step in k.stride()[:3])
    fits = fits and k.stride(1) * k.shape[1] < 2**31
    expected = f"k_pages with D contiguous, and keys, heads and pages at {ALIGNMENT} bytes"
    _require(fits, expected, layout)
    _require(table.dim() == 2, "a table [sequences, capacity]", list(table.shape))
    _require_tensor("table", table, [*table.shape], torch.int32, k)
    _require_tensor("lengths", lengths, [len(table)], torch.int32, k)
    if summaries is not None:
        kinds = 1 if summaries.dim() == 4 and summaries.shape[2] == 1 else 2
        size = [len(k), k.shape[2], kinds, k.shape[3]]
        _require_tensor("summaries", summaries, size, k.dtype, k)
        _require(summaries.is_contiguous(), "contiguous summaries", list(summaries.stride()))


def _require_tensor(name: str, x: Tensor, size: list[int], dtype: torch.dtype, k: Tensor) -> None:
    """Raise Unsupported unless a tensor has a size and dtype, on the device of the keys."""
    fits = ([*x.shape], x.dtype, x.device) == (size, dtype, k.device)
    actual = f"{x.dtype} {list(x.shape)} on {x.device}"
    _require(fits, f"{name} {dtype} {size} on {k.device}", actual)
    fits = x.shape[-1] < 2 or x.stride(-1) == 1
    _require(fits, f"{name} with a contiguous last dimension", f"strides {list(x.stride())}")


def _require(fits: bool, expected: str, actual: object) -> None:
    """Raise Unsupported unless an argument fits."""
    if not fits:
        raise Unsupported(f"pages of keys: expected {expected}; found {actual}")
