"""Decoding over pages in torch, as a reference: what a CPU runs (_paged.py, _summaries.py)."""

import torch
from torch import Tensor

from sparsebench.formats._selection import Selection, select_in_torch
from sparsebench.kernels.attention._paged import Pool


def attend_in_torch(
    pool: Pool, summaries: Tensor | None, keep: int, first: int, last: int, scale: float
) -> Tensor:
    """Return O [sequences, H, D] over the pages that each KV head selects, or over all."""
    sequences, capacity = pool.table.shape
    _, page_size, kv_heads, d = pool.k.shape
    q = pool.q.view(sequences, kv_heads, -1, d).float()
    pages, present = _pages(pool.table, pool.k)
    lengths = pool.lengths.clamp(0, capacity * page_size)[:, None]
    place, count = torch.arange(capacity), -(-lengths // page_size)
    present = (present & (place < count))[:, None].expand(-1, kv_heads, -1)
    if summaries is not None:
        products = torch.einsum("nhgd,nphkd->nhgpkd", q, summaries[pages].float())
        scores = products.amax(4).sum(4).amax(2)  # [sequences, H_kv, capacity]
        always = ((place < first) | (place >= count - last))[:, None]
        scores = scores.masked_fill(always, torch.inf).masked_fill(~present, -torch.inf)
        grid, most = (1, capacity), min(keep, capacity)
        sizes = Selection(sequences * kv_heads, grid, (1, 1), False, most).sizes
        columns = select_in_torch(scores.flatten(0, 1), sizes)[1].view(-1, most, 1)
        present = present & (columns == place).any(1).view_as(present)
    key = torch.arange(capacity * page_size)
    seen = present.repeat_interleave(page_size, 2) & (key < lengths)[:, None]
    k, v = (x[pages].flatten(1, 2).transpose(1, 2).float() for x in (pool.k, pool.v))
    k, v = (x.masked_fill(~seen[..., None], 0) for x in (k, v))  # [sequences, H_kv, keys, D]
    weights = (q @ k.mT * scale).masked_fill(~seen[:, :, None], -torch.inf).softmax(-1)
    empty = ~seen.any(-1)[..., None, None]
    return (weights.masked_fill(empty, 0) @ v).reshape(pool.q.shape).to(pool.q.dtype)


def summarize_in_torch(
    summaries: Tensor, k: Tensor, table: Tensor, lengths: Tensor, appended: int
) -> None:
    """Write the summaries of the pages that hold the last `appended` keys of each sequence."""
    capacity, page_size = table.shape[1], k.shape[1]
    touched = min(-(-(appended - 1) // page_size) + 1, capacity)
    lengths = lengths.clamp(0, capacity * page_size)[:, None]
    columns = -(-lengths // page_size) - 1 - torch.arange(touched)
    pages, present = _pages(table.gather(1, columns.clamp(min=0)), k)
    present = present & (columns >= 0)
    filled = (lengths - columns * page_size).clamp(max=page_size)[present]
    keys = k[pages[present]].float()  # [pages, page_size, H_kv, D]
    some = (torch.arange(page_size) < filled[:, None])[..., None, None]
    if summaries.shape[2] == 1:
        parts = [keys.masked_fill(~some, 0).sum(1) / filled[:, None, None]]
    else:
        least = keys.masked_fill(~some, torch.inf).amin(1)
        parts = [least, keys.masked_fill(~some, -torch.inf).amax(1)]
    summaries[pages[present]] = torch.stack(parts, 2).to(summaries.dtype)


def _pages(table: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pages of a table, 0 for those that are absent, and which are present."""
    present = (table >= 0) & (table < len(k))
    return table.long().masked_fill(~present, 0), present
