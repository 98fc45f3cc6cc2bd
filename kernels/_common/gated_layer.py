"""Launches of gated layers in suites. Each of their two products has a plan of its own.

    gate_up   H = act(X @ Wg.T) * (X @ Wu.T)     Wg and Wu are one matrix
    down      Y = H @ Wd.T

In a mixture, routing.py sorts the tokens by expert first, and adds up a token's rows last:

    route     ids ─> the rows of each expert
    gather    X ─> the rows, sorted by expert
    gate_up, down                                 W_e of each expert
    combine   the sum of a token's rows times its shares
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsebench.kernels._common.operator import Earlier, OperatorCall, launch_of
from sparsebench.kernels._common.product import Selected
from sparsebench.kernels._common.routing import Route, combine, route
from sparsebench.kernels._common.search import lines_of
from sparsebench.kernels._kernel import Launch, Operands, Output

Bind = Callable[[Tensor, Tensor], OperatorCall]
"""(rows [m top_k, k], ends [1, experts]) -> the call of a product with its weight."""


def dense_experts(operands: Operands) -> tuple[Tensor, Tensor]:
    """Return dense weights: gate above up [experts, 2 n, k], and down [experts, k, n]."""
    wg, wu, wd = (
        operands.weights[name].to_dense().unflatten(0, (operands.problem["experts"], -1))
        for name in ("wg", "wu", "wd")
    )
    return torch.cat([wg, wu], 1), wd


def launch_of_layer(run: Callable[[], Output], parts: Mapping[str, Selected | None]) -> Launch:
    """Return the launch of a layer; torch makes the products that have no plan."""
    launches = {name: launch_of(each, run) for name, each in parts.items() if each}
    choice: dict[str, Any] = {name: each.choice for name, each in launches.items()}
    code = next((each.code for each in launches.values() if each.code), None)
    lines = [line for name, each in launches.items() for line in lines_of(name, each)]
    return Launch(run, choice or {"kernel": "torch"}, code, lines)


def launch_of_experts(
    operands: Operands,
    earlier: Earlier | None,
    gate_up: Bind,
    down: Bind,
) -> Launch:
    """Plan both products of op experts_ffn, each with a search of its own, and return the layer.

    earlier  what earlier processes of the run chose; None for the call of a user

    Raises Unsupported.
    """
    experts = operands.problem["experts"]
    x, shares, ids = (operands.activations[name] for name in ("x", "shares", "ids"))

    def sort() -> tuple[Route, Tensor]:
        rows = route(ids, experts)
        return rows, x.index_select(0, rows.source)

    rows, x_rows = sort()
    call = gate_up(x_rows, rows.ends)
    first = call.select(earlier and earlier.part("gate_up"))
    both = call.weights(first.product)
    call = down(first.product.run(x_rows, rows.ends, *both), rows.ends)
    second = call.select(earlier and earlier.part("down"))
    wd = call.weights(second.product)

    def run() -> Tensor:
        rows, x_rows = sort()
        h = first.product.run(x_rows, rows.ends, *both)
        y = second.product.run(h, rows.ends, *wd)
        return combine(y, rows.place, shares)

    return launch_of_layer(run, {"gate_up": first, "down": second})
