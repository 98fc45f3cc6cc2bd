"""A gated MLP with block-sparse weights: Y = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T.

    gate_up   [2 h, k]   gate above up, one BlockSparseLinear: one product reads X
    act       without a gradient one launch, which reads G and U once and never writes act(G)
              (_common/elementwise.py); with one, torch, whose autograd differentiates it
    down      [k, h]     BlockSparseLinear

Three layers with act in torch between them, as in a Hugging Face model after `sparsify_`, read X
twice, and write and read act(G): 4 more bytes for each of m h elements in 16 bits. On an H200, at
95 % with h = 14336 and k = 4096, they took 1.2 to 1.4 times as long as bsr_ffn, which has the same
steps as this layer.
"""

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from sparsebench.formats._format import require, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.elementwise import gated
from sparsebench.kernels._common.transforms import device_guard, is_traced
from sparsebench.kernels.nn._bsr_pattern import grid_of
from sparsebench.kernels.nn._spense_engines import ACTIVATIONS as of_spense
from sparsebench.kernels.nn.linear import BlockSparseLinear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **of_spense,
    "relu2": lambda x: relu(x).square(),
}


class BlockSparseGatedMLP(nn.Module):
    """A gated MLP, for training and inference: the gradients are those of its two layers.

    gate_up, down  BlockSparseLinear without bias, of 2 h x k and k x h
    activation     silu, gelu_tanh, relu or relu2

    Raises FormatError if the layers do not fit together.
    """

    def __init__(
        self, gate_up: BlockSparseLinear, down: BlockSparseLinear, *, activation: str = "silu"
    ) -> None:
        """Take the layers."""
        super().__init__()
        names = ", ".join(ACTIVATIONS)
        valid = activation in ACTIVATIONS
        require(valid, f"activation: expected one of {names}; found {activation!r}")
        sizes = gate_up.out_features, gate_up.in_features
        expected = 2 * down.in_features, down.out_features
        require(sizes == expected, f"gate_up: expected {expected} as of down, found {sizes}")
        for name, layer in (("gate_up", gate_up), ("down", down)):
            require(layer.bias is None, f"{name}: expected no bias, found one")
        self.gate_up, self.down, self.activation = gate_up, down, activation

    @classmethod
    def from_layers(
        cls,
        gate: BlockSparseLinear,
        up: BlockSparseLinear,
        down: BlockSparseLinear,
        *,
        activation: str = "silu",
    ) -> Self:
        """Copy the blocks of gate and up [h, k] into one layer, and take down [k, h] itself.

        h is a multiple of the rows of a block. Raises FormatError.
        """
        (h, k), (r, c) = (gate.out_features, gate.in_features), gate.block
        layout = (up.out_features, up.in_features), up.block
        require(layout == ((h, k), (r, c)), f"up: expected {(h, k), (r, c)}, found {layout}")
        require(h % r == 0, f"gate: expected a multiple of {r} rows, found {h}")
        for name, layer in (("gate", gate), ("up", up)):
            require(layer.bias is None, f"{name}: expected no bias, found one")
        offsets = torch.cat((gate.offsets, up.offsets[1:] + gate.offsets[-1]))
        columns = torch.cat((gate.columns, up.columns))
        values = torch.cat((gate.values.detach(), up.values.detach()))
        both = layer_of(Bsr((2 * h, k), offsets, columns, values))
        both.values.requires_grad_(gate.values.requires_grad)
        return cls(both, down, activation=activation)

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., k] of X [..., k]. Raises Unsupported, FormatError."""
        y: Tensor = self.down(hidden(self.gate_up(x), self.activation))
        return y

    def freeze(self) -> Self:
        """Stop training both layers (BlockSparseLinear.freeze)."""
        self.gate_up.freeze()
        self.down.freeze()
        return self

    def plan(self, tokens: Iterable[int], *, search: bool = True) -> Self:
        """Plan these numbers of tokens now instead of at a first call (BlockSparseLinear.plan)."""
        numbers = [*tokens]
        self.gate_up.plan(numbers, search=search)
        self.down.plan(numbers, search=search)
        return self

    def extra_repr(self) -> str:
        """Return the activation."""
        return f"activation={self.activation}"


def layer_of(w: Bsr) -> BlockSparseLinear:
    """Return a layer without bias that has a copy of the blocks. Raises FormatError."""
    n, k = w.shape
    there = torch.zeros(grid_of(w.shape, w.block), dtype=torch.bool, device=w.columns.device)
    there[rows_of(w.offsets), w.columns.long()] = True
    options: dict[str, Any] = {"device": w.values.device, "dtype": w.values.dtype}
    layer = BlockSparseLinear(k, n, block=w.block, pattern=there, bias=False, **options)
    with torch.no_grad():
        layer.values.copy_(w.values)
    return layer


def hidden(products: Tensor, activation: str) -> Tensor:
    """Return H [..., h] of G and U, which are side by side in the products [..., 2 h]."""
    plain = type(products) is Tensor and products.is_cuda and products.numel() > 0
    if plain and not products.requires_grad and not is_traced():
        rows = products.view(-1, products.shape[-1])
        with device_guard(rows.device):
            h = gated(rows, activation)
        return h.view(*products.shape[:-1], -1)
    gate, up = products.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up
