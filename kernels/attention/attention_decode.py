"""Decoding attention whose pages are selected in every launch (sparsebench.decode_attention).

    selects   bounds   scores by the bounds of all pages, the pages, attention
              means    scores by their means,             the pages, attention
              lists                                                  attention

The difference between two of these rows is the time of a part. A contest compares outputs for one
mask, so the summaries of the pages that the mask leaves out are NaN, which is never selected. Every
part then does its whole work and selects the mask's pages, whatever the values of Q and K. The
summaries are made before the launch is timed, as those of a cache are. No page is kept in any case.

Bound: rows have that of attention, without the bytes of the summaries. NOTES.md adds them.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._kernel import Kernel, Launch, Operands, refuse
from sparsebench.kernels.attention._page_scores import select_pages
from sparsebench.kernels.attention._paged import attend, config_of
from sparsebench.kernels.attention._summaries import summarize
from sparsebench.kernels.attention.attention_paged import pool_of, unsupported

Summary = Literal["bounds", "means", "lists"]


def prepare(operands: Operands, *, selects: Summary = "bounds") -> Launch:
    """Summarize the pages, and bind the launches. Raises Unsupported."""
    ways, mask = get_args(Summary), operands.weights["mask"]
    expected = f"expected {', '.join(ways)}"
    refuse(None if selects in ways else f"selects: {expected}; found {selects!r}")
    assert isinstance(mask, BlockMask)
    refuse(unsupported(operands.problem, mask.columns.device))
    pool, scale = pool_of(operands)
    pages, _, kv_heads, head_dim = pool.k.shape
    refuse("expected a mask without bits, found bits" if mask.bits is not None else None)
    if mask.lists not in (1, kv_heads):
        refuse(f"expected one list or one for each of {kv_heads} KV heads, found {mask.lists}")

    keep, kinds = max(1, int(mask.counts.max())), 1 if selects == "means" else 2
    summaries = pool.k.new_empty(pages, kv_heads, kinds, head_dim)
    summarize(summaries, pool.k, pool.table, pool.lengths, pool.k[:, :, 0, 0].numel())
    present = mask.to_dense().view(mask.batch, mask.lists, -1).mT != 0
    summaries.masked_fill_(~present.reshape(pages, mask.lists, 1, 1), torch.nan)
    lists = select_pages(pool, summaries, keep, 0, 0) if selects == "lists" else None
    config = config_of(pool.shape, keep)

    def run() -> Tensor:
        columns = select_pages(pool, summaries, keep, 0, 0) if lists is None else lists
        return attend(pool, columns, scale, config).flatten(1)

    return Launch(run, choice={**config._asdict(), "selects": selects})


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
"""Selects pages, and attends to them."""
