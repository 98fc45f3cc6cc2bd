"""Feed-forward layer in groups of eight tokens: each computes the units active for any of them.

    G = X @ Wg.T                         the fastest call of dense/_gemm.py, or _twell_gate.py
    Y = (act(G) * (X @ Wu.T)) @ Wd.T     ffn_sparse.cu: only the active units
    the same, dense                      _remainder.py: groups with too many active units

Each call finds the active units on the device. Results are correct for any number of active units,
and have the same bits at every call. If a group has more rows (units that are active for any of its
tokens) than `limit`, ffn_sparse.cu leaves the group to the dense products. The host never waits, so
a CUDA graph can hold the whole layer. The limit is the higher of two estimates of how many rows
take as long as dense products:

    many tokens   rows x 4 k bytes at L2_RATE  =  8 tokens x 4 n k FLOPs at DENSE_RATE
    few tokens    rows x groups                =  DENSE_READS n: two reads of the weights, launches

If there are too few groups for all SMs, a cluster of up to 8 CTAs shares the units of a group.

With `alone` there is no dense fallback, which saves its two launches: no group is left. Each CTA of
a cluster lists and takes a share of the units, and every group reads its rows, however many. If all
units are active, the layer takes some 6 times as long as a dense one at MOST_ALONE tokens.

An inactive unit counts as zero even if X is not finite; dense products make it NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.cuda import (
    BoundKernel,
    Constants,
    Layout,
    Loaded,
    MatrixProduct,
    clusters_at_once,
    compile_ahead,
    load,
    on_tape,
)
from sparsebench.kernels._common.scratch import counters
from sparsebench.kernels._common.triton import Template
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.kernels.dense import _gemm
from sparsebench.kernels.twell import _remainder, _twell_gate
from sparsebench.kernels.twell._layer import Layer, Plan
from sparsebench.kernels.twell._remainder import GROUP
from sparsebench.kernels.twell._twell_gate import Gate, Tiles

MOST_SPLIT = 8
MOST_ROWS = 1536  # per group, as in ffn_sparse.cu
MOST_ALONE = 512  # tokens; with two CTAs per group, an H200 runs 66 groups at the same time
SHARED_BYTES, ALONE_BYTES = (
    192 * 1024,
    200 * 1024,
)  # 227 KB less static memory, 30 or 18
L2_RATE, DENSE_RATE, DENSE_READS = 9e12, 7e14, 4.0  # bytes/s, FLOP/s of an H200 (NOTES.md)

# x, g, wu, wd transposed, y, left, heavy; m, n, limit; words; gates of the lists
ARGUMENTS = Layout(*"PPPPPPPiiiPP")
LISTS = 3  # per CTA, as in ffn_sparse.cu
PLANS = 64  # cached, one per number of tokens


def split_of(m: int, at_once: Callable[[int], int]) -> int:
    """Return how many CTAs share a group; `at_once` maps this to the clusters that run at once."""
    groups = -(-m // GROUP)
    return next((s for s in range(MOST_SPLIT, 1, -1) if groups <= at_once(s)), 1)


def _split(m: int, k: int, device: torch.device, alone: bool) -> int:
    """Return how many CTAs share a group on a device; without a fallback, at least two."""
    split = split_of(m, partial(clusters, k=k, device=device, alone=alone))
    return max(split, 2) if alone else split


def limit_of(m: int, n: int) -> int:
    """Return the highest number of rows of a group."""
    by_arithmetic = GROUP * n * L2_RATE / DENSE_RATE
    by_bytes = DENSE_READS * n / -(-m // GROUP)
    return min(n, MOST_ROWS, int(max(by_arithmetic, by_bytes)))


def threads_of(k: int, alone: bool = False) -> tuple[int, int]:
    """Return the MMA threads and all threads of a CTA."""
    products = 256 if k > 1024 else 128
    return products, products + (256 if k <= (2560 if alone else 2048) else 128)


def shared_bytes(k: int, alone: bool = False) -> int:
    """Return the dynamic shared memory of a CTA in bytes: X and the stages, eight rows each."""
    products, threads = threads_of(k, alone)
    halves = 1 if threads > products + 128 else 2
    if not alone:
        return 6 * GROUP * 16 * products
    columns = 64 * max(2, -(-k // (2 * products * halves)))  # of a warp
    stages = 5 if halves == 1 and columns <= 256 else 4
    return (halves + stages) * GROUP * columns * products // 16


def clusters(split: int, k: int, device: torch.device, alone: bool = False) -> int:
    """Return how many clusters of `split` CTAs run at the same time."""
    shared = ALONE_BYTES if alone else SHARED_BYTES
    return clusters_at_once(split, threads_of(k, alone)[1], shared, device)


def constants_of(
    k: int,
    split: int,
    squared: bool,
    gated: bool,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
    alone: bool = False,
) -> Constants:
    """Return the macros of ffn_sparse.cu; G is stored in `tiles`, or as a matrix."""
    flags = {
        "SQUARED": squared,
        "GATED": gated,
        "TWELL": tiles is not None,
        "FP16": dtype == torch.float16,
        "ALONE": alone,
    }
    sizes = {"TILE": tiles.tile, "CAPACITY": tiles.capacity} if tiles else {}
    named = {"K": k, "SPLIT": split} | flags | sizes
    return tuple((name, int(value)) for name, value in named.items())


def launch(
    x: Tensor,
    g: Tensor,
    wu: Tensor | None,
    wd_t: Tensor,
    y: Tensor,
    rest: _remainder.Rest,
    *,
    split: int,
    limit: int,
    squared: bool,
    words: Tensor | None = None,
    tiles: Tiles | None = None,
    alone: bool = False,
) -> BoundKernel:
    """Return the kernel that writes Y, except for the groups that it leaves to `rest`.

    x and y [m, k], gates g [m, n], wu and wd_t [n, k]; all contiguous, fp16 or bf16. Without wu,
    H is act(g). With `tiles`, `words` and the dense tiles in g come from _twell_gate.py. With
    `alone`, the kernel leaves no group, whatever the limit.
    """
    (m, k), n, device = x.shape, len(wd_t), x.device
    constants = constants_of(k, split, squared, wu is not None, x.dtype, tiles, alone)
    most = ALONE_BYTES if alone else SHARED_BYTES
    kernel, code = load("ffn_sparse", "up_and_down", constants, most, device)
    groups, (_, threads) = len(rest.heavy), threads_of(k, alone)
    grid = groups * split if split > 1 else min(groups, multiprocessors(device))
    shared = shared_bytes(k, alone)
    loaded = Loaded(kernel, code, device.index, grid, threads, shared, early=True)
    tensors = x, g, wd_t if wu is None else wu, wd_t, y, rest.left, rest.heavy
    gates = x.new_empty(grid * LISTS * MOST_ROWS * GROUP) if tiles else None
    more = [t for t in (words, gates) if t is not None]
    places = [0 if t is None else t.data_ptr() for t in (words, gates)]
    args = ARGUMENTS(*(t.data_ptr() for t in tensors), m, n, limit, *places)
    return BoundKernel(loaded, args, (*tensors, *more), y)


def prepare(
    operands: Operands, layer: Layer, tiles: Tiles | None = None, *, alone: bool = False
) -> Launch:
    """Return the launch of a layer whose gate is stored in tiles, or as a matrix by a library.

    Raises Unsupported.
    """
    m, n, k = layer.sizes
    if alone and m > MOST_ALONE:
        raise Unsupported(f"option way: alone takes at most {MOST_ALONE} tokens, found {m}")
    device, pinned = layer.x.device, (operands.pinned or {}).get("gate")
    split, squared = _split(m, k, device, alone), layer.squared
    gated = layer.up is not None
    compile_ahead(
        "ffn_sparse", [constants_of(k, split, squared, gated, layer.x.dtype, tiles, alone)]
    )
    gates: Launch | Gate
    if tiles:
        gates = _twell_gate.prepare(layer.x, layer.gate, tiles, pinned)
        g, words = gates.dense, gates.words
    else:
        g, words = layer.x.new_empty(m, n), None
        gates = _gemm.fastest_way(_gemm.Product(layer.x, layer.gate.t(), g), pinned)
    rest, limit = _remainder.rest_of(m, multiprocessors(device), device), limit_of(m, n)
    x, up, wd_t, y = layer.x, layer.up, layer.wd_t, layer.y
    sparse = launch(
        *(x, g, up, wd_t, y, rest),
        split=split,
        limit=limit,
        squared=squared,
        words=words,
        tiles=tiles,
        alone=alone,
    )
    # If G is in tiles, `sparse` writes it as a matrix for the groups that it leaves.
    products = [] if alone else _remainder.products(x, g, up, wd_t, y, rest, squared=squared)
    steps: list[Callable[[], object]] = [gates, sparse, *products]

    def run() -> Tensor:
        for step in steps:
            step()
        return y

    choice = {"gate": gates.choice, "split": split} | ({} if alone else {"limit": limit})
    return Launch(run, choice, sparse.code, gates.candidates)


@dataclass(frozen=True)
class Config:
    """Whether the layer has no dense fallback, and what writes the gate: torch, or TwELL's kernel.

    cluster  CTAs of twell_gate.cu that share boxes of W; 0 if torch writes G as a matrix
    """

    alone: bool = False
    cluster: int = 0


class Product:
    """The gated layer for any number of tokens to call (selection.Product). Raises Unsupported."""

    pack = order = None

    def __init__(self, plan: Plan, config: Config) -> None:
        """Compile for this number of tokens; fewer may need another kernel of ffn_sparse.cu."""
        if config.alone and plan.tokens > MOST_ALONE:
            raise Unsupported(f"expected at most {MOST_ALONE} tokens, found {plan.tokens}")
        k, dtype, device = plan.k, plan.dtype, plan.device
        self.config, self.squared = config, plan.squared
        self.tiles = Tiles() if config.cluster else None
        self.programs = multiprocessors(device)
        self.split = lru_cache(PLANS)(partial(_split, k=k, device=device, alone=config.alone))
        self.remainder = lru_cache(PLANS)(partial(_remainder_of, n=plan.n, k=k, dtype=dtype))
        split = self.split(plan.tokens)
        constants = constants_of(k, split, plan.squared, True, dtype, self.tiles, config.alone)
        most = ALONE_BYTES if config.alone else SHARED_BYTES
        self.code = load("ffn_sparse", "up_and_down", constants, most, device)[1]

    def run(self, x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor) -> Tensor:
        """Compute Y; the caller checks the operands, which are those of `launch`."""
        (m, _), n, alone = x.shape, len(wg), self.config.alone
        words = None
        if self.tiles:
            gate = _twell_gate.launch(x, wg, self.tiles, _twell_gate.Config(self.config.cluster))
            gate()
            g, words = gate.dense, gate.words
            on_tape(words)
        else:
            g = torch.mm(x, wg.t())
            on_tape(by_torch=MatrixProduct(x, wg.t(), g, fixed=True))
        y, groups = x.new_empty(x.shape), -(-m // GROUP)
        left, heavy = counters(x, 3), x.new_empty(groups, dtype=torch.int32)
        assert left is not None
        options: dict[str, Any] = {"squared": self.squared, "alone": alone}
        options |= {"words": words, "tiles": self.tiles}
        rest = _remainder.Rest(left, heavy, self.programs)
        split, limit = self.split(m), limit_of(m, n)
        sparse = launch(x, g, wu, wd_t, y, rest, split=split, limit=limit, **options)
        sparse()
        if self.tiles:
            on_tape(sparse.tensors[-1])
        if not alone:
            template = self.remainder(m, programs=self.programs, squared=self.squared)
            template(x, g, wu, wd_t, y, left, heavy)
        on_tape(g)
        on_tape(heavy)
        on_tape(y, owners=(self, wg, wu, wd_t, left))
        return y


def _remainder_of(
    m: int, n: int, k: int, dtype: torch.dtype, programs: int, squared: bool
) -> Template:
    """Return the dense products of X, G, Wu, Wd.T, Y, the counts and the groups that are left."""
    x, y, g, wu, wd_t = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape in ((m, k), (m, k), (m, n), (n, k), (n, k))
    )
    rest = _remainder.rest_of(m, programs, torch.device("meta"))
    products = _remainder.products(x, g, wu, wd_t, y, rest, squared=squared)
    return Template(products, (x, g, wu, wd_t, y, rest.left, rest.heavy), (y,))
