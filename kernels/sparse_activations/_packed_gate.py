"""The gate of a layer whose units are mostly off: a product that says who is on, in CUDA C++.

    bits    uint8 [ceil(m / 8), n]    of a unit and eight tokens: bit t is set where token t is on
    values  [m, n]                    X @ Wg.T where it is on; elsewhere what was there before

spense_wgmma.cu with PACKED, of an all dense W: its sums meet the bitmap and the stores in shared
memory, so that G is neither written whole nor read to find who is on. A unit is on unless its gate
is <= 0: any number of them has room, and NaN is on. Of 16 units and a token, 32 bytes of memory,
values are written if one is on. Bytes, at 29 units on of 5632:

    G, written and read    4 m n                          packed    m n / 4 and 2 x 0.08 x 2 m n
    m = 131072             2.95 GB                                  0.18 and 0.24 GB

Readers take eight tokens at a time (ffn_sparse.cu), or ask the bits first (_remainder.py).
"""

import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.cuda import BoundKernel
from sparsebench.kernels._common.search import fastest
from sparsebench.kernels.spense import spense_wgmma
from sparsebench.kernels.spense.spense_wgmma import Config

EIGHT = 8  # tokens of a byte


@dataclass(frozen=True)
class Gate:
    """Gates as drawn above, and the program that writes them in this configuration."""

    values: Tensor
    bits: Tensor
    program: BoundKernel
    config: Config

    @property
    def choice(self) -> dict[str, Any]:
        """Return the configuration, as a row holds it."""
        return asdict(self.config)

    def __call__(self) -> Tensor:
        """Enqueue the product on the current stream."""
        return self.program()


def packed(w: Tensor) -> Spense:
    """Return a weight [n, k] in the kernel's tiles, all dense."""
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
    """Pack the weight; take the pinned configuration, or the fastest of a few."""
    tiles = packed(w)
    configs = [Config(**pinned)] if pinned else spense_wgmma.configurations(len(x))
    gates = [launch(x, tiles, config) for config in configs]
    return gates[fastest(gates, x.device)]
