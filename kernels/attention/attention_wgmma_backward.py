"""Gradients of block-sparse attention in CUDA C++ for Hopper: dQ, dK and dV, one below the other.

Config.stores: no
    differentiate_queries   dQ of a tile of queries; delta = sum(dO O), and the LSE for exp2
    differentiate           dK and dV of a tile of keys
Config.stores: yes
    weigh_rows              delta, and the LSE for exp2
    differentiate           dK and dV; stores dS of a section of heads
    multiply_stored         dQ = dS K of a section, beside dK and dV of the next one

The first way computes S and dP twice, which takes 14 D operations for each allowed element instead
of 10. The second takes memory for dS, 1 GiB as a rule (_stored.py). Neither adds up a sum in
memory, so the same operands give the same bits. The kernels are in attention_wgmma_backward.cu,
attention_wgmma_dq.cu and attention_wgmma_stored.cu. They support

    head_dim   64 and 128, fp16 or bf16
    queries    blocks of a multiple of 64, or of 16 or 32 as attention_wgmma does
    keys       blocks of a multiple of 64, or of 16 or 32 without bits. Small blocks are joined to
               blocks of 64, whose list is the union of theirs
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.declarations import arguments_of
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.product import Product
from sparsebench.kernels.attention._call import AttentionCall, ListedMask, attention_engine
from sparsebench.kernels.attention._shapes import LOG2_E, AttentionShape
from sparsebench.kernels.attention._stored import (
    BUFFERS,
    Stored,
    is_likelier,
    multiply_stored,
    steps_of,
    stored_of,
    weigh_rows,
)
from sparsebench.kernels.attention._wgmma_tiles import (
    KeyLists,
    head_map,
    key_lists,
    key_tiles,
    span_of,
)
from sparsebench.kernels.attention.attention_wgmma import (
    ALIGNMENT,
    MOST_BYTES,
    QueryTiles,
    load_persistent,
    unsupported,
    walk,
)
from sparsebench.kernels.attention.attention_wgmma import Config as QueryConfig
from sparsebench.kernels.attention.attention_wgmma import configurations as query_configurations
from sparsebench.kernels.attention.attention_wgmma import work_of as query_work

ROWS = 64  # queries of a step
SMALL = 16, 32  # sides of blocks of which a step or a tile has several
NOT_STORED = 0, 0, 0, 0  # struct Stored


@dataclass(frozen=True)
class Config:
    """One way to run the kernels.

    rows    of keys in a tile: 64 for each warpgroup, 128 at most
    stores  dS is stored, and dQ computed from it; else dQ computes it again
    """

    rows: int
    stores: bool = False

    @property
    def tiles(self) -> int:
        """Return how many tiles a CTA works on at the same time."""
        return 128 // self.rows


def choices(w: ListedMask, call: AttentionCall) -> list[Config]:
    """Return the configurations, the likeliest first. Raises Unsupported.

    Tiles of `rows` keys were the fastest in every search (NOTES.md). Waits for the GPU.
    """
    shape, mask = call.shape, w.mask
    if any(side % ROWS and side not in SMALL for side in shape.block):
        raise Unsupported(
            f"expected blocks of 16, 32 or a multiple of 64 queries and keys, "
            f"found {list(shape.block)}"
        )
    if mask.keep and mask.block[1] < ROWS:  # blocks are joined on the host
        raise Unsupported(f"expected selected blocks of 64 keys or more, found {mask.block[1]}")
    if mask.bits is not None and mask.block[1] < ROWS:
        raise Unsupported(f"expected blocks of 64 keys or no bits, found {mask.block[1]} and bits")
    query_configurations(shape, w.shared(shape))  # raises Unsupported
    wide = shape.block[1] % 128 == 0 and shape.block[0] >= ROWS
    again = Config(128 if wide else 64)
    # dS has no place for a block that is selected in a later call.
    if min(shape.block) < ROWS or mask.keep:
        return [again]
    stored = replace(again, stores=True)
    workers = multiprocessors(mask.columns.device) * again.tiles
    return [stored, again] if is_likelier(mask, shape, workers) else [again, stored]


def of_queries(w: ListedMask, shape: AttentionShape) -> QueryConfig:
    """Return how differentiate_queries runs: there are registers for steps of 64 keys."""
    return QueryConfig(min(128, span_of(shape.block[0]) * w.shared(shape)), 64)


class KeyTiles(NamedTuple):
    """A mask prepared for a launch: tiles of keys, their lists, and what dQ needs.

    counters  int32 [sections, 2], zero between launches
    stats     fp32 [2, batch * H, padded rows]: the LSE for exp2, and delta. A launch writes those
              of queries; the others stay infinity and zero
    queries   tiles of queries, if dQ computes dS again; else `stored` has them
    """

    tiles: Tensor
    lists: KeyLists
    counters: Tensor
    stats: Tensor
    queries: QueryTiles | None
    stored: Stored | None


def work_of(w: ListedMask, shape: AttentionShape, config: Config) -> KeyTiles:
    """Transpose the lists and sort the tiles; launches that share them must not overlap.

    Raises Unsupported.
    """
    mask = w.mask
    lists = key_lists(mask)
    tiles = key_tiles(lists, mask, shape, config.rows)
    counters = torch.zeros(1, 2, dtype=torch.int32, device=tiles.device)
    size = 2, shape.batch * shape.heads, padded(shape)
    stats = torch.zeros(size, dtype=torch.float32, device=tiles.device)
    stats[0] = torch.inf
    if config.stores:
        stored = stored_of(mask, shape, tiles, lists.places)
        return KeyTiles(tiles, lists, counters.repeat(len(stored.keys), 1), stats, None, stored)
    queries = query_work(mask, shape, of_queries(w, shape), splits=False)
    return KeyTiles(tiles, lists, counters, stats, queries, None)


def slots_of(config: Config, head_dim: int) -> int:
    """Return the slots of the ring of Q and dO: what the shared memory has room for, at most 8."""
    row = head_dim * 2
    fixed = 2 * config.rows * row
    return min(8, (MOST_BYTES // config.tiles - fixed) // (ROWS * row + 8 * ROWS))


def shared_bytes(config: Config, head_dim: int) -> int:
    """Return the shared memory of a CTA."""
    slots, row = slots_of(config, head_dim), head_dim * 2
    tile = 2 * config.rows * row + slots * (ROWS * row + 8 * ROWS)
    return ALIGNMENT + config.tiles * tile


def padded(shape: AttentionShape) -> int:
    """Return the rows of a head's LSE and delta: whole blocks, and one step without a query."""
    side = max(ROWS, shape.block[0])
    return -(-shape.q_tokens // side) * side + ROWS


def constants_of(config: Config, shape: AttentionShape, mask: BlockMask) -> cuda.Constants:
    """Return the macros of attention_wgmma_backward.cu."""
    return (
        *(("HEAD_DIM", shape.head_dim), ("BLOCK_Q", shape.block[0]), ("BLOCK_K", shape.block[1])),
        *(("GROUPS", config.tiles), ("CONSUMERS", config.rows // 64)),
        ("SLOTS", slots_of(config, shape.head_dim)),
        *(("CAUSAL", int(mask.causal)), ("BITS", int(mask.bits is not None))),
        *(("STORES", int(config.stores)), ("FP16", int(shape.dtype == "fp16"))),
    )


Step = tuple[cuda.Loaded, Callable[..., cuda.Arguments]]
"""A launch, and its arguments by addresses."""


def plan(w: ListedMask, call: AttentionCall, config: Config) -> Product:
    """Transpose the lists and compile; launches of a plan must not overlap. Raises Unsupported."""
    choices(w, call)  # raises Unsupported
    work, shape, mask = work_of(w, call.shape, config), call.shape, w.mask
    device, stored, (lse_2, delta) = mask.columns.device, work.stored, work.stats
    of_keys = _of_keys(work, mask, call, config)
    memory: tuple[object, ...] = work, mask.bits, mask.columns
    if stored is None:
        assert work.queries
        kernel = "attention_wgmma_dq", "differentiate_queries"
        walking = walk(*kernel, 3, mask, call, of_queries(w, shape), work.queries)
        memory = *memory, *walking.memory
        stats = lse_2.data_ptr(), delta.data_ptr(), padded(shape)
        keys_loaded, keys_arguments = of_keys(work.tiles, work.counters, NOT_STORED)
        code = f"{walking.loaded.code} {keys_loaded.code}"

        @lru_cache(cuda.ADDRESSES)
        def launches(
            q: int, k: int, v: int, o: int, lse: int, do: int, dq: int, dk: int, dv: int, _: int
        ) -> list[tuple[cuda.Loaded, cuda.Arguments]]:
            maps, rest = walking.maps(k, v, q, do, o), (lse, *stats, dq, *walking.sizes)
            queries = walking.layout(*maps, *walking.lists, *rest)
            keys = keys_arguments(q, do, k, v, dk, dv)
            return [(walking.loaded, queries), (keys_loaded, keys)]

    else:
        sections, of_block = len(stored.keys), shape.block[0] * shape.block[1] * call.dtype.itemsize
        buffer_bytes = max(1, stored.blocks) * of_block
        weigh_loaded, weigh = weigh_rows(call, device, lse_2, delta)
        first = of_keys(work.tiles, work.counters[0], NOT_STORED)[0]
        product_code = multiply_stored(call, mask, stored, steps_of(sections)[-1])[0].code
        code = " ".join(dict.fromkeys((weigh_loaded.code, first.code, product_code)))

        @lru_cache(cuda.ADDRESSES)
        def launches(
            q: int, k: int, v: int, o: int, lse: int, do: int, dq: int, dk: int, dv: int, s: int
        ) -> list[tuple[cuda.Loaded, cuda.Arguments]]:
            listed = [(weigh_loaded, weigh(o, do, lse))]
            for step in steps_of(sections):
                scores = s + step.section % BUFFERS * buffer_bytes
                if step.is_product:
                    loaded, product = multiply_stored(call, mask, stored, step)
                    listed.append((loaded, product(k, scores, dq)))
                else:
                    places = stored.places.data_ptr(), stored.shifts.data_ptr()
                    to = scores, *places, step.waits
                    tiles, counters = stored.keys[step.section], work.counters[step.section]
                    loaded, keys = of_keys(tiles, counters, to)
                    listed.append((loaded, keys(q, do, k, v, dk, dv)))
            return listed

    def run(*operands: Tensor, out: Tensor | None = None) -> list[Tensor]:
        q, addresses = operands[0], [t.data_ptr() for t in operands]
        gradients, scores = call.gradients(q, out), 0
        if stored is not None:
            blocks = min(BUFFERS, len(stored.keys)), max(1, stored.blocks), *shape.block
            buffer = q.new_empty(blocks)
            cuda.on_tape(buffer)
            for part in buffer[1:]:
                cuda.on_tape(view=(part, buffer))
            scores = buffer.data_ptr()
        for loaded, args in launches(*addresses, *(g.data_ptr() for g in gradients), scores):
            loaded.enqueue(args)
        for gradient in gradients:
            cuda.on_tape(gradient, owners=(memory,))
        if is_capturing(q):
            keep(memory)
        return gradients

    return Product(run, code)


def _of_keys(
    work: KeyTiles, mask: BlockMask, call: AttentionCall, config: Config
) -> Callable[[Tensor, Tensor, tuple[int, ...]], Step]:
    """Return the launch of `differentiate` for some tiles: (tiles, counters, Stored) -> Step.

    Its arguments are of the addresses of q, dO, k, v, dK and dV.
    """
    shape, transposed = call.shape, work.lists
    constants, size = constants_of(config, shape, mask), shared_bytes(config, shape.head_dim)
    bits = () if mask.bits is None or transposed.slots is None else (transposed.slots, mask.bits)
    pointers = [x.data_ptr() for x in (transposed.offsets, transposed.rows, *bits)]
    pointers += [0] * (4 - len(pointers))
    blocks, counts = transposed.present.shape[1], (shape.q_tokens, shape.kv_tokens)
    heads = shape.heads, shape.kv_heads, padded(shape)
    sizes = *counts, *heads, call.scale, call.scale * LOG2_E
    stats = [stat.data_ptr() for stat in work.stats]
    of_queries = shape.heads * shape.head_dim, shape.q_tokens, shape.batch
    of_keys = shape.kv_heads * shape.head_dim, shape.kv_tokens, shape.batch

    kernel = "attention_wgmma_backward", "differentiate"
    layout = arguments_of(*kernel, constants)

    def step(tiles: Tensor, counters: Tensor, to: tuple[int, ...]) -> Step:
        loaded = load_persistent(*kernel, constants, size, tiles, config.tiles, config.rows)
        ends = counters.data_ptr(), len(tiles), mask.lists, blocks
        lists = tiles.data_ptr(), *pointers, *ends

        def arguments(q: int, do: int, k: int, v: int, dk: int, dv: int) -> cuda.Arguments:
            rows = min(ROWS, shape.block[0])
            maps = [head_map(x, call.dtype, of_queries, rows) for x in (q, do)]
            maps += [head_map(x, call.dtype, of_keys, config.rows) for x in (k, v)]
            return layout(*maps, *lists, *stats, *sizes, *to, dk, dv)

        return replace(loaded, early=config.stores), arguments

    return step


KERNEL = attention_engine(
    "attention_wgmma_backward", "attention_backward", choices, plan, unsupported, Config
)
