"""The gate of a layer whose units are mostly off: a product that also writes which units are on.

    bits    uint8 [ceil(m / 8), n]    for a unit and eight tokens: bit t is set if it is on for t
    values  [m, n]                    X @ Wg.T where a unit is on; elsewhere undefined

It is spense_wgmma.cu with PACKED, and a W that is all dense. Its epilogue makes the bitmap in
shared memory: G is neither written as a whole, nor read to find the units that are on. A unit is on
unless its gate is <= 0: NaN is on. There is room for any number of units. The values of 16 units of
a token, 32 bytes, are written if one of them is on. Bytes of memory traffic at 29 units on of 5632:

    G, written and read    4 m n                          packed    m n / 4 and 2 x 0.08 x 2 m n
    m = 131072             2.95 GB                                  0.18 and 0.24 GB

ffn_sparse.cu reads the bits of eight tokens at a time; _remainder.py reads a value's bit first.
"""

import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.cuda import compile_ahead
from sparsebench.kernels.spense import spense_wgmma
from sparsebench.kernels.spense.spense_wgmma import Config
from sparsebench.kernels.twell._gate import Gate, fastest

EIGHT = 8  # tokens to a byte


def packed(w: Tensor) -> Spense:
    """Return a weight [n, k] in the tiles of spense_wgmma, all dense."""
    return Spense.from_dense(w, dense_fraction=1.0)


def launch(x: Tensor, w: Spense, config: Config, *, watchdog: bool = False) -> Gate:
    """Return the gate of x [m, k] and a packed weight [n, k], fp16 or bf16."""
    if reason := spense_wgmma.unsupported_operands(x, w):
        raise Unsupported(reason)
    if x.itemsize != 2:
        raise Unsupported(f"expected fp16 or bf16, found {x.dtype}")
    m, n = len(x), w.shape[0]
    plan = spense_wgmma.plan(w, m, config, packed=True, watchdog=watchdog)
    values = x.new_empty(m, n)
    bits = torch.empty(-(-m // EIGHT), n, dtype=torch.uint8, device=x.device)
    to = struct.pack("PPii", values.data_ptr(), bits.data_ptr(), m, n)
    return Gate(values, bits, spense_wgmma.program(plan, x, w, values, to), config)


def prepare(x: Tensor, w: Tensor, pinned: Mapping[str, Any] | None) -> Gate:
    """Pack the weight [n, k]; take the pinned configuration, or the fastest of a few."""
    tiles = packed(w)
    configs = [Config(**pinned)] if pinned else spense_wgmma.configurations(len(x))
    constants = [spense_wgmma.constants_of(each, x.dtype, packed=True) for each in configs]
    compile_ahead("spense_wgmma", constants)
    gates = [launch(x, tiles, config) for config in configs]
    return fastest(gates, x.device)
