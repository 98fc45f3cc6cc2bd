"""Attention of one query of each sequence over pages of keys: all of them, or those of a list.

    table [sequences, capacity]    pool of pages                  list of a KV head
    | 7 | 2 | 9 |   |              k, v [page, H_kv, D]           | 0 | 2 |   places in the table
      page of the pool             each page once

`splits` programs share the pages of a sequence and KV head, and the query heads of the KV head
share each load. A counter tells a program that it is the last: it adds up the parts in their order,
so the same operands give the same bits, and sets the counter to zero.

Lengths and tables are read on the device, and memory depends on the sizes alone. A page is absent
if its entry is outside of the pool: it is never read. A length counts up to the table's end.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from sparsebench.kernels._common.capture import make_lasting
from sparsebench.kernels._common.device import multiprocessors, shared_bytes_of
from sparsebench.kernels._common.transforms import ALIGNMENT
from sparsebench.kernels._common.triton import SMALLEST_TILE, BoundKernel, Template, options
from sparsebench.kernels._kernel import NAMES, refuse
from sparsebench.kernels.attention._shapes import LOG2_E, unsupported
from sparsebench.kernels.attention._tiles import add_step
from sparsebench.results.record import Problem

PAGE_SIZES = 16, 32, 64, 128  # keys of a page
BOUND = 256  # launches in a cache, one for each set of sizes
PROGRAMS = 3  # of `_attend` that an SM holds at once, by their shared memory
MOST_SPLITS = 32
WARPS, REGISTERS = 4, 168  # so that the registers of an SM hold PROGRAMS, too
EMPTY = tl.constexpr(-1)


class PagedShape(NamedTuple):
    """Sizes of a decoding step: all that its launches depend on.

    capacity   pages of a row of the table
    pages      of the pool
    page_size  keys of a page
    strides    of the pool's pages, keys and heads
    row        stride of the table's rows
    """

    sequences: int
    capacity: int
    heads: int
    kv_heads: int
    head_dim: int
    pages: int
    page_size: int
    strides: tuple[int, ...]
    row: int
    dtype: torch.dtype
    device: torch.device

    @property
    def rows(self) -> int:
        """Return how many lists there are: one of each sequence and KV head."""
        return self.sequences * self.kv_heads

    @property
    def tile(self) -> dict[str, int]:
        """Return the sides of the tile of queries, and what it holds: heads of a group, and D."""
        group = self.heads // self.kv_heads
        rows, depth = (
            triton.next_power_of_2(max(SMALLEST_TILE, n)) for n in (group, self.head_dim)
        )
        return {"GROUP": group, "ROWS": rows, "D": self.head_dim, "DEPTH": depth}


class Pool(NamedTuple):
    """The operands of a decoding step.

    q        [sequences, H, D]
    k, v     [pages, page_size, H_kv, D], with the same strides; that of D is 1
    table    int32 [sequences, capacity]
    lengths  int32 [sequences]
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor

    @property
    def shape(self) -> PagedShape:
        """Return the sizes."""
        k, pages, page_size = self.k, *self.k.shape[:2]
        sizes = *self.table.shape, self.q.shape[1], *k.shape[2:], pages, page_size
        strides = k.stride()[:3], self.table.stride(0)
        return PagedShape(*sizes, *strides, k.dtype, k.device)  # type: ignore[call-arg]

    @classmethod
    def without_data(cls, shape: PagedShape) -> "Pool":
        """Return operands of these sizes on "meta"."""
        size = shape.pages, shape.page_size, shape.kv_heads, shape.head_dim
        k, v = (
            torch.empty_strided(size, (*shape.strides, 1), dtype=shape.dtype, device="meta")
            for _ in range(2)
        )
        tables, strides = (shape.sequences, shape.capacity), (shape.row, 1)
        table = torch.empty_strided(tables, strides, dtype=torch.int32, device="meta")
        q = k.new_empty(shape.sequences, shape.heads, shape.head_dim)
        return cls(q, k, v, table, table.new_empty(shape.sequences))


class Config(NamedTuple):
    """How `_attend` runs: keys of a step, programs of a list, stages of the pipeline, and warps."""

    keys: int
    splits: int
    stages: int
    warps: int


