"""Feed-forward layer in groups of tokens: each computes the units active for any of them.

    G = X @ Wg.T                         torch, or words by _twell_gate.py
    Y = (act(G) * (X @ Wu.T)) @ Wd.T     ffn_sparse.cu: only the active units
    the same, dense                      _remainder.py: groups with too many active units

Each call finds the active units on the device. Results are correct for any number of active units,
and have the same bits at every call. If a group has more rows (units that are active for any of its
tokens) than `limit`, ffn_sparse.cu leaves the group to the dense products. The host never waits, so
a CUDA graph can hold the whole layer. The limit is the higher of two estimates of how many rows
take as long as dense products:

    many tokens   rows x 4 k bytes at L2_RATE  =  tokens of a group x 4 n k FLOPs at DENSE_RATE
    few tokens    rows x groups                =  DENSE_READS n: two reads of the weights, launches

A group has up to 8 tokens, and fewer if SMs would be idle, although units that tokens of two groups
share are then read twice (`height_of`).

With `alone` there is no dense fallback, which saves its two launches: no group is left, and every
group reads its rows, however many. If all units are active, the layer takes 12 to 20 times as long
as a dense one.

An inactive unit counts as zero even if X is not finite; dense products make it NaN.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.scratch import counters
from sparsebench.kernels.twell import _remainder
from sparsebench.kernels.twell._call import TwellCall, twell_engine, unsupported
from sparsebench.kernels.twell._remainder import GROUP
from sparsebench.kernels.twell._twell_gate import CAPACITY, CLUSTERS, TILE, writer

MOST_ROWS = 1536  # per group, as in ffn_sparse.cu
MOST_ALONE = 512  # tokens; with more, a fallback takes 2 % longer at most
START = 1.0  # time of a group's start; a token's rows take 1
SHARED_BYTES, ALONE_BYTES = 192 * 1024, 200 * 1024  # 227 KB less static memory, 30 or 18
L2_RATE, DENSE_RATE, DENSE_READS = 9e12, 7e14, 4.0  # bytes/s, FLOP/s of an H200 (NOTES.md)
LISTS = 3  # per CTA, as in ffn_sparse.cu
PLANS = 64  # cached, one per number of tokens


@dataclass(frozen=True)
class Config:
    """Whether the layer has no dense fallback, and what writes the gate: torch, or TwELL's kernel.

    cluster  CTAs of twell_gate.cu that share boxes of W; 0 if torch writes G as a matrix
    """

    alone: bool = False
    cluster: int = 0


def height_of(m: int, at_once: int) -> int:
    """Return the tokens of a group with which a walk is the shortest, if so many run at once."""

    def time(height: int) -> float:  # a token's rows take 1
        return -(-m // (height * at_once)) * (height + START)

    return min(range(GROUP, 0, -1), key=time)


def limit_of(m: int, n: int, height: int) -> int:
    """Return the highest number of rows of a group, which has `height` tokens."""
    by_arithmetic = height * n * L2_RATE / DENSE_RATE
    by_bytes = DENSE_READS * n / -(-m // height)
    return min(n, MOST_ROWS, int(max(by_arithmetic, by_bytes)))


def threads_of(k: int, alone: bool = False) -> tuple[int, int]:
    """Return the MMA threads and all threads of a CTA."""
    products = 256 if k > 1024 else 128
    return products, products + (256 if k <= (2560 if alone else 2048) else 128)


def shared_bytes(k: int, alone: bool = False) -> int:
    """Return the dynamic shared memory of a CTA in bytes: X and the stages, eight rows each."""
    products, threads = threads_of(k, alone)
    halves = 1 if threads > products + 128 else 2
    columns = 64 * max(2, -(-k // (2 * products * halves)))  # of a warp
    stage = GROUP * columns * products // 16  # bytes
    stages = min(ALONE_BYTES // stage - halves, 6) if alone else 6 - halves
    return stage * (halves + stages)


def room_of(alone: bool) -> int:
    """Return the shared memory that X and the stages may take, in bytes."""
    return ALONE_BYTES if alone else SHARED_BYTES


def constants_of(call: TwellCall, height: int, config: Config) -> cuda.Constants:
    """Return the macros of ffn_sparse.cu."""
    flags = {
        "SQUARED": call.squared,
        "GATED": call.gated,
        "TWELL": config.cluster > 0,
        "FP16": call.dtype == torch.float16,
        "ALONE": config.alone,
    }
    sizes = {"TILE": TILE, "CAPACITY": CAPACITY} if config.cluster else {}
    named = {"K": call.k, "HEIGHT": height} | flags | sizes
    return tuple((name, int(value)) for name, value in named.items())


def plan(device: torch.device, call: TwellCall, config: Config) -> Product:
    """Compile for up to call.m tokens. Raises Unsupported."""
    alone, (most, n, k) = config.alone, call[:3]
    if alone and most > MOST_ALONE:
        raise Unsupported(f"without a fallback: expected at most {MOST_ALONE} tokens, found {most}")
    height = height_of(most, multiprocessors(device))
    constants, room = constants_of(call, height, config), room_of(alone)
    kernel = cuda.load("ffn_sparse", "up_and_down", constants, room, device)
    kernel = kernel._replace(shared_bytes=shared_bytes(k, alone))
    gates = writer(device, call, config.cluster) if config.cluster else _by_torch

    @lru_cache(PLANS)
    def walk(m: int) -> cuda.Loaded:
        groups = -(-m // height)
        grid = groups if alone else min(groups, multiprocessors(device))
        return kernel.on(grid, threads_of(k, alone)[1], early=True)

    def run(
        x: Tensor, gate: Tensor, up: Tensor | None, wd_t: Tensor, out: Tensor | None = None
    ) -> Tensor:
        m, loaded = len(x), walk(len(x))
        words, g = gates(x, gate)
        y = x.new_empty(x.shape) if out is None else out
        left, heavy = counters(x, 3), x.new_empty(-(-m // height), dtype=torch.int32)
        assert left is not None
        cuda.on_tape(heavy)
        places = 0, 0
        if words is not None:
            lists = x.new_empty(loaded.grid * LISTS * MOST_ROWS * GROUP)
            cuda.on_tape(lists)
            places = words.data_ptr(), lists.data_ptr()
        ups = () if up is None else (up,)
        tensors = x, g, *(ups or (wd_t,)), wd_t, y, left, heavy
        sizes = m, n, limit_of(m, n, height)
        args = kernel.arguments(*(t.data_ptr() for t in tensors), *sizes, *places)
        loaded.enqueue(args)
        if not alone:  # if G is in words, the kernel writes it as a matrix for these groups
            rest = _remainder.template_of(call._replace(m=m), device, height)
            rest(x, g, *ups, wd_t, y, left, heavy)
        cuda.on_tape(y, owners=(loaded, gate, *ups, wd_t, left))
        return y

    return Product(run, kernel.code)


def _by_torch(x: Tensor, w: Tensor) -> tuple[None, Tensor]:
    """Return G as a matrix."""
    g = torch.mm(x, w.t())
    cuda.on_tape(g, call=cuda.MatrixProduct(x, w.t(), g, fixed=True))
    return None, g


def choices(call: TwellCall) -> list[Config]:
    """Return both methods; without a fallback first, if there are few tokens."""
    return [*([Config(alone=True)] if call.m <= MOST_ALONE else []), Config()]


def choices_of_words(call: TwellCall) -> list[Config]:
    """Return the ways to write words."""
    return [Config(cluster=cluster) for cluster in CLUSTERS]


WHOLE = twell_engine("ffn_sparse", choices, plan, unsupported, Config)

WORDS = twell_engine("ffn_twell", choices_of_words, plan, unsupported, Config, consumes="twell")
