"""The plans of layers with 2:4 hybrid weights: spense_wgmma in its likeliest configurations.

All layers of a shape share their plans, because a plan does not depend on the values of W.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.selection import Candidate, Operator, Product, config_of
from sparsebench.kernels.spense import spense_wgmma
from sparsebench.results.record import Problem

MORE = 4  # configurations for more tokens that a search times too
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
"""Names of dtypes; state dicts store the position."""

Layout = tuple[int, int, int, int, str | None]
"""n and k of W, rows and columns of its sparse part, and the activation."""


def operator_of_layer(w: Spense, activation: str | None) -> Operator:
    """Return the plans of a weight; with an activation, W is gate and up."""
    return operator_of_tiles(w.sparse, w.dense, (*w.shape, *w.sparse_shape, activation), w.dtype)


def operator_of_tiles(sparse: Tensor, dense: Tensor, layout: Layout, kind: torch.dtype) -> Operator:
    """Return the plans of a weight in these tiles."""
    n, k, rows, columns, activation = layout
    tiles = sparse.shape, dense.shape
    return operator_of((n, k), (rows, columns), tiles, kind, activation, sparse.device)


@lru_cache(256)
def operator_of(
    shape: tuple[int, int],
    sparse_shape: tuple[int, int],
    tiles: tuple[torch.Size, torch.Size],
    dtype: torch.dtype,
    activation: str | None,
    device: torch.device,
) -> Operator:
    """Return the plans of all layers of a shape, by number of tokens (selection.bucket)."""
    (n, k), (rows, columns) = shape, sparse_shape

    def offer(m: int, choice: Mapping[str, Any] | None) -> list[Iterable[Candidate]]:
        parts = (torch.empty(size, dtype=torch.uint8, device="meta") for size in tiles)
        w = Spense(shape, dtype, sparse_shape, *parts)
        x = torch.empty(m, k, dtype=dtype, device="meta")
        reason = spense_wgmma.unsupported(Problem("linear", {"dtype": NAMES[dtype]}), device)
        if reason := reason or spense_wgmma.unsupported_operands(x, w, activation):
            raise Unsupported(reason)
        if choice:
            configs = [config_of(spense_wgmma, choice)]
        else:  # and the likeliest for half as many tokens more, so that more never take less time
            at = shape, dtype.itemsize, device
            more = spense_wgmma.searched(m + m // 2, *at)[:MORE]
            configs = list(dict.fromkeys([*spense_wgmma.searched(m, *at), *more]))
        plan = partial(spense_wgmma.plan, w, m, activation=activation, device=device)

        def product(config: spense_wgmma.Config) -> Product:
            return spense_wgmma.Product(plan(config))

        return [[Candidate("spense_wgmma", c, partial(product, c)) for c in configs]]

    def problem(m: int) -> dict[str, Any]:
        density = float(f"{1 - rows * columns / (2 * n * k):.2g}")
        fields = {"op": "spense.linear", "dtype": NAMES[dtype], "activation": activation}
        return {**fields, "m": m, "n": n, "k": k, "density": density}

    return Operator(("spense_wgmma",), offer, problem, device)
