"""The step between the two products of an expert, and its derivative, in torch.

A GPU runs either in one launch (_common/experts_gate.py).

    silu, gelu_tanh, relu    H = act(G) * U
    clamped_swiglu           H = (U' + 1) * G' * sigmoid(1.702 G')     of gpt-oss
                             G' = min(G, 7),  U' = U between -7 and 7

    products [rows, 2 i]     2:4: 8 columns of G, then 8 of U, and so on (spense_ffn.py)
                             blocks: G, then U
    bias [experts, 2 i]      of G, then of U, whatever the order of the products

G and U are widened to 32 bits, so that H and the gradients are rounded once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsebench.kernels._common.experts_gate import (
    ALPHA,
    CLAMPED,
    LIMIT,
    differentiate_gate,
    gate_experts,
)
from sparsebench.kernels.nn._spense_engines import ACTIVATIONS
from sparsebench.kernels.nn._spense_op import DERIVATIVES
from sparsebench.kernels.spense.spense_ffn import TURN

GATES = *ACTIVATIONS, CLAMPED


class GatedProducts(NamedTuple):
    """G and U [rows, i] in 32 bits or more, after their bias."""

    gate: Tensor
    up: Tensor
    activation: str

    def hidden(self) -> Tensor:
        """Return H [rows, i]."""
        gate, up, activation = self
        if activation == CLAMPED:
            gate = gate.clamp(max=LIMIT)
            return (up.clamp(-LIMIT, LIMIT) + 1) * gate * torch.sigmoid(ALPHA * gate)
        return ACTIVATIONS[activation](gate) * up

    def gradients(self, dh: Tensor) -> tuple[Tensor, Tensor]:
        """Return dG and dU [rows, i] of dH, of the same dtype."""
        gate, up, activation = self
        if activation != CLAMPED:
            dg: Tensor = DERIVATIVES[activation](dh * up, gate)
            return dg, dh * ACTIVATIONS[activation](gate)
        g, u = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        s = torch.sigmoid(ALPHA * g)
        dg = (dh * (u + 1) * s * (1 + ALPHA * g * (1 - s))).where(gate <= LIMIT, 0)
        return dg, (dh * g * s).where(up.abs() <= LIMIT, 0)


def gated_of(
    products: Tensor, activation: str, *, in_turn: bool, bias: Tensor | None = None
) -> GatedProducts:
    """Return G and U of products [rows, 2 i].

    in_turn  8 columns of each alternate, as in 2:4
    bias     [rows, 2 i], G first
    """
    if in_turn:
        parts = products.unflatten(1, (-1, 2, TURN)).unbind(2)
        gate, up = (part.flatten(1) for part in parts)
    else:
        gate, up = products.chunk(2, 1)
    wide = torch.promote_types(products.dtype, torch.float32)
    gate, up = gate.to(wide), up.to(wide)
    if bias is not None:
        of_gate, of_up = bias.chunk(2, 1)
        gate, up = gate + of_gate, up + of_up
    return GatedProducts(gate, up, activation)


def of_rows(bias: Tensor | None, ends: Tensor, rows: int) -> Tensor | None:
    """Return the bias of each row's expert [rows, n]; rows after the last end have the last's."""
    if bias is None:
        return None
    number = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    return bias[torch.searchsorted(ends[0], number, right=True).clamp(max=len(bias) - 1)]


def hidden_of(
    products: Tensor, bias: Tensor | None, ends: Tensor, activation: str, *, in_turn: bool
) -> Tensor:
    """Return H [rows, i] of products [rows, 2 i]; the bias is that of experts [experts, 2 i]."""
    if products.is_cuda:
        return gate_experts(products, bias, ends, activation, in_turn=in_turn)
    bias = of_rows(bias, ends, len(products))
    gated = gated_of(products, activation, in_turn=in_turn, bias=bias)
    return gated.hidden().to(products.dtype)


def gradients_of(
    products: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    v: Tensor,
    share: Tensor,
    activation: str,
    *,
    in_turn: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dG and dU of dH = share V in the order of the products, share H, and V . H [rows].

    v      [rows, i]
    share  [rows], in 32 bits or more
    """
    if products.is_cuda:
        return differentiate_gate(products, bias, ends, v, share, activation, in_turn=in_turn)
    bias = of_rows(bias, ends, len(products))
    gated = gated_of(products, activation, in_turn=in_turn, bias=bias)
    h, dh, part = gated.hidden(), v.to(gated.gate.dtype), share[:, None]
    parts = gated.gradients(part * dh)
    if in_turn:
        both = torch.stack([each.unflatten(1, (-1, TURN)) for each in parts], 2).flatten(1)
    else:
        both = torch.cat(parts, 1)
    return both.to(products.dtype), (part * h).to(products.dtype), (dh * h).sum(1)
