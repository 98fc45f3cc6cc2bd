"""Decoding with `config.sparse_select` over a static cache, whose keys are pages in one tensor.

    keys of a layer [batch, H_kv, L, D]    are the pool [batch * H_kv * L / page, page, 1, D]

So a KV head of a sequence decodes as a sequence of its own, and its table counts its pages. The
bounds of their keys stay with the tensor of the keys, as long as the cache lives; a compiled step
writes them in place. A whole prompt that runs uncompiled, as that of `generate` does, makes them,
and each call with `sparse_select` adds the keys that it appends. Keys that a call without it
appends are not in the bounds: take a new cache after such calls.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebench.kernels.attention._paged import PAGE_SIZES
from sparsebench.kernels.nn.decode_attention import decode_attention, summarize_pages

NAME = "_sparsebench_pages"  # the attribute of a tensor of keys
COUNTS = "keep", "first", "last"


class CachePages(NamedTuple):
    """The table [batch * H_kv, L / page] of a layer's keys, and the bounds [pages, 1, 2, D]."""

    table: Tensor
    bounds: Tensor


def make_pages(keys: Tensor, block: int) -> None:
    """Cut the keys of a static cache, [batch, H_kv, L, D], into pages of at most `block` keys.

    Without a size of pages that divides L, decoding attends to all keys.
    """
    batch, heads, length, d = keys.shape
    sizes = [n for n in PAGE_SIZES if length % n == 0 and n <= max(block, min(PAGE_SIZES))]
    if sizes and keys.is_contiguous() and pages_of(keys) is None:
        rows, capacity = batch * heads, length // max(sizes)
        table = torch.arange(rows * capacity, dtype=torch.int32, device=keys.device)
        pages = CachePages(table.view(rows, capacity), keys.new_empty(rows * capacity, 1, 2, d))
        for x in pages:
            torch._dynamo.mark_static_address(x)
        setattr(keys, NAME, tuple(pages))


def pages_of(keys: Tensor) -> CachePages | None:
    """Return the pages of keys that have some."""
    pages = getattr(keys, NAME, None)
    return None if pages is None else CachePages(*pages)


def append(pages: CachePages, keys: Tensor, lengths: Tensor, appended: int) -> None:
    """Add the last `appended` keys of each sequence, [batch] int32 `lengths`, to the bounds."""
    pool, of_heads = _pool(pages, keys), _by_head(lengths, keys)
    summarize_pages(pages.bounds, pool, pages.table, of_heads, appended=appended)


def decode(
    pages: CachePages,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    allowed: Tensor,
    selection: dict[str, Any],
    scale: float | None,
) -> Tensor:
    """Return O [batch, 1, H, D] of one query of each sequence, [batch, H, 1, D].

    allowed    bool [batch, L]: the first keys of each sequence. The output of a sequence in which
               other keys are allowed is NaN
    selection  keep, first and last, in blocks of `block` keys
    """
    k, v = _pool(pages, keys), _pool(pages, values)
    numbers = {name: -(-selection[name] * selection["block"] // k.shape[1]) for name in COUNTS}
    lengths = lengths_of(allowed)
    tables = pages.table, _by_head(lengths, keys), pages.bounds
    of_heads = q.reshape(len(pages.table), -1, q.shape[3])
    o = decode_attention(of_heads, k, v, *tables, scale=scale, **numbers).view(q.shape)
    first = torch.arange(allowed.shape[1], device=q.device) < lengths[:, None]
    right = (allowed == first).all(-1)[:, None, None, None]
    return torch.where(right, o, torch.nan).transpose(1, 2)


def lengths_of(allowed: Tensor) -> Tensor:
    """Return how many keys of each sequence are allowed, int32 [batch], of bool [batch, L]."""
    return allowed.sum(-1, dtype=torch.int32)


def _pool(pages: CachePages, x: Tensor) -> Tensor:
    return x.view(pages.table.numel(), -1, 1, x.shape[3])


def _by_head(lengths: Tensor, keys: Tensor) -> Tensor:
    return lengths[:, None].expand(*keys.shape[:2]).contiguous().view(-1)
