"""Gathered tiles of attention_gathered.py in the kernel of attention_wgmma.cu, for large blocks.

    entries of a block    q1 q4 q5 q9 ...  |  ...       `_cut`: tiles of 128 rows, and the steps of
                               tile 0         tile 1            128 keys that their rows see
    tile    two warps copy its rows of Q, wherever they are ──> steps ──> parts, logs

Complete rows, which have all blocks that they see (_gathering.py), come first, in tiles that begin
at key 0: one softmax for all of its keys, as in dense attention, and no part, but O and the LSE.
With the 12 best of 32 blocks, that is 24.5 % of the steps.

The next tile's Q is copied, and its first scores are computed, while the last step of this one
runs; a program in Triton begins anew. Each head has a list of its own, as in MoBA, so the number of
an entry is the place of its part.
"""

from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.bound_launch import BoundLaunch
from sparsebench.kernels._common.declarations import arguments_of
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.triton import BoundKernel, Program
from sparsebench.kernels.attention import attention_wgmma
from sparsebench.kernels.attention._call import AttentionCall, ListedMask
from sparsebench.kernels.attention._gathered_tiles import SECTION, GatheredPlan
from sparsebench.kernels.attention._gathering import CHUNK
from sparsebench.kernels.attention._shapes import LOG2_E, Config
from sparsebench.kernels.attention._wgmma_tiles import head_map

