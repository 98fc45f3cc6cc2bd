"""Products of routed rows with dense experts by QuACK, whose kernels the CuTe DSL makes.

    Y = gemm(X, W [experts, k, n], cu_seqlens_m)      where rows of an expert begin, and the end

A tile has 128 to 256 rows of X, all of one expert, because QuACK's products of parts of X do not
exchange X and W. So with few rows per expert a tile is mostly empty. The search times the tiles and
clusters that QuACK's own tuner lists for such products on Hopper, 22 in version 0.6.5. Each is
compiled once and stored in QuACK's cache.

The launch copies `ends` behind a zero, which QuACK's users have from their router.
Source: quack/gemm_interface.py and gemm_config.py of quack-kernels 0.6.5.
"""

from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.requirements import HOPPER, unmet
from sparsebench.kernels._common.search import differing, fastest_choice
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem

PACKAGE = "quack", "quack-kernels"
ALIGNED = 8  # elements of a row, 16 bytes
CAPABILITY = HOPPER[0]


def unsupported(problem: Problem, device: torch.device) -> str | None:
    dtypes = "fp16", "bf16"
    return unmet(problem, device, HOPPER, *dtypes, package=PACKAGE, n=ALIGNED, k=ALIGNED)


def prepare(operands: Operands) -> Launch:
    """Time all tiles. Raises Unsupported if the package quack is another one."""
    x, ends = operands.activations["x"], operands.activations["ends"][0]
    w = operands.weights["w"].to_dense().view(len(ends), -1, x.shape[1]).transpose(1, 2)
    starts = ends.new_zeros(len(ends) + 1)

    def run(**tile: Any) -> Tensor:
        starts[1:].copy_(ends)
        return product(x, w, starts, tile)

    return fastest_choice(run, tiles(), operands)


def product(x: Tensor, w: Tensor, starts: Tensor, tile: Mapping[str, Any]) -> Tensor:
    """Return X @ W_e of each expert's rows, for W [experts, k, n], by one tile."""
    y, config = x.new_empty(len(x), w.shape[2]), config_of(tile)
    module("gemm_interface").gemm_tuned.fn(x, w, y, cu_seqlens_m=starts, config=config)
    return y


def tiles(epilogue: str | None = None, *, gathers: bool = False) -> list[dict[str, Any]]:
    """Return QuACK's tiles and clusters for a product of parts of X, with what differs."""
    configs = module("gemm_config")
    options = {"gather_A": gathers, "varlen_m": True}
    listed = [
        asdict(config)
        for config in configs.get_all_configs(epilogue)
        if config.device_capacity == CAPABILITY and configs.config_supports(config, **options)
    ]
    return differing(listed)


def config_of(tile: Mapping[str, Any]) -> Any:
    """Return the configuration of a tile, on Hopper, whose scheduler is a static one."""
    fixed = {"is_dynamic_persistent": False, "device_capacity": CAPABILITY}
    return module("gemm_config").GemmConfig(**{**fixed, **tile})


def module(name: str) -> Any:
    """Import a module of QuACK. Raises Unsupported without it."""
    try:
        return import_module(f"quack.{name}")
    except ImportError as error:
        raise Unsupported(f"expected quack-kernels 0.6.5 or newer, found {error}") from error


KERNEL = Kernel("experts", "dense", "cuda", prepare, unsupported)