def config_of(shape: PagedShape, pages: int) -> Config:
    """Return the configuration for lists of so many pages."""
    keys, itemsize = 16 if shape.dtype == torch.float32 else 64, shape.dtype.itemsize
    buffers, programs = 2 if shape.tile["DEPTH"] * itemsize <= 256 else 1, PROGRAMS  # of 32 KB
    stages, steps = buffers + 1, -(-pages * shape.page_size // keys)
    if shape.page_size % keys:  # Triton gives every other stage to the look-up of a step's pages
        small = shape.device.type == "cuda" and shared_bytes_of(shape.device) < 128 * 1024
        stages, programs = 2 * buffers + (1 if small else 3), programs - 1
    splits = max(1, programs * multiprocessors(shape.device) // shape.rows)
    queries = shape.tile["ROWS"] * shape.tile["DEPTH"] * itemsize
    warps = WARPS if queries < 16 * 1024 else 2 * WARPS  # so that none spills
    return Config(keys, min(splits, steps, MOST_SPLITS), stages, warps)


def attend(
    pool: Pool, columns: Tensor | None, scale: float, config: Config | None = None
) -> Tensor:
    """Return O [sequences, H, D] over the pages of a list for each KV head, or over all.

    columns  int32, the same number for each sequence and KV head: places in the table. Any other
             number is an empty place
    """
    shape = pool.shape
    places = shape.capacity if columns is None else len(columns) // shape.rows
    config = config or config_of(shape, places)
    launch = _launch(shape, places, columns is not None, scale, config)
    return enqueue(launch, *pool, *(() if columns is None else (columns,)))


def starts_early(device: torch.device) -> bool:
    """Return whether a launch may overlap the end of the one before (PTX griddepcontrol)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache(BOUND)
def unsupported_pool(dtype: torch.dtype, head_dim: int, device: torch.device) -> str | None:
    """Return why the kernels cannot read such keys here, or None."""
    fields: dict[str, Any] = {"dtype": NAMES[dtype], "head_dim": head_dim, "scale": None}
    return unsupported(Problem("attention", fields), device)


def enqueue(launch: Template, *operands: Tensor) -> Tensor:
    """Run a launch, and keep what it needs in a graph. Raises Unsupported."""
    if any(x.data_ptr() % ALIGNMENT for x in operands):
        refuse(f"expected tensors that start at multiples of {ALIGNMENT} bytes, found another")
    return launch.enqueue(*operands)[0]


@lru_cache(BOUND)
def _launch(shape: PagedShape, places: int, listed: bool, scale: float, config: Config) -> Template:
    """Return the launch of `attend`, bound once on each device; its calls must not overlap."""
    pool, rows, splits = Pool.without_data(shape), shape.rows, config.splits
    columns, o = pool.table.new_empty(rows * places), torch.empty_like(pool.q)
    of_group = rows, splits, shape.heads // shape.kv_heads
    sums = o.new_empty(2, *of_group, dtype=torch.float32)
    parts = sums.new_empty(*of_group, shape.tile["DEPTH"])
    counters = make_lasting(
        lambda: torch.zeros(rows, dtype=torch.int32, device=shape.device), shape.device
    )
    merge = (parts, *sums, counters) if splits > 1 else (None,) * 4
    sizes = *shape.strides, shape.pages, shape.capacity, places, shape.kv_heads, shape.row
    args = *pool, columns if listed else None, o, *merge, *sizes, scale * LOG2_E
    constants = {**shape.tile, "PAGE": shape.page_size, "KEYS": config.keys, "SPLITS": splits}
    constants |= {"STAGES": config.stages, **options(config.warps, "pointers")}
    if config.warps == WARPS and shape.page_size % config.keys == 0:
        constants["maxnreg"] = REGISTERS
    constants["EARLY"] = constants["launch_pdl"] = starts_early(shape.device)
    program = BoundKernel(_attend, (rows * splits,), args, constants, o)
    return Template([program], (*pool, columns) if listed else pool, [o])


@triton.jit  # type: ignore[untyped-decorator]
def queries_of(  # type: ignore[no-untyped-def]
    q, sequence, head, kv_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the queries of a KV head as a tile, their places, and which of them there are."""
    lane, depth = tl.arange(0, ROWS)[:, None], tl.arange(0, DEPTH)[None, :]
    place = ((sequence * kv_heads + head) * GROUP + lane) * D + depth
    stored = (lane < GROUP) & (depth < D)
    return tl.load(q + place, stored, 0.0), place, stored


@triton.jit  # type: ignore[untyped-decorator]
def _column_of(  # type: ignore[no-untyped-def]
    columns, step, count, PAGE: tl.constexpr, KEYS: tl.constexpr
):
    """Return the place in the table of each key of a step; a scalar if all have one.

    A loop carries it, unchanged, to its next step, as _tiles.py explains. Behind the list it is -1.
    """
    at = step * KEYS // PAGE
    if PAGE % KEYS != 0:
        at = (step * KEYS + tl.arange(0, KEYS)) // PAGE
    if columns is not None:
        column = tl.load(columns + at, at < count, EMPTY)
    else:
        column = tl.where(at < count, at, EMPTY)
    return column


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, table, lengths, columns, o, parts, tops, sums, counters,
    page_stride, key_stride, head_stride, pages, capacity, places, kv_heads, table_row, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    row, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    sequence, head = row // kv_heads, row % kv_heads
    length = tl.load(lengths + sequence)
    table += sequence.to(tl.int64) * table_row
    if columns is None:
        count = tl.cdiv(tl.minimum(tl.maximum(length, 0), capacity * PAGE), PAGE)
    else:
        count = places
        columns += row * places
    steps = tl.cdiv(count * PAGE, KEYS)
    first, end = split * steps // SPLITS, (split + 1) * steps // SPLITS
    column = _column_of(columns, first, count, PAGE, KEYS)
    tile, place, stored = queries_of(q, sequence, head, kv_heads, GROUP, ROWS, D, DEPTH)
    depth = tl.arange(0, DEPTH)[None, :]
    k += head.to(tl.int64) * head_stride
    v += head.to(tl.int64) * head_stride

    top = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for i in tl.range(first, end, num_stages=STAGES):
        inside = (i * KEYS + tl.arange(0, KEYS)) % PAGE
        page = tl.load(table + column, (column >= 0) & (column < capacity), -1)
        seen = (page >= 0) & (page < pages) & (column * PAGE + inside < length)
        from_page = page.to(tl.int64) * page_stride
        if PAGE % KEYS != 0:
            from_page = from_page[:, None]
        at, some = (inside * key_stride)[:, None] + depth, seen[:, None]
        if DEPTH != D:
            some = some & (depth < D)
        k_tile = tl.load(k + from_page + at, some, 0.0)
        v_tile = tl.load(v + from_page + at, some, 0.0)
        column = _column_of(columns, i + 1, count, PAGE, KEYS)
        scores = tl.dot(tile, k_tile.T, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        top, weight, total = add_step(scores, v_tile, 1.0, top, weight, total, True)

    complete = True
    if SPLITS > 1:
        lane = tl.arange(0, ROWS)
        real = lane < GROUP
        part = (row * SPLITS + split) * GROUP + lane
        tl.store(tops + part, top, real)
        tl.store(sums + part, weight, real)
        tl.store(parts + part[:, None] * DEPTH + depth, total, real[:, None])
        tl.debug_barrier()  # all threads have stored before one of them counts
        complete = tl.atomic_add(counters + row, 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
        if complete:
            tl.store(counters + row, 0)
            top = tl.full((ROWS,), -float("inf"), tl.float32)
            for each in tl.static_range(SPLITS):
                part = (row * SPLITS + each) * GROUP + lane
                part_top = tl.load(tops + part, real, -float("inf"), cache_modifier=".cg")
                top = tl.maximum(top, part_top)
            safe = tl.where(top == -float("inf"), 0.0, top)
            weight = tl.zeros((ROWS,), tl.float32)
            total = tl.zeros((ROWS, DEPTH), tl.float32)
            for each in tl.static_range(SPLITS):  # no load waits for another one
                part = (row * SPLITS + each) * GROUP + lane
                part_top = tl.load(tops + part, real, -float("inf"), cache_modifier=".cg")
                part_sum = tl.load(sums + part, real, 0.0, cache_modifier=".cg")
                at = parts + part[:, None] * DEPTH + depth
                part_total = tl.load(at, real[:, None], 0.0, cache_modifier=".cg")
                grown = tl.exp2(part_top - safe)
                weight += part_sum * grown
                total += part_total * grown[:, None]
    if complete:
        weight = tl.where(weight != 0, weight, 1.0)  # a NaN stays
        tl.store(o + place, (total / weight[:, None]).to(o.dtype.element_ty), stored)
