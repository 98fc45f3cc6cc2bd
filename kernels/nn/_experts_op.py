"""The torch operators of a mixture's experts (experts.py): their sums, and the gradients.

    s           the token of a row                                       [rows]
    p           the share of the row's expert in that token's sum        [rows]

    forward     G | U = X[s] @ GU_e.T     H = act(G) * U     Y = sum of the rows p (H @ D_e.T)
    backward    V = dY[s] @ D_e           dH = p V
                dp = V . H, row by row    dX = sum of the rows (dG | dU) @ GU_e
    blocks      dD_e = dY[s].T @ (p H)    dGU_e = (dG | dU).T @ X[s]

Backward routes, gathers and computes G and U again, so that forward saves X and what the router
chose, and nothing as long as the rows. dp needs no product of its own, because V . H is dY . (H @
D_e.T); SonicMoE does the same (arXiv 2512.14080). Sums are in the order of a token's choices, so
that the gradients are reproducible.

Weights are lists of tensors: what products read of it (`tensors_of`), then its bias if it has one,
[experts, rows of an expert], which has no gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats.bsr import Bsr
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.experts_gate import CLAMPED
from sparsebench.kernels._common.routing import combine, route
from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import aligned, device_guard
from sparsebench.kernels.nn._experts_engines import (
    Weight,
    input_gradient,
    multiply,
    weight_gradient,
    weight_of,
)
from sparsebench.kernels.nn._experts_gate import gradients_of, hidden_of, of_rows


class _Weights(NamedTuple):
    """The two weights and their biases; the features of the layer, to which X is padded."""

    gate_up: Weight
    down: Weight
    biases: tuple[Tensor | None, Tensor | None]
    features: int

    @property
    def in_turn(self) -> bool:
        """Return whether 8 rows of gate and of up alternate."""
        return isinstance(self.gate_up, Spense)


def _weights(
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    dtype: torch.dtype,
    experts: int,
    units: int,
    features: int,
    columns: Sequence[int] | None,
) -> _Weights:
    count, of_columns = (3, (None, None)) if columns is None else (2, columns)
    shapes = (experts * 2 * units, features), (experts * features, units)
    first, second = (
        weight_of(tensors[:count], shape, dtype, sparse)
        for tensors, shape, sparse in zip((gate_up, down), shapes, of_columns, strict=True)
    )
    biases = [tensors[count] if len(tensors) > count else None for tensors in (gate_up, down)]
    return _Weights(first, second, (biases[0], biases[1]), features)


def compute(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: list[Tensor],
    down: list[Tensor],
    experts: int,
    units: int,
    features: int,
    columns: list[int] | None,
    activation: str,
) -> Tensor:
    """Return the sums [m, h] of tokens X [m, h]. Raises Unsupported.

    ids, weights    the experts of each token and their shares [m, top_k]
    gate_up, down   weights, as lists of tensors
    units, features hidden units of an expert, and features of X, h or more, as the weights have
    columns         sparse columns of both weights in 2:4; None for blocks
    """
    if not ids.numel():
        return x.new_zeros(x.shape)
    w = _weights(gate_up, down, x.dtype, experts, units, features, columns)
    with device_guard(x.device):
        source, place, ends = route(aligned(ids), experts)
        rows = _padded(x, features).index_select(0, source)
        y = multiply(w.down, experts, _hidden(w, experts, rows, ends, activation), ends)
        if (bias := of_rows(w.biases[1], ends, len(rows))) is not None:
            y += bias
        total = combine(y, place, aligned(weights))
    return total if features == x.shape[1] else total[:, : x.shape[1]].contiguous()


def _hidden(w: _Weights, experts: int, rows: Tensor, ends: Tensor, activation: str) -> Tensor:
    """Return H [rows, units] of the rows X."""
    if activation != CLAMPED and w.biases[0] is None:
        return multiply(w.gate_up, experts, rows, ends, activation)
    products = multiply(w.gate_up, experts, rows, ends)
    return hidden_of(products, w.biases[0], ends, activation, in_turn=w.in_turn)


def _padded(x: Tensor, features: int) -> Tensor:
    return x if x.shape[1] == features else pad(x, (0, features - x.shape[1]))


def _differentiate(
    dy: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: list[Tensor],
    down: list[Tensor],
    experts: int,
    units: int,
    features: int,
    columns: list[int] | None,
    activation: str,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dX [m, h], the gradient of the shares [m, top_k], and those of the blocks of both.

    needed  which of them are computed; the others are empty. Raises Unsupported.
    """
    for_x, for_shares, for_gate_up, for_down = needed
    dx, dshares, dgate_up, ddown = _gradient_sizes(dy, x, ids, weights, gate_up, down, needed)
    if not ids.numel():
        return dx.zero_(), dshares, dgate_up.zero_(), ddown.zero_()
    w = _weights(gate_up, down, x.dtype, experts, units, features, columns)
    with device_guard(x.device):
        source, place, ends = route(aligned(ids), experts)
        rows, dy_rows = (_padded(each, features).index_select(0, source) for each in (x, dy))
        products = multiply(w.gate_up, experts, rows, ends)
        v = input_gradient(w.down, experts, dy_rows, ends)
        there, wide = place >= 0, torch.promote_types(x.dtype, torch.float32)
        last = len(rows)  # a row for the choices that have none
        at = place.where(there, last).flatten().long()
        share = x.new_zeros(last + 1, dtype=wide).scatter_(0, at, weights.flatten().to(wide))[:-1]
        operands = products, w.biases[0], ends, v, share, activation
        both, h, dots = gradients_of(*operands, in_turn=w.in_turn)
        if for_shares:
            if (bias := of_rows(w.biases[1], ends, len(rows))) is not None:
                dots += (dy_rows * bias.to(wide)).sum(1)
            dshares = dots[place.long()].where(there, 0).to(weights.dtype)
        if for_down:
            assert isinstance(w.down, Bsr)
            ddown = weight_gradient(w.down, experts, dy_rows, h, ends)
        if for_gate_up:
            assert isinstance(w.gate_up, Bsr)
            dgate_up = weight_gradient(w.gate_up, experts, both, rows, ends)
        if for_x:
            parts = input_gradient(w.gate_up, experts, both, ends)
            dx = combine(parts, place, torch.ones_like(weights))[:, : x.shape[1]].contiguous()
    return dx, dshares, dgate_up, ddown


