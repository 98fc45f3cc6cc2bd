"""A gated MLP that is trained with few hidden units on: it computes and keeps those alone.

    G = X @ Wg.T     Y = (act(G) * (X @ Wu.T)) @ Wd.T     L1 = mean over tokens of sum |act(G) * U|

    forward                                         backward
    G       dense, by cuBLAS, and let go            dH      of units that are on
    index   which units are on, by token            dX      dG @ Wg + dU @ Wu, of such units
            and by unit, with g and u of each       dW      sums over the tokens a unit is on for

Kept from forward to backward are X, and of each of the `slots` a token has, on average: g, u, the
unit, and the place and token of the transposed index: 14 bytes of 16-bit operands, where dense
layers keep 6 bytes for every unit: act(G), U and H.

Tiles as TwELL has them (formats/twell.py) would each have slots of their own. Here slots are of all
tokens together: one with all its units on takes as many as it has. Where all do not suffice,
nothing is lost: the call is dense, gate and up are made again in backward (11 products for 9), and
what is kept is as large as before. The device decides; the host never waits, and a CUDA graph holds
both ways, which is why backward has room for two matrices [tokens, units] in any case.

Such a step takes up to 1.8 times as long as dense layers do (sparse_activations/NOTES.md). A layer
with many units on, as one has that is not trained yet, can be told to be dense (`sparse`), or to
decide (`settle`, by what the last call counted): products by cuBLAS, and what dense layers keep. It
never changes by itself: when the host hears of a count depends on how far the device has come, and
so would the bits, and the memory that a step takes.

    CUDA, compute capability 8.0 and newer     Triton (sparse_activations/_autograd.py); sizes of
                                               multiples of 8
    CPU                                        torch, dense products: a reference, not a kernel

Where X or dY is not finite, a unit that is off counts as zero; dense products may make it NaN.
The L1 term is that of Cetin et al., arXiv 2603.23198, as their code has it: without a division by
the number of units. Their published coefficient, 2e-5, belongs to a mean of it over layers.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require
from sparsebench.kernels.sparse_activations._autograd import (
    SHARE,
    dense_forward,
    gated_mlp,
    require_one_kind,
)

# One unit of so many on: a step takes as long as a compiled dense one, by measurement
# (sparse_activations/NOTES.md).
EVEN = 94


class SparseGatedMLP(nn.Module):
    """A gated MLP with relu or relu2 (its square), without bias, for training.

    gate, up, down  nn.Linear, with the state dict that three of them have
    slots           of a token, on average, for units that are on; a 64th of all if not given
    sparse          whether calls compute and keep what is on alone, or as dense layers do; a graph
                    keeps what it was captured with, torch.compile compiles each once
    active          units on for a token in the last call, on average, rounded up: a number on the
                    layer's device; with more than `slots` a sparse call was dense, and slower

    Y, and the gradients, are those of dense layers at any number of units that are on. Down's
    weight lies transposed in memory, as it is read, and so do its gradient and optimizer state:
    another layout (assign=True) is as right, and costs a copy a call. Raises FormatError.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation: str = "relu",
        slots: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draw the weights as nn.Linear does."""
        super().__init__()
        k, n = in_features, hidden_features
        known = activation in ("relu", "relu2")
        require(known, f"activation: expected relu or relu2, found {activation!r}")
        slots = -(-n // SHARE) if slots is None else slots
        require(0 < slots <= n, f"slots: expected 1 to {n}, the hidden units, found {slots}")
        self.in_features, self.hidden_features = k, n
        self.activation, self.slots = activation, slots
        made: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.gate, self.up = nn.Linear(k, n, **made), nn.Linear(k, n, **made)
        self.down = nn.Linear(n, k, **made)
        self.down.weight = nn.Parameter(self.down.weight.detach().t().contiguous().t())
        self.sparse = True
        self.active: Tensor
        active = torch.zeros((), dtype=torch.int32, device=device)
        self.register_buffer("active", active, persistent=False)

    @classmethod
    def from_dense(
        cls,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        *,
        activation: str = "relu",
        slots: int | None = None,
    ) -> Self:
        """Take copies of gate and up [n, k] and down [k, n]. Raises FormatError."""
        require(gate.dim() == 2, f"gate: expected a matrix [n, k], found {list(gate.shape)}")
        n, k = gate.shape
        for name, weight, size in (("up", up, [n, k]), ("down", down, [k, n])):
            found = [*weight.shape]
            require(found == size, f"{name}: expected {size}, found {found}")
        made: dict[str, Any] = {"device": gate.device, "dtype": gate.dtype}
        mlp = cls(k, n, activation=activation, slots=slots, **made)
        with torch.no_grad():
            for layer, weight in ((mlp.gate, gate), (mlp.up, up), (mlp.down, down)):
                layer.weight.copy_(weight)
        return mlp

    def forward(self, x: Tensor, *, l1: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return Y [..., k] of X [..., k], and the L1 term, a number in fp32, if asked.

        Raises Unsupported.
        """
        k = self.in_features
        if x.dim() == 0 or x.shape[-1] != k:
            raise Unsupported(f"expected [..., {k}], found {list(x.shape)}")
        wg, wu, wd_t = self.gate.weight, self.up.weight, self.down.weight.t()
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, wg, wu, wd_t = (t.to(dtype) for t in (x, wg, wu, wd_t))
        flat, squared = x.reshape(-1, k), self.activation == "relu2"
        tokens = max(1, len(flat))
        if self.sparse:
            y, norms, offsets, *_ = gated_mlp(flat, wg, wu, wd_t, squared, self.slots)
            on = offsets[-1]
        else:
            require_one_kind(flat, wg, wu, wd_t)
            y, norms, on = dense_forward(flat, wg, wu, wd_t, squared, l1)
        self.active.copy_(on // -tokens).neg_()  # rounded up
        y = y.view(x.shape)
        return (y, norms.sum() / tokens) if l1 else y

    def settle(self) -> bool:
        """Take the faster way from now on, for as many units as were on in the last call.

        Returns `sparse`. Waits for the device: after the first step, then every hundred or so.
        """
        active = int(self.active)
        self.sparse = active <= self.slots and active * EVEN <= self.hidden_features
        return self.sparse

    def extra_repr(self) -> str:
        """Say the activation, the slots, and the way."""
        slots = f"slots={self.slots} of {self.hidden_features}"
        return f"activation={self.activation}, {slots}, sparse={self.sparse}"