ROWS = KEYS = 128  # of a tile, of a step
THREADS = 3 * attention_wgmma.WARPGROUP
CONFIG = Config(ROWS, 1, KEYS, 2, THREADS // 32, "wgmma")
CUT = 32  # tiles that a program of `_cut` writes at a time


def unsupported(w: ListedMask, call: AttentionCall) -> str | None:
    """Return why such tiles cannot run the call here, or None."""
    reason = attention_wgmma.unsupported(call.problem, w.mask.columns.device)
    return reason or unsupported_lists(w, call)


def unsupported_lists(w: ListedMask, call: AttentionCall) -> str | None:
    """Return why such tiles cannot read the lists, or None."""
    lists, heads, side = w.mask.lists, call.shape.heads, call.shape.block[1]
    if lists != heads:
        return f"expected a list for each of {heads} heads, found {lists}"
    return f"expected blocks of a multiple of {KEYS} keys, found {side}" if side % KEYS else None


def bound_tiles(
    w: ListedMask,
    call: AttentionCall,
    gathered: GatheredPlan,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[list[list[Program]], str]:
    """Return what writes the parts of each section, and the digest of the machine code.

    inputs   q, k, v
    outputs  the parts and their logarithms, O and the LSE

    The launches must not overlap. Raises Unsupported.
    """
    shape, mask, device = call.shape, w.mask, w.mask.columns.device
    places, columns = gathered.tile["PLACES"], mask.kv_blocks + 1  # and that of complete rows
    tile = attention_wgmma.Config(ROWS, KEYS)
    constants = attention_wgmma.constants_of(tile, shape, mask, False, gathered=places)
    size = attention_wgmma.shared_bytes(tile, shape.head_dim)
    kernel = cuda.load("attention_wgmma", "attend", constants, size, device)
    loaded = kernel.on(multiprocessors(device), THREADS)
    layout = arguments_of("attention_wgmma", "attend", constants)
    counters = torch.zeros(3, dtype=torch.int32, device=device)  # zero between launches
    of_keys = shape.kv_heads * shape.head_dim, shape.kv_tokens, shape.batch
    sizes = shape.q_tokens, shape.kv_tokens, shape.heads, shape.kv_heads, call.scale * LOG2_E
    of_cut = {"SIDE": shape.block[1], "KEYS": KEYS, "ROWS": ROWS, "PLACES": places}
    of_cut |= {"CAUSAL": mask.causal, "CUT": CUT, "num_warps": 1}

    @lru_cache(cuda.ADDRESSES)
    def arguments(
        first: int, entries: int, tiles: int, q: int, k: int, v: int, *outputs: int
    ) -> cuda.Arguments:
        maps = [head_map(x, call.dtype, of_keys, KEYS) for x in (k, v)]
        parts, logs, o, lse = outputs
        lists = tiles, 0, 0, 0, entries, q, o, lse, counters.data_ptr(), 0
        return layout(*maps, bytes(cuda.MAP_BYTES), *lists, parts, logs, *sizes, first, 0, 0, 0, 0)

    sections: list[list[Program]] = []
    for section in gathered.sections:
        entries, starts, bases, unit, first_chunk, end_chunk, width, workers = section.of_tiles
        units = section.tiles // workers
        most = units * (columns + width * places // ROWS)
        tiles = torch.empty(most, 4, dtype=torch.int32, device="meta")
        tensors = entries, starts, bases, tiles, counters, *outputs
        args = *tensors, unit, first_chunk, end_chunk, *gathered.sizes[:4]
        cut = BoundKernel(_cut, (units * columns,), args, of_cut, tiles)
        first = (unit * shape.q_tokens + first_chunk * CHUNK) * places  # entry of the section
        launch = BoundLaunch(loaded, (entries, tiles, *inputs, *outputs), partial(arguments, first))
        sections.append([cut, launch])
    return sections, loaded.code


@triton.jit(do_not_specialize=SECTION)  # type: ignore[untyped-decorator]
def _cut(  # type: ignore[no-untyped-def]
    entries, starts, bases, tiles, counters, parts, logs, o, lse,
    first_unit, first_chunk, end_chunk, q_tokens, kv_tokens, columns, chunks,
    SIDE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr,
    CAUSAL: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Write the tiles of a column of a list (Tile in walk.cuh), and count them.

    The launch that clears the count writes `parts`, `logs`, O and the LSE, up to 1 GiB. They are
    arguments here so that a replay (front.hpp) allocates them before tiles are counted: were memory
    short in between, the next call would write its tiles behind those of this one.
    """
    blocks, program = columns - 1, tl.program_id(0)
    units = tl.num_programs(0) // columns
    complete, other = program < units, program - units  # the longest tiles begin first
    list_ = first_unit + tl.where(complete, program, other // blocks)
    number = tl.where(complete, blocks, other % blocks)
    bases += list_.to(tl.int64) * (chunks + 1) * columns + number
    start = tl.load(starts + list_ * columns + number)
    low = start + tl.load(bases + first_chunk * columns)
    high = start + tl.load(bases + end_chunk * columns)
    count = tl.cdiv(high - low, ROWS)
    to = tiles + tl.atomic_add(counters + 2, count, sem="relaxed") * 4
    key = tl.where(complete, 0, number * SIDE)
    end_key = tl.where(complete, kv_tokens, tl.minimum((number + 1) * SIDE, kv_tokens))
    for first in range(0, count, CUT):
        tile = first + tl.arange(0, CUT)
        at, there = low + tile * ROWS, tile < count
        last = tl.minimum(at + ROWS, high) - 1
        end, whole = end_key + tl.zeros_like(at), KEYS - 1 + tl.zeros_like(at)
        if CAUSAL:
            shift = kv_tokens - q_tokens + 1 - list_ * q_tokens
            least = tl.load(entries + at, there, 0) // PLACES + shift  # its first row sees so many
            whole = tl.minimum(tl.maximum(least - key, 0) // KEYS, KEYS - 1)
            end = tl.minimum(end, tl.load(entries + last, there, 0) // PLACES + shift)
        steps = tl.cdiv(tl.maximum(end - key, 1), KEYS)
        line = to + tile * 4
        tl.store(line, key | whole, there)
        rows = (last - at + 1) | (complete.to(tl.int32) << 31)
        tl.store(line + 1, (steps << 8) | rows, there)
        tl.store(line + 2, at, there)
        tl.store(line + 3, list_, there)
