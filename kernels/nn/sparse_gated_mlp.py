"""A gated MLP for training with few active hidden units: it computes and stores only those.

    G = X @ Wg.T     Y = (act(G) * (X @ Wu.T)) @ Wd.T     L1 = mean over tokens of sum |act(G) * U|

    forward                                         backward
    G       dense, by cuBLAS, and freed             dH      of active units
    index   the active units, by token and          dX      dG @ Wg + dU @ Wu, of active units
            by unit, with g and u of each           dW      sums over tokens with the unit active

A token has `slots` on average. A slot stores g, u and the unit, and the position and token of the
transposed index: 14 bytes with 16-bit operands. Dense layers store act(G), U and H: 6 bytes for
every unit. Both also store X.

TwELL (formats/twell.py) gives each tile slots of its own. Here all tokens share their slots, so one
token may have all its units active. If the slots do not suffice, the call is dense and still exact.
Backward then computes gate and up again (11 products instead of 9), and memory stays the same. The
device decides, and the host never waits. A CUDA graph contains both ways, so backward always has
room for two matrices [tokens, units].

A sparse call that turns out dense makes a step up to 1.8 times as long as dense layers do
(NOTES.md). At the start of training most units are active. Then set `sparse` to False, or
call `adapt`, which chooses by the count of the last call. A dense call multiplies by cuBLAS and
stores what dense layers store. The layer never changes by itself: the moment at which the host
learns a count is not reproducible, so neither the bits nor the memory of a step would be.

    CUDA, compute capability 8.0 and newer     Triton (twell/_autograd.py); sizes of
                                               multiples of 8
    CPU                                        torch, dense products: a reference, not a kernel

Where X or dY is not finite, an inactive unit counts as zero; in dense products it may give NaN.
The L1 term is that of Cetin et al., arXiv 2603.23198, as in their code: not divided by the number
of units. Their published coefficient, 2e-5, is for the mean of this term over layers.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require
from sparsebench.kernels._common.transforms import batched, transformed
from sparsebench.kernels.twell._autograd import (
    SHARE,
    dense_forward,
    product,
    require_one_kind,
)

EVEN = 94  # one active unit in so many: a step is as fast as a compiled dense one (NOTES.md)


class TransposedLinear(nn.Module):
    """nn.Linear without bias, with W [k, n] stored as its transpose, `weight_t` [n, k].

    The kernels read it so. Loading a state dict transposes a `weight`, which others store.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Take the weight of a layer."""
        super().__init__()
        self.weight_t = nn.Parameter(linear.weight.detach().t().contiguous())

    @property
    def weight(self) -> Tensor:
        """Return W [k, n], in the parameter's memory."""
        return self.weight_t.t()

    def reset_parameters(self) -> None:
        """Draw as nn.Linear does."""
        bound = len(self.weight_t) ** -0.5
        nn.init.uniform_(self.weight_t, -bound, bound)

    def forward(self, h: Tensor) -> Tensor:
        """Return Y [..., k] of H [..., n]."""
        return nn.functional.linear(h, self.weight)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        if (weight := state_dict.pop(f"{prefix}weight", None)) is not None:
            state_dict[f"{prefix}weight_t"] = weight.t().contiguous()
        super()._load_from_state_dict(state_dict, prefix, *args, **options)


class SparseGatedMLP(nn.Module):
    """A gated MLP with relu or relu2 (its square), without bias, for training.

    gate, up        nn.Linear
    down            as nn.Linear, but its parameter is the transpose, `weight_t`
    slots           for active units, of a token on average; by default a 64th of all units
    sparse          true: calls compute and store active units only; false: as dense layers do. A
                    CUDA graph keeps the way it was captured with; torch.compile compiles each once
    active          int32 on the layer's device: active units of a token in the last call, on
                    average, rounded up. With more than `slots` a sparse call was dense, and slower

    Y and the gradients equal those of dense layers for any number of active units; torch.func calls
    leave `active` as it is. A state dict of three nn.Linear loads too: `down.weight` is transposed.
    Raises FormatError.
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
        self.down = TransposedLinear(nn.Linear(n, k, **made))
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
        """Return Y [..., k] of X [..., k]; with `l1` also the L1 term, an fp32 scalar.

        Raises Unsupported.
        """
        k = self.in_features
        if x.dim() == 0 or x.shape[-1] != k:
            raise Unsupported(f"expected [..., {k}], found {list(x.shape)}")
        weights: list[Tensor] = [self.gate.weight, self.up.weight, self.down.weight_t]
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, *weights = (t.to(dtype) for t in (x, *weights))
        wg, wu, wd_t = weights
        flat, squared = x.reshape(-1, k), self.activation == "relu2"
        tokens = max(1, flat.shape[0])
        if self.sparse:
            y, norms, offsets = product(flat, wg, wu, wd_t, squared, self.slots)
            on = offsets[-1]
        else:
            require_one_kind(flat, wg, wu, wd_t)
            y, norms, on = dense_forward(flat, wg, wu, wd_t, squared, l1)
        if not transformed():
            self.active.copy_(on // -tokens).neg_()  # rounded up
        y = batched(y, x)
        return (y, norms.sum() / tokens) if l1 else y

    def adapt(self) -> bool:
        """Set `sparse` to the faster way for the number of active units of the last call.

        Return `sparse`. Waits for the device: call it after the first step, then every 100 or so.
        """
        active = int(self.active)
        self.sparse = active <= self.slots and active * EVEN <= self.hidden_features
        return self.sparse

    def extra_repr(self) -> str:
        """Return the activation, the slots, and whether calls are sparse."""
        slots = f"slots={self.slots} of {self.hidden_features}"
        return f"activation={self.activation}, {slots}, sparse={self.sparse}"
