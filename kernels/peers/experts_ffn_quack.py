"""The gated layer of a mixture by two products of QuACK, between our launches that route.

    route    ids ─> the rows of each expert                 _common/routing.py
    gate_up  H = act(X @ Wg_e.T) * (X @ Wu_e.T)             gathers rows of X in its loads
    down     H @ Wd_e.T                                     experts_quack.py
    combine  the sum of a token's rows times its shares     _common/routing.py

Gate and up of an expert are one matrix, gate above up (`concat_layout`), and H leaves the kernel
without G and U. So SonicMoE uses QuACK, whose own routing needs another torch. The search times
every tile of each product: 9 of gate_up, because a gather allows one cluster, and 22 of down.
Source: quack/gemm_interface.py of quack-kernels 0.6.5.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsebench.kernels._common.gated_layer import dense_experts
from sparsebench.kernels._common.routing import combine, route
from sparsebench.kernels._common.search import fastest_choice, lines_of
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import experts_quack
from sparsebench.results.record import Problem

ACTIVATIONS = {"silu": "swiglu", "relu": "reglu"}


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if problem["activation"] not in ACTIVATIONS:
        return f"expected {' or '.join(ACTIVATIONS)}, found {problem['activation']}"
    return experts_quack.unsupported(problem, device)


def prepare(operands: Operands) -> Launch:
    """Time all tiles of both products, one after the other. Raises Unsupported."""
    problem, count = operands.problem, operands.problem["experts"]
    x, shares, ids = (operands.activations[name] for name in ("x", "shares", "ids"))
    both, down = (w.transpose(1, 2) for w in dense_experts(operands))
    options: dict[str, Any] = {"activation": ACTIVATIONS[problem["activation"]]}
    options |= {"store_preact": False, "concat_layout": ("B",)}
    starts = ids.new_zeros(count + 1, dtype=torch.int32)
    gated = experts_quack.module("gemm_interface").gemm_gated

    def hidden(source: Tensor, tile: Mapping[str, Any]) -> Tensor:
        config = experts_quack.config_of(tile)
        h: Tensor = gated(x, both, cu_seqlens_m=starts, A_idx=source, **options, config=config)[1]
        return h

    rows = route(ids, count)
    starts[1:].copy_(rows.ends[0])
    ways = experts_quack.tiles("gated", gathers=True)
    first = fastest_choice(
        lambda **tile: hidden(rows.source, tile), ways, _part(operands, "gate_up")
    )
    h = hidden(rows.source, first.choice)
    second = fastest_choice(
        lambda **tile: experts_quack.product(h, down, starts, tile),
        experts_quack.tiles(),
        _part(operands, "down"),
    )

    def run() -> Tensor:
        rows = route(ids, count)
        starts[1:].copy_(rows.ends[0])
        h = hidden(rows.source, first.choice)
        y = experts_quack.product(h, down, starts, second.choice)
        return combine(y, rows.place, shares)

    parts = {"gate_up": first, "down": second}
    lines = [line for name, part in parts.items() for line in lines_of(name, part)]
    return Launch(run, {name: part.choice for name, part in parts.items()}, candidates=lines)


def _part(operands: Operands, name: str) -> Operands:
    """Return the operands with what an earlier process chose for a part."""
    return replace(operands, pinned=operands.pinned and operands.pinned[name])


KERNEL = Kernel("experts_ffn", "dense", "cuda", prepare, unsupported)
