"""Block-sparse attention in CUDA C++ for Hopper: O = softmax(scale Q K.T) V over a block mask.

attention_wgmma.cu is the kernel and draws its pipeline; _wgmma_tiles.py cuts the work into tiles.
This file plans it. It supports

    head_dim   64 and 128, fp16 or bf16
    queries    blocks of a multiple of 16. A tile has 64 or 128 rows, so smaller blocks need enough
               query heads that share a list and a KV head: four for blocks of 16, two for 32
    keys       blocks of 8, 16, 32, or a multiple of 64

Blocks of keys are laid side by side until a step is full, so small ones cost nothing on that side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.declarations import arguments_of
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.attention._call import AttentionCall, ListedMask, attention_engine
from sparsebench.kernels.attention._shapes import LOG2_E, AttentionShape
from sparsebench.kernels.attention._wgmma_tiles import head_map, query_tiles, span_of
from sparsebench.results.record import Problem

HEAD_DIMS = 64, 128
WARPGROUP = 128  # threads
MOST_BYTES = 224 * 1024  # most shared memory for Q and the ring
ALIGNMENT = 1024  # alignment of a swizzled tile
LONG_LIST = 1280  # keys from which on steps of 128 keys are faster for tiles of 64 rows
MOST_PARTS, LEAST_STEPS = 8, 3  # of a tile that is split; of a part
SHORT = 0.04  # least part of all half steps that is wasted at the ends of lists of odd length


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    rows  of queries in a tile: 64 for each warpgroup that shares K and V, 128 at most
    keys  of a step
    """

    rows: int
    keys: int

    @property
    def tiles(self) -> int:
        """Return how many tiles a CTA works on at the same time."""
        return 128 // self.rows


def choices(w: ListedMask, call: AttentionCall) -> list[Config]:
    """Return the configuration for the lists' mean length, and the other one, if there is one.

    Steps of 128 keys are faster for long lists: others never won (NOTES.md). Raises Unsupported.
    """
    configs, mask = configurations(call.shape, w.shared(call.shape)), w.mask
    keys = len(mask.columns) * mask.block[1] / (len(mask.offsets) - 1)  # of a list
    return configs if keys >= LONG_LIST else configs[::-1]


def configurations(shape: AttentionShape, shared: int) -> list[Config]:
    """Return the configurations, the one for long lists first. Raises Unsupported.

    shared  query heads that share a list and a KV head
    """
    rows = min(128, span_of(shape.block[0]) * shared)
    if rows < 64:
        raise Unsupported(
            f"expected blocks of 64 queries, or fewer and more heads that share a list and a KV "
            f"head; found blocks of {shape.block[0]} and {shared} such heads"
        )
    keys = next((n for n in (128, 64) if not (shape.block[1] % n and n % shape.block[1])), None)
    if not keys or shape.block[1] % 8:
        raise Unsupported(
            f"expected blocks of 8, 16, 32 or a multiple of 64 keys, found {shape.block[1]}"
        )
    return [Config(rows, n) for n in ((128, 64) if rows < keys else (keys,))]


def shortens(config: Config, mask: BlockMask) -> bool:
    """Return whether to end lists of odd length with a short step.

    It saves half a step for each such list, but all other steps take 1 to 4 % longer.
    """
    if config.keys != 128 or mask.block[1] != 64:
        return False
    odd = mask.counts % 2
    return bool(odd.sum() > SHORT * (mask.counts + odd).sum())


def buffers_of(config: Config, query_maps: int) -> int:
    """Return the buffers of a tile's queries: a second one, if there is room, hides their load."""
    return 1 if query_maps > 1 or config.keys > config.rows else 2


def query_rows(config: Config, query_maps: int) -> int:
    """Return the rows of queries in the shared memory of a tile."""
    return query_maps * buffers_of(config, query_maps) * config.rows