def _gradient_sizes(
    dy: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_x, of_shares, of_gate_up, of_down = (
        t.new_empty(t.shape if each else 0)
        for t, each in zip((x, weights, gate_up[0], down[0]), needed, strict=True)
    )
    return of_x, of_shares, of_gate_up, of_down


gradients = torch_operator(
    "sparse_experts_gradients",
    _differentiate,
    lambda dy, x, ids, weights, gate_up, down, *layout: _gradient_sizes(
        *(dy, x, ids, weights, gate_up, down), layout[-1]
    ),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ids, weights, gate_up, down, *ctx.layout = inputs
    ctx.save_for_backward(x, ids, weights, *gate_up, *down)
    ctx.count = len(gate_up)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, ids, weights, *both = ctx.saved_tensors
    lists = both[: ctx.count], both[ctx.count :]
    needs = ctx.needs_input_grad
    needed = [needs[0], needs[2], needs[3][0], needs[4][0]]
    every = gradients(dy, x, ids, weights, *lists, *ctx.layout, needed)
    dx, dweights, dgate_up, ddown = (
        gradient if each else None for gradient, each in zip(every, needed, strict=True)
    )
    of_lists = (
        [gradient, *[None] * (len(tensors) - 1)]
        for gradient, tensors in zip((dgate_up, ddown), lists, strict=True)
    )
    return dx, None, dweights, *of_lists, *(None,) * 5


sparse_experts = torch_operator(
    "sparse_experts",
    compute,
    lambda x, *_: x.new_empty(x.shape),
    save=_save,
    backward=_backward,
)
