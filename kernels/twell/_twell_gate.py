"""The gate of a layer with few active units, as TwELL words: twell_gate.cu.

    words  int32 [m, tiles * (capacity + 1)]    the layout of formats/twell.py; a tile's count is
                                                that of all its active units
    dense  [m, n]                               relu of the gates of tiles whose count exceeds the
                                                capacity; untouched elsewhere

No gate is lost, because readers take a tile with too many entries from `dense`. Bytes of memory
traffic with 29 of 5632 units active, tiles of 256 with 31 entries:

    G, written and read    4 m n                  words    2 x 32 m n / 256
    m = 131072             2.95 GB                         0.18 GB

Most tiles fit into 32 bytes, a count and seven entries.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.cuda import (
    TMA_ALIGNMENT,
    BoundKernel,
    Constants,
    Layout,
    Loaded,
    load,
    tensor_map,
)
from sparsebench.kernels._common.search import search
from sparsebench.kernels._common.device import multiprocessors

TOKENS, UNITS = 128, 256  # tokens and units of a CTA's tile
BOX_TOKENS, BOX = 64, 64  # tokens and columns of k in a box of X
THREADS = 384
SHARED_BYTES = 227 * 1024
TILES = 64, 128, 256
LARGEST = 2**31 - 1  # an int32
ARGUMENTS = Layout("256s", "PPiii4x")  # tensor maps of x and w; words, dense, m, n, k


@dataclass(frozen=True)
class Tiles:
    """The units of a tile and its slots."""

    tile: int = 256
    capacity: int = 31

    @property
    def words(self) -> int:
        """Return the 32-bit words of a tile: the count and the entries."""
        return self.capacity + 1

    def unsupported(self) -> str | None:
        """Return why twell_gate.cu cannot write these tiles, or None."""
        if self.tile not in TILES:
            return f"option tile: expected one of {', '.join(map(str, TILES))}, found {self.tile}"
        capacities = [2**i - 1 for i in range(2, self.tile.bit_length()) if 2**i <= self.tile // 2]
        if self.capacity not in capacities:
            expected = ", ".join(map(str, capacities))
            return f"option capacity: expected one of {expected}, found {self.capacity}"
        return None


@dataclass(frozen=True)
class Config:
    """The number of CTAs that share boxes of W, 1 or 2."""

    cluster: int


@dataclass(frozen=True)
class Gate:
    """Gates as words and dense tiles, and the kernel that writes both."""

    words: Tensor
    dense: Tensor
    program: BoundKernel
    config: Config
    candidates: tuple[Mapping[str, Any], ...] = ()  # as of a Launch

    @property
    def choice(self) -> dict[str, Any]:
        """Return the configuration as a row holds it."""
        return asdict(self.config)

    def __call__(self) -> Tensor:
        """Enqueue the product on the current stream."""
        return self.program()


def configurations() -> list[Config]:
    """Return all configurations; the first is for many tokens."""
    return [Config(2), Config(1)]


def launch(x: Tensor, w: Tensor, tiles: Tiles, config: Config, *, watchdog: bool = False) -> Gate:
    """Return the gate of x [m, k] and a weight [n, k], fp16 or bf16. Raises Unsupported."""
    (m, k), n, device = x.shape, len(w), x.device
    if reason := unsupported_operands(x, w) or tiles.unsupported():
        raise Unsupported(reason)
    words = torch.empty(m, -(-n // tiles.tile) * tiles.words, dtype=torch.int32, device=device)
    dense = x.new_empty(m, n)
    constants = constants_of(tiles, config, x.dtype) + ((("WATCHDOG", 1),) if watchdog else ())
    kernel, code = load("twell_gate", "write_words", constants, SHARED_BYTES, device)
    tiles_of_clusters = -(-m // (TOKENS * config.cluster)) * -(-n // UNITS)
    grid = min(2 * tiles_of_clusters, multiprocessors(device) // config.cluster)
    loaded = Loaded(kernel, code, device.index, grid * config.cluster, THREADS, SHARED_BYTES)
    maps = [
        tensor_map(t.data_ptr(), (len(t), k), (t.stride(0), t.stride(1)), t.dtype, (rows, BOX))
        for t, rows in ((x, BOX_TOKENS), (w, UNITS // config.cluster))
    ]
    args = ARGUMENTS(b"".join(maps), words.data_ptr(), dense.data_ptr(), m, n, k)
    return Gate(words, dense, BoundKernel(loaded, args, (x, w, dense), words), config)


def prepare(x: Tensor, w: Tensor, tiles: Tiles, pinned: Mapping[str, Any] | None) -> Gate:
    """Take the pinned configuration, or the fastest. Raises Unsupported."""
    configs = [Config(**pinned)] if pinned else configurations()
    gates = [launch(x, w, tiles, config) for config in configs]
    result = search(gates, x.device)
    candidates = tuple(result.lines([gate.choice for gate in gates]))
    return replace(gates[result.best], candidates=candidates)


def constants_of(tiles: Tiles, config: Config, dtype: torch.dtype) -> Constants:
    """Return the macros of twell_gate.cu."""
    return (
        ("CLUSTER", config.cluster),
        ("TILE", tiles.tile),
        ("CAPACITY", tiles.capacity),
        ("FP16", int(dtype == torch.float16)),
        ("SHARED_BYTES", SHARED_BYTES),
    )


def unsupported_operands(x: Tensor, w: Tensor) -> str | None:
    """Return the first condition of the kernel that fails, or None."""
    if x.dtype != w.dtype or x.itemsize != 2:
        return f"expected fp16 or bf16 of one dtype, found {x.dtype} and {w.dtype}"
    if x.dim() != 2 or x.shape[1:] != w.shape[1:]:
        return f"expected activations of {w.shape[1]} columns, found shape {list(x.shape)}"
    if w.shape[1] % (TMA_ALIGNMENT // 2) or len(w) % 8:
        return f"expected n and k to be multiples of 8, found n {len(w)} and k {w.shape[1]}"
    if not 0 < len(x) <= LARGEST - 2 * UNITS or not 0 < len(w) <= 2**16:
        return f"expected 1 to 2^31 tokens and 1 to 2^16 units, found {len(x)} and {len(w)}"
    return None
