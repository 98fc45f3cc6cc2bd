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

from collections.abc import Callable

import torch
from torch import Tensor

from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.twell._call import TwellCall

TOKENS, UNITS = 128, 256  # tokens and units of a CTA's tile
BOX_TOKENS, BOX = 64, 64  # tokens and columns of k in a box of X
THREADS = 384
TILE, CAPACITY = 256, 31  # units of a tile of words, and entries that it has room for
CLUSTERS = 2, 1  # CTAs that share boxes of W; the first is for many tokens
LARGEST = 2**31 - 1  # an int32

Writer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(x [m, k], w [n, k]) -> words and dense tiles, new tensors."""


def writer(device: torch.device, call: TwellCall, cluster: int) -> Writer:
    """Compile the product of X and a gate. Raises Unsupported."""
    refuse(unsupported_sizes(call.m, call.n))
    constants = constants_of(cluster, call.dtype)
    kernel = cuda.load("twell_gate", "write_words", constants, cuda.SHARED_BYTES, device)
    n, k, most = call.n, call.k, multiprocessors(device) // cluster

    def write(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        m = len(x)
        words = x.new_empty(m, -(-n // TILE) * (CAPACITY + 1), dtype=torch.int32)
        dense = x.new_empty(m, n)
        tiles = -(-m // (TOKENS * cluster)) * -(-n // UNITS)
        maps = [
            cuda.tensor_map(t.data_ptr(), (len(t), k), (*t.stride(),), t.dtype, (rows, BOX))
            for t, rows in ((x, BOX_TOKENS), (w, UNITS // cluster))
        ]
        args = kernel.arguments(*maps, words.data_ptr(), dense.data_ptr(), m, n, k)
        grid = min(2 * tiles, most) * cluster
        kernel.on(grid, THREADS).enqueue(args)
        cuda.on_tape(words)
        cuda.on_tape(dense)
        return words, dense

    return write


def constants_of(cluster: int, dtype: torch.dtype) -> cuda.Constants:
    """Return the macros of twell_gate.cu."""
    return (
        *(("CLUSTER", cluster), ("TILE", TILE), ("CAPACITY", CAPACITY)),
        *(("FP16", int(dtype == torch.float16)), ("SHARED_BYTES", cuda.SHARED_BYTES)),
    )


def unsupported_sizes(m: int, n: int) -> str | None:
    """Return why the kernel cannot write m tokens of n units, or None."""
    if m > LARGEST - 2 * UNITS or n > 2**16:
        return f"expected less than 2^31 tokens and at most 2^16 units, found {m} and {n}"
    return None