def slots_of(config: Config, head_dim: int, query_maps: int = 1) -> int:
    """Return the slots of a ring: what the shared memory has room for beside the tile of queries.

    query_maps  matrices of queries that are loaded for a tile
    """
    row = head_dim * 2
    available = MOST_BYTES // config.tiles - query_rows(config, query_maps) * row
    return min(13 - config.tiles, available // (config.keys * row))  # notes take the rest


def shared_bytes(config: Config, head_dim: int, query_maps: int = 1) -> int:
    """Return the shared memory of a CTA."""
    keys = slots_of(config, head_dim, query_maps) * config.keys
    return ALIGNMENT + config.tiles * (query_rows(config, query_maps) + keys) * head_dim * 2


def constants_of(
    config: Config,
    shape: AttentionShape,
    mask: BlockMask,
    short: bool,
    query_maps: int = 1,
    splits: bool = False,
    gathered: int = 0,
) -> cuda.Constants:
    """Return the macros of walk.cuh.

    short     shortens(config, mask), which waits for the GPU
    splits    whether some tiles are split into parts
    gathered  places of a query's list, if queries are gathered by block of keys
    """
    return (
        *(("HEAD_DIM", shape.head_dim), ("BLOCK_Q", shape.block[0]), ("BLOCK_K", shape.block[1])),
        *(("KEYS", config.keys), ("GROUPS", config.tiles), ("CONSUMERS", config.rows // 64)),
        ("SLOTS", slots_of(config, shape.head_dim, query_maps)),
        ("Q_BUFFERS", buffers_of(config, query_maps)),
        ("SPAN", min(span_of(shape.block[0]), config.rows)),
        *(("SHORTENS", int(short)), ("SPLITS", int(splits))),
        *(("CAUSAL", int(mask.causal)), ("BITS", int(mask.bits is not None))),
        *(("FP16", int(shape.dtype == "fp16")), ("GATHERED", gathered)),
    )


def load_persistent(
    name: str,
    function: str,
    constants: cuda.Constants,
    size: int,
    tiles: Tensor,
    groups: int,
    rows: int,
) -> cuda.Loaded:
    """Load a kernel whose CTAs stay for the whole launch. Raises Unsupported.

    name, function  of the kernel
    size            shared memory of a CTA, in bytes
    groups, rows    tiles that a CTA works on at the same time, and rows of one: 64 for a warpgroup
    """
    device = tiles.device
    kernel = cuda.load(name, function, constants, size, device)
    grid = min(multiprocessors(device), -(-len(tiles) // groups))
    threads = WARPGROUP * (groups * rows // 64 + 1)  # and a warpgroup of producers
    return kernel.on(grid, threads)


class QueryTiles(NamedTuple):
    """The tiles of a mask for a launch, and whether lists end with a short step.

    counters  zero between launches
    whole     tiles at the beginning, each of which is worked on at once
    parts     into which each other tile is split
    sums      of the parts: fp32
    """

    tiles: Tensor
    short: bool
    counters: Tensor
    whole: int
    parts: int
    sums: Tensor


def parts_of(tiles: Tensor, config: Config, block: int, workers: int) -> int:
    """Return into how many parts to split each tile of the last round, which has few of them.

    Equal tiles run in rounds of `workers`, and the last round takes as long as the others. 1 means
    that no tile is split. Waits for the GPU.

    block  keys of a block
    """
    rest = len(tiles) % workers
    if not rest or rest == len(tiles):
        return 1
    steps = int(tiles[-rest:, 1].min()) * block // config.keys
    return max(1, min(workers // rest, steps // LEAST_STEPS, MOST_PARTS))


def work_of(
    mask: BlockMask, shape: AttentionShape, config: Config, *, splits: bool = True
) -> QueryTiles:
    """Return the tiles of queries; launches that share them must not overlap."""
    tiles = query_tiles(mask, shape, config.rows, min(span_of(shape.block[0]), config.rows))
    workers = multiprocessors(tiles.device) * config.tiles
    parts = parts_of(tiles, config, shape.block[1], workers) if splits else 1
    rest = len(tiles) % workers if parts > 1 else 0
    warps = config.rows // 16
    counters = torch.zeros(2 + rest * warps, dtype=torch.int32, device=tiles.device)
    # Each lane keeps its sums of O, and the base and the sum of its two rows.
    lines = rest * parts * warps * 32 * (shape.head_dim // 2 + 4)
    sums = torch.empty(lines, dtype=torch.float32, device=tiles.device)
    return QueryTiles(tiles, shortens(config, mask), counters, len(tiles) - rest, parts, sums)


class Walk(NamedTuple):
    """A kernel that walks tiles of queries over their lists (walk.cuh), without its outputs.

    maps         (addresses of k, v and of matrices like q) -> tensor maps
    layout       of the arguments
    lists, sizes, parts  fields of these arguments
    memory       that they point to
    """

    loaded: cuda.Loaded
    layout: cuda.Layout
    maps: Callable[..., list[bytes]]
    lists: tuple[int, ...]
    sizes: tuple[Any, ...]
    parts: tuple[int, ...]
    memory: tuple[Tensor, ...]


def walk(
    name: str,
    function: str,
    query_maps: int,
    mask: BlockMask,
    call: AttentionCall,
    config: Config,
    work: QueryTiles,
) -> Walk:
    """Load a kernel and make its arguments. Raises Unsupported.

    name, function  of the kernel
    query_maps      matrices like q
    """
    shape, (tiles, short, counters, whole, parts, sums) = call.shape, work
    span, dtype = min(span_of(shape.block[0]), config.rows), DTYPES[shape.dtype]
    box = min(shape.block[1], config.keys)
    of_keys = shape.kv_heads * shape.head_dim, shape.kv_tokens, shape.batch
    of_queries = shape.heads * shape.head_dim, shape.q_tokens, shape.batch

    def maps(k: int, v: int, *queries: int) -> list[bytes]:
        encoded = [head_map(address, dtype, of_keys, box) for address in (k, v)]
        rows = [head_map(address, dtype, of_queries, min(span, 64)) for address in queries]
        return [*encoded, b"".join(rows)]

    bits = () if mask.bits is None or mask.slots is None else (mask.slots, mask.bits)
    pointers = [x.data_ptr() for x in (tiles, mask.columns, *bits)]
    pointers += [0] * (4 - len(pointers))
    tickets = whole + parts * (len(tiles) - whole)
    lists = *pointers, counters.data_ptr(), tickets
    split = whole, parts, sums.data_ptr(), counters[2:].data_ptr()
    counts = shape.q_tokens, shape.kv_tokens, shape.heads, shape.kv_heads
    sizes = *counts, call.scale * LOG2_E
    constants = constants_of(config, shape, mask, short, query_maps, parts > 1)
    size = shared_bytes(config, shape.head_dim, query_maps)
    loaded = load_persistent(name, function, constants, size, tiles, config.tiles, config.rows)
    memory = tiles, mask.columns, *bits, counters, sums
    layout = arguments_of(name, function, constants)
    return Walk(loaded, layout, maps, lists, sizes, split, memory)


def plan(w: ListedMask, call: AttentionCall, config: Config) -> Product:
    """Sort the tiles and compile; launches of a plan must not overlap. Raises Unsupported."""
    configurations(call.shape, w.shared(call.shape))  # raises Unsupported
    work, shape = work_of(w.mask, call.shape, config), call.shape
    walking = walk("attention_wgmma", "attend", 1, w.mask, call, config, work)
    memory = walking.memory

    @lru_cache(cuda.ADDRESSES)
    def arguments(q: int, k: int, v: int, o: int, lse: int) -> cuda.Arguments:
        rest = *walking.lists, o, lse, *walking.sizes, *walking.parts
        return walking.layout(*walking.maps(k, v, q), *rest)

    def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> list[Tensor]:
        o = torch.empty_like(q) if out is None else out
        lse = q.new_empty(shape.batch * shape.heads, shape.q_tokens, dtype=torch.float32)
        cuda.on_tape(lse)
        args = arguments(*(t.data_ptr() for t in (q, k, v, o, lse)))
        return [cuda.launch(walking.loaded, args, o, memory), lse]

    return Product(run, walking.loaded.code)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run the problem here, or None."""
    if reason := unsupported_on_hopper(problem, device):
        return reason
    if problem["head_dim"] not in HEAD_DIMS:
        return f"head_dim: expected 64 or 128, found {problem['head_dim']}"
    scale = problem["scale"]
    return None if scale is None or scale > 0 else f"scale: expected more than 0, found {scale}"


KERNEL = attention_engine("attention_wgmma", "attention", choices, plan, unsupported, Config)
