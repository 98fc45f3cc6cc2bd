"""Feed-forward layer in groups of eight tokens: of each group, the units that are on for any token.

    G = X @ Wg.T                         the fastest way of cublas.py; or _packed_gate.py
    Y = (act(G) * (X @ Wu.T)) @ Wd.T     ffn_sparse.cu: units that are on, and no others
    the same, dense                      _remainder.py: groups with too many units on

Each call finds on the device which units are on. Nothing is packed, any number of units is right,
and the bits are the same at every call. Where a group has more rows (units that are on for any of
its tokens) than `limit`, ffn_sparse.cu leaves the group to the dense products. The host never
waits, so that a CUDA graph can hold the whole layer. The limit is the higher of two estimates of
how many rows take as long as dense products:

    many tokens   rows x 4 k bytes at L2_RATE  =  8 tokens x 4 n k FLOPs at DENSE_RATE
    few tokens    rows x groups                =  DENSE_READS n: two reads of the weights, launches

Where there are too few groups for all SMs, a cluster of up to 8 CTAs shares the units of a group.

Where X is not finite, a unit that is off counts as zero; dense products make it NaN.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.cuda import (
    BoundKernel,
    Constants,
    Layout,
    Loaded,
    ahead,
    clusters_at_once,
    load,
)
from sparsebench.kernels._common.tuned_table import multiprocessors
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.kernels.dense import cublas
from sparsebench.kernels.sparse_activations import _packed_gate, _remainder
from sparsebench.kernels.sparse_activations._layer import Layer
from sparsebench.kernels.sparse_activations._remainder import GROUP

MOST_SPLIT = 8
MOST_ROWS = 1536  # of a group, as ffn_sparse.cu has it
SHARED_BYTES = 192 * 1024  # of 227 KB, of which 30 are the kernel's own
L2_RATE, DENSE_RATE, DENSE_READS = 9e12, 7e14, 4.0  # bytes/s, FLOP/s of an H200 (NOTES.md)

GateProduct = Literal["library", "packed"]
"""Who writes G: a library, all of it; or _packed_gate.py, a bitmap and the values that are on."""

# x, g, wu, wd transposed, y, left, heavy; m, n, limit; bits
ARGUMENTS = Layout(*"PPPPPPPiiiP")


def split_of(m: int, at_once: Callable[[int], int]) -> int:
    """Return how many CTAs share a group: so many clusters of them run `at_once`."""
    groups = -(-m // GROUP)
    return next((s for s in range(MOST_SPLIT, 1, -1) if groups <= at_once(s)), 1)


def limit_of(m: int, n: int) -> int:
    """Return how many rows a group may have at most."""
    by_arithmetic = GROUP * n * L2_RATE / DENSE_RATE
    by_bytes = DENSE_READS * n / -(-m // GROUP)
    return min(n, MOST_ROWS, int(max(by_arithmetic, by_bytes)))


def threads_of(k: int) -> tuple[int, int]:
    """Return how many threads of a CTA multiply, and how many there are."""
    products = 256 if k > 1024 else 128
    return products, products + (256 if k <= 2048 else 128)


def shared_bytes(k: int) -> int:
    """Return the dynamic shared memory of a CTA: X and the stages, eight rows each."""
    return 6 * GROUP * 16 * threads_of(k)[0]


def clusters(split: int, k: int, device: torch.device) -> int:
    """Return how many clusters of `split` CTAs run at one time."""
    return clusters_at_once(split, threads_of(k)[1], SHARED_BYTES, device)


def constants_of(
    k: int, split: int, squared: bool, gated: bool, dtype: torch.dtype, packed: bool = False
) -> Constants:
    """Return what ffn_sparse.cu is compiled for."""
    half = dtype == torch.float16
    flags = {"SQUARED": squared, "GATED": gated, "PACKED": packed, "FP16": half}
    return ("K", k), ("SPLIT", split), *((name, int(flag)) for name, flag in flags.items())


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
    bits: Tensor | None = None,
) -> BoundKernel:
    """Return the kernel that writes Y of all groups that it does not leave to `rest`.

    x and y [m, k], gates g [m, n], wu and wd_t [n, k]; all contiguous, fp16 or bf16. Without wu,
    H is act(g). With the `bits` of _packed_gate.py, g is packed.
    """
    (m, k), n, device = x.shape, len(wd_t), x.device
    constants = constants_of(k, split, squared, wu is not None, x.dtype, bits is not None)
    kernel, code = load("ffn_sparse", "up_and_down", constants, SHARED_BYTES, device)
    groups, (_, threads) = len(rest.heavy), threads_of(k)
    grid = groups * split if split > 1 else min(groups, multiprocessors(device))
    shared = shared_bytes(k)
    loaded = Loaded(kernel, code, device.index, grid, threads, shared, early=True)
    kept = x, g, wd_t if wu is None else wu, wd_t, y, rest.left, rest.heavy
    at = 0 if bits is None else bits.data_ptr()
    args = ARGUMENTS(*(t.data_ptr() for t in kept), m, n, limit, at)
    return BoundKernel(loaded, args, kept if bits is None else (*kept, bits), y)


def prepare(operands: Operands, layer: Layer, gate: GateProduct) -> Launch:
    """Return the layer after this product of the gate. Raises Unsupported."""
    m, n, k = layer.sizes
    device, pinned = layer.x.device, (operands.pinned or {}).get("gate")
    split, squared = split_of(m, partial(clusters, k=k, device=device)), layer.squared
    gated, packed = layer.up is not None, gate == "packed"
    ahead("ffn_sparse", [constants_of(k, split, squared, gated, layer.x.dtype, packed)])
    if gate == "library":
        g, bits = layer.x.new_empty(m, n), None
        product = cublas.Product(layer.x, layer.gate.t(), g)
        gates: Launch | _packed_gate.Gate = cublas.fastest_way(product, pinned)
    elif layer.up is None:
        raise Unsupported("option way: a packed product needs a layer with a gate")
    else:
        gates = _packed_gate.prepare(layer.x, layer.gate, pinned)
        g, bits = gates.values, gates.bits
    rest, limit = _remainder.rest_of(m, multiprocessors(device), device), limit_of(m, n)
    x, up, wd, y = layer.x, layer.up, layer.wd, layer.y
    sparse = launch(
        x, g, up, layer.wd_t, y, rest, split=split, limit=limit, squared=squared, bits=bits
    )
    dense = _remainder.products(x, g, up, wd, y, rest, squared=squared, bits=bits)
    steps: list[Callable[[], object]] = [gates, sparse, *dense]

    def run() -> Tensor:
        for step in steps:
            step()
        return y

    choice = {"gate": gates.choice, "split": split, "limit": limit}
    return Launch(run, choice, sparse.code, gates.candidates)
