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

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from struct import pack
from typing import NamedTuple

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.search import fastest_launch, pinned_or
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.attention._lists import shared_heads
from sparsebench.kernels.attention._shapes import LOG2_E, Bound, Shape, task_of
from sparsebench.kernels.attention._stored import (
    BUFFERS,
    Stored,
    multiply_stored,
    steps_of,
    stored_of,
    weigh_rows,
)
from sparsebench.kernels.attention._wgmma_tiles import (
    KeyLists,
    key_lists,
    key_tiles,
    span_of,
    tensor_map,
)
from sparsebench.kernels.attention.attention_wgmma import (
    ALIGNMENT,
    MOST_BYTES,
    load_persistent,
    unsupported,
    walk,
)
from sparsebench.kernels.attention.attention_wgmma import Config as QueryConfig
from sparsebench.kernels.attention.attention_wgmma import Work as QueryWork
from sparsebench.kernels.attention.attention_wgmma import configurations as query_configurations
from sparsebench.kernels.attention.attention_wgmma import constants_of as query_constants
from sparsebench.kernels.attention.attention_wgmma import work_of as query_work

ROWS = 64  # queries of a step
SMALL = 16, 32  # sides of blocks of which a step or a tile has several
KEYS = cuda.Layout("512s", "64s", "16s", "28s4x", "32s", *"PP")  # Maps to Stored, dK, dV
QUERIES = cuda.Layout("640s", "48s", "32s", "P", "20s")  # Maps, Lists, Stats, dQ, Sizes


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


@dataclass(frozen=True)
class Gradients:
    """The kernels and their arguments: each call computes `out`, in the same buffer.

    memory  what the arguments point to
    """

    kernels: tuple[tuple[cuda.Loaded, cuda.Arguments], ...]
    memory: tuple[object, ...]
    out: Tensor

    def __call__(self) -> Tensor:
        """Enqueue the kernels on torch's current stream. Raises RuntimeError."""
        for loaded, args in self.kernels:
            loaded.enqueue(args)
        return self.out

    @property
    def code(self) -> str:
        """Return the digest of the machine code, one for each source."""
        return " ".join(dict.fromkeys(loaded.code for loaded, _ in self.kernels))


def configurations(shape: Shape, shared: int) -> list[Config]:
    """Return the configurations to time, the likeliest first. Raises Unsupported.

    shared  query heads that share a list and a KV head

    Tiles of `rows` keys were the fastest in every search (NOTES.md).
    """
    if any(side % ROWS and side not in SMALL for side in shape.block):
        raise Unsupported(
            f"expected blocks of 16, 32 or a multiple of 64 queries and keys, "
            f"found {list(shape.block)}"
        )
    query_configurations(shape, shared)  # raises Unsupported
    wide = shape.block[1] % 128 == 0 and shape.block[0] >= ROWS
    rows, stores = 128 if wide else 64, min(shape.block) >= ROWS
    return [Config(rows, True), Config(rows)] if stores else [Config(rows)]


def of_queries(shape: Shape, mask: BlockMask) -> QueryConfig:
    """Return how differentiate_queries runs: there are registers for steps of 64 keys."""
    shared = shared_heads(mask, shape.heads, shape.kv_heads)
    return QueryConfig(min(128, span_of(shape.block[0]) * shared), 64)


class Work(NamedTuple):
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
    queries: QueryWork | None
    stored: Stored | None


def work_of(mask: BlockMask, shape: Shape, config: Config) -> Work:
    """Transpose the lists and sort the tiles; launches that share them must not overlap.

    Raises Unsupported.
    """
    if mask.bits is not None and mask.block[1] < ROWS:
        raise Unsupported(f"expected blocks of 64 keys or no bits, found {mask.block[1]} and bits")
    lists = key_lists(mask)
    tiles = key_tiles(lists, mask, shape, config.rows)
    counters = torch.zeros(1, 2, dtype=torch.int32, device=tiles.device)
    stats = torch.zeros(2, shape.batch * shape.heads, padded(shape), device=tiles.device)
    stats[0] = torch.inf
    if config.stores:
        stored = stored_of(mask, shape, tiles, lists.places)
        return Work(tiles, lists, counters.repeat(len(stored.keys), 1), stats, None, stored)
    queries = query_work(mask, shape, of_queries(shape, mask), splits=False)
    return Work(tiles, lists, counters, stats, queries, None)


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


