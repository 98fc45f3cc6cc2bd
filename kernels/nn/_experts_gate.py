"""The step between the two products of an expert, and its derivative, in torch.

Without a gradient, a GPU runs it in one launch (_common/experts_gate.py).

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

from sparsebench.kernels._common.experts_gate import ALPHA, CLAMPED, LIMIT
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


def joined_gradients(dg: Tensor, du: Tensor, *, in_turn: bool) -> Tensor:
    """Return dG and dU [rows, i] in the order of the products [rows, 2 i]."""
    if not in_turn:
        return torch.cat((dg, du), 1)
    return torch.stack([part.unflatten(1, (-1, TURN)) for part in (dg, du)], 2).flatten(1)
