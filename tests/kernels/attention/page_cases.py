"""A cache of pages with its queries, the pages that are selected, and attention to them in fp64."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsebench import summarize_pages
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.attention._paged import Pool
from tests.kernels.attention.cases import DEVICE

TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 1e-2}
BOUNDS, MEANS = 2, 1


@dataclass
class Cache:
    """A pool of pages, the table and lengths of some sequences, and their queries."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    summaries: Tensor

    @property
    def operands(self) -> Pool:
        return Pool(self.q, self.k, self.v, self.table, self.lengths)

    def refill(self, lengths: list[int], seed: int) -> None:
        """Draw other pages, keys, queries and lengths, in the same memory."""
        draw = torch.Generator().manual_seed(seed)
        for x in (self.q, self.k, self.v):
            x.copy_(torch.randn(x.shape, generator=draw).to(x.dtype))
        pages, capacity = len(self.k), self.table.shape[1]
        order = torch.randperm(pages, generator=draw)[: len(self.table) * capacity]
        self.table.copy_(order.view(-1, capacity))
        self.lengths.copy_(torch.tensor(lengths))
        at, page = torch.arange(capacity * self.k.shape[1]), self.k.shape[1]
        for row, length in zip(self.table.long(), lengths, strict=True):
            rest = at[max(length, 0) :].to(DEVICE)  # memory that no key was written to
            for x in (self.k, self.v):
                x[row[rest // page], rest % page] = torch.nan
        self.summaries.fill_(7)
        summarize_pages(self.summaries, self.k, self.table, self.lengths)


def cache(
    lengths: list[int],
    *,
    page: int = 16,
    heads: tuple[int, int] = (4, 2),
    d: int = 32,
    dtype: str = "fp32",
    kinds: int = BOUNDS,
    capacity: int = 6,
    seed: int = 0,
    by_head: bool = False,
) -> Cache:
    """Return a cache with two pages more than sequences can have."""
    pages = len(lengths) * capacity + 2
    size = (pages, heads[1], page, d) if by_head else (pages, page, heads[1], d)
    options: Any = {"dtype": DTYPES[dtype], "device": DEVICE}
    k, v = (torch.empty(size, **options) for _ in range(2))
    if by_head:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    q = torch.empty(len(lengths), heads[0], d, **options)
    table = torch.empty(len(lengths), capacity, dtype=torch.int32, device=DEVICE)
    summaries = torch.empty(pages, heads[1], kinds, d, **options)
    result = Cache(q, k, v, table, table.new_empty(len(lengths)), summaries)
    result.refill(lengths, seed)
    return result


def places_of(c: Cache, keep: int | None, first: int = 1, last: int = 1) -> list[list[list[int]]]:
    """Return the places of the table that each sequence and KV head attends to."""
    page, kv_heads, result = c.k.shape[1], c.k.shape[2], []
    q, summaries = (x.double().cpu() for x in (c.q, c.summaries))
    for n, length in enumerate(c.lengths.tolist()):
        count = min(-(-max(length, 0) // page), c.table.shape[1])
        pages = c.table[n, :count].long().cpu()
        present = ((pages >= 0) & (pages < len(c.k))).tolist()
        of_pages = summaries[pages.clamp(0, len(c.k) - 1)]
        result.append([])
        for head, group in enumerate(q[n].view(kv_heads, -1, q.shape[2])):
            products = group[:, None] * of_pages[:, None, head]  # [pages, group, kinds, D]
            scores = products.amax(2).sum(2).amax(1).tolist()
            forced = [keep is None or i < first or i >= count - last for i in range(count)]
            real = [i for i in range(count) if present[i] and (forced[i] or scores[i] > -math.inf)]
            order = sorted(real, key=lambda i: (not forced[i], -scores[i], i))
            result[-1].append(sorted(order[:keep]))
    return result


def reference(c: Cache, places: list[list[list[int]]]) -> Tensor:
    """Return O in fp64 over the pages in these places of the table."""
    page, kv_heads, d = c.k.shape[1:]
    k, v, q = (x.double().cpu() for x in (c.k, c.v, c.q))
    o = torch.zeros_like(q).view(len(q), kv_heads, -1, d)
    for n, lists in enumerate(places):
        for head, of_head in enumerate(lists):
            at = torch.tensor(of_head, dtype=torch.long)
            pages = c.table[n].long().cpu()[at]
            filled = ((at * page)[:, None] + torch.arange(page) < int(c.lengths[n])).flatten()
            keys, values = (x[pages][:, :, head].flatten(0, 1)[filled] for x in (k, v))
            scores = q[n].view(kv_heads, -1, d)[head] @ keys.T * d**-0.5
            if len(keys):
                o[n, head] = scores.softmax(-1) @ values
    return o.view(q.shape)


def assert_right(c: Cache, o: Tensor, places: list[list[list[int]]], dtype: str) -> None:
    right = reference(c, places)
    error = (o.double().cpu() - right).norm()
    assert error <= TOLERANCE[dtype] * right.norm(), (float(error), float(right.norm()))
