"""The gated layer of a mixture by two products of QuACK, between our launches that route.

    route    ids ─> the rows of each expert                 _common/routing.py
    gate_up  H = act(X @ Wg_e.T) * (X @ Wu_e.T)             of rows of X that it gathers, or copies
    down     H @ Wd_e.T                                     experts_quack.py
    combine  the sum of a token's rows times its shares     _common/routing.py

Gate and up of an expert are one matrix, and H leaves the kernel without G and U. The search first
times four ways to compute H with one tile each, and then all tiles of the fastest way and of down:

    gathers    the kernel gathers rows of X in its loads; otherwise they are copied before, in the
               launch. A gather allows 9 of 18 tiles and clusters
    alternate  rows of gate and up alternate, stored so beforehand, as SonicMoE has them; otherwise
               gate is above up (`concat_layout`)

Source: quack/gemm_interface.py of quack-kernels 0.6.5.
"""

from dataclasses import replace
from functools import partial
from itertools import product
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
    """Time both products, one after the other. Raises Unsupported."""
    problem, count = operands.problem, operands.problem["experts"]
    x, shares, ids = (operands.activations[name] for name in ("x", "shares", "ids"))
    above, down = (w.transpose(1, 2) for w in dense_experts(operands))
    alternating = torch.stack(above.chunk(2, 2), -1).flatten(2).mT.contiguous().mT
    options: dict[str, Any] = {"activation": ACTIVATIONS[problem["activation"]]}
    options |= {"store_preact": False}
    starts = ids.new_zeros(count + 1, dtype=torch.int32)
    gated = experts_quack.module("gemm_interface").gemm_gated

    def hidden(source: Tensor, *, gathers: bool, alternate: bool, **tile: Any) -> Tensor:
        rows, gather = (x, {"A_idx": source}) if gathers else (x.index_select(0, source), {})
        both, layout = (alternating, {}) if alternate else (above, {"concat_layout": ("B",)})
        config = experts_quack.config_of(tile)
        given = {**options, **gather, **layout, "cu_seqlens_m": starts, "config": config}
        h: Tensor = gated(rows, both, **given)[1]
        return h

    rows = route(ids, count)
    starts[1:].copy_(rows.ends[0])
    run_rows, part = partial(hidden, rows.source), _part(operands, "gate_up")
    tiles = {g: experts_quack.tiles("gated", gathers=g) for g in (True, False)}
    ways = [{"gathers": g, "alternate": a} for g, a in product(tiles, (False, True))]
    way = fastest_choice(run_rows, [{**w, **tiles[w["gathers"]][0]} for w in ways], part).choice
    way = {name: way[name] for name in ("gathers", "alternate")}
    listed = [{**way, **tile} for tile in tiles[way["gathers"]]]
    first = fastest_choice(run_rows, listed, part)
    h = hidden(rows.source, **first.choice)
    second = fastest_choice(
        lambda **tile: experts_quack.product(h, down, starts, tile),
        experts_quack.tiles(),
        _part(operands, "down"),
    )

    def run() -> Tensor:
        rows = route(ids, count)
        starts[1:].copy_(rows.ends[0])
        h = hidden(rows.source, **first.choice)
        y = experts_quack.product(h, down, starts, second.choice)
        return combine(y, rows.place, shares)

    parts = {"gate_up": first, "down": second}
    lines = [line for name, part in parts.items() for line in lines_of(name, part)]
    return Launch(run, {name: part.choice for name, part in parts.items()}, candidates=lines)


def _part(operands: Operands, name: str) -> Operands:
    """Return the operands with what an earlier process chose for a part."""
    return replace(operands, pinned=operands.pinned and operands.pinned[name])


KERNEL = Kernel("experts_ffn", "dense", "cuda", prepare, unsupported)