def padded(shape: Shape) -> int:
    """Return the rows of a head's LSE and delta: whole blocks, and one step without a query."""
    side = max(ROWS, shape.block[0])
    return -(-shape.q_tokens // side) * side + ROWS


def constants_of(config: Config, shape: Shape, mask: BlockMask) -> cuda.Constants:
    """Return the macros of attention_wgmma_backward.cu."""
    return (
        *(("HEAD_DIM", shape.head_dim), ("BLOCK_Q", shape.block[0]), ("BLOCK_K", shape.block[1])),
        *(("GROUPS", config.tiles), ("CONSUMERS", config.rows // 64)),
        ("SLOTS", slots_of(config, shape.head_dim)),
        *(("CAUSAL", int(mask.causal)), ("BITS", int(mask.bits is not None))),
        *(("STORES", int(config.stores)), ("FP16", int(shape.dtype == "fp16"))),
    )


def launch(
    operands: Sequence[Tensor],
    mask: BlockMask,
    shape: Shape,
    scale: float,
    config: Config,
    work: Work | None = None,
    separate: bool = False,
) -> Bound[Gradients]:
    """Return the kernels of dQ, dK and dV, one below the other as rows of D elements.

    operands  q, k, v, o, lse and do: dense, lse fp32 [batch * H, S_q], the others token-major
    work      work_of(mask, shape, config) if it exists already
    separate  the three share no memory, and `program.out` is dQ

    Raises Unsupported.
    """
    q, k, v, o, lse, do = operands
    rows, depth = padded(shape), shape.head_dim
    q_rows, kv_rows = (x.numel() // depth for x in (q, k))
    heights = [q_rows, kv_rows, kv_rows]
    if separate:
        dq, dk, dv = (q.new_empty(size, depth) for size in heights)
        cuda.on_tape(dq, dk, dv)
        out = dq
    else:
        out = q.new_empty(sum(heights), depth)
        dq, dk, dv = out.split(heights)
    work = work or work_of(mask, shape, config)
    transposed, stored, (lse_2, delta) = work.lists, work.stored, work.stats
    maps = b"".join(tensor_map(x, shape.batch, min(ROWS, shape.block[0])) for x in (q, do))
    maps += b"".join(tensor_map(x, shape.batch, config.rows) for x in (k, v))
    bits = () if mask.bits is None or transposed.slots is None else (transposed.slots, mask.bits)
    pointers = [x.data_ptr() for x in (transposed.offsets, transposed.rows, *bits)]
    pointers += [0] * (4 - len(pointers))
    blocks = transposed.present.shape[1]
    counts = shape.q_tokens, shape.kv_tokens, shape.heads, shape.kv_heads
    sizes = pack("iiiiiff", *counts, rows, scale, scale * LOG2_E)
    stats = pack("PP", lse_2.data_ptr(), delta.data_ptr())
    constants, size = constants_of(config, shape, mask), shared_bytes(config, depth)
    tensors = [*operands, mask.bits, dk, dv]

    def of_keys(tiles: Tensor, counters: Tensor, to: bytes) -> tuple[cuda.Loaded, cuda.Arguments]:
        kernel = "attention_wgmma_backward", "differentiate"
        loaded = load_persistent(*kernel, constants, size, tiles, config.tiles, config.rows)
        ends = counters.data_ptr(), len(tiles), mask.lists, blocks
        lists = pack("PPPPPPiii4x", tiles.data_ptr(), *pointers, *ends)
        loaded = replace(loaded, early=config.stores)
        return loaded, KEYS(maps, lists, stats, sizes, to, dk.data_ptr(), dv.data_ptr())

    if stored:
        sections = len(stored.keys)
        scores = q.new_empty(min(BUFFERS, sections), max(1, stored.blocks), *shape.block)
        cuda.on_tape(scores)
        kernels = [weigh_rows(o, do, lse, lse_2, delta, shape)]
        for step in steps_of(sections):
            buffer, tiles = scores[step.section % BUFFERS], stored.keys[step.section]
            cuda.on_tape(view=(buffer, scores))
            if step.is_product:
                product = multiply_stored(k, buffer, dq, mask, shape, scale, stored, step)
                kernels.append(product)
            else:
                addresses = (x.data_ptr() for x in (buffer, stored.places, stored.shifts))
                to = pack("PPPi4x", *addresses, step.waits)
                kernels.append(of_keys(tiles, work.counters[step.section], to))
        tensors += [scores, mask.columns]
    else:
        assert work.queries
        kernel, of_rows = ("attention_wgmma_dq", "differentiate_queries"), of_queries(shape, mask)
        call = walk(*kernel, [q, do, o], (k, v), mask, shape, scale, of_rows, work.queries)
        row_stats = pack("PPPi4x", lse.data_ptr(), lse_2.data_ptr(), delta.data_ptr(), rows)
        args = QUERIES(call.maps, call.lists, row_stats, dq.data_ptr(), call.sizes)
        kernels = [(call.loaded, args), of_keys(work.tiles, work.counters, bytes(32))]
        tensors += call.tensors
    program = Gradients(tuple(kernels), (work, *tensors), out)
    return Bound(program, tuple(operands), (dq, dk, dv))


def prepare(operands: Operands) -> Launch:
    """Transpose the lists, compile, and time the configurations."""
    tensors, mask, shape, shared, scale = task_of(operands)
    macros = query_constants(of_queries(shape, mask), shape, mask, False, 3)
    cuda.compile_ahead("attention_wgmma_dq", [macros])  # beside the other ones
    choices = pinned_or([asdict(c) for c in configurations(shape, shared)], operands)
    configs = [Config(**choice) for choice in choices]
    cuda.compile_ahead("attention_wgmma_backward", [constants_of(c, shape, mask) for c in configs])
    programs = {}
    for config in configs:
        with suppress(Unsupported):
            programs[config] = launch(tensors, mask, shape, scale, config).program
    return fastest_launch([*programs], [*programs.values()], {}, operands.device)


KERNEL = Kernel("attention_backward", "block_mask", "cuda", prepare, unsupported)
