"""A gated MLP with few active hidden units: training computes and stores only those.

    G = X @ Wg.T     Y = (act(G) * (X @ Wu.T)) @ Wd.T     L1 = mean over tokens of sum |act(G) * U|

    forward                                         backward
    G       dense, by cuBLAS, then freed            dH      for active units
    index   the active units, by token and          dX      dG @ Wg + dU @ Wu, for active units
            by unit, with g and u of each           dW      sums over the tokens of each active unit

`slots` is the average number of active units per token that can be stored. A slot holds g, u and
the unit, and the position and token in the transposed index: 14 bytes with 16-bit operands. Dense
layers store act(G), U and H: 6 bytes for every unit. Both also store X.

In TwELL (formats/twell.py) each tile has its own slots. Here all tokens share theirs, so one token
may have all its units active. If there are too few slots, the call is dense and still exact.
Backward then computes gate and up again (11 products instead of 9), and memory stays the same. The
device decides this without the host waiting. A CUDA graph contains both paths, so backward always
allocates two matrices [tokens, units].

A sparse call that has too few slots, and is dense, makes a step up to 1.8 times as slow as dense
layers (NOTES.md). At the start of training most units are active, so set `sparse` to False then, or
call `adapt`, which decides by the count of the last call. A call with `sparse` False multiplies
with cuBLAS and stores what dense layers store. The layer never switches on its own: the host learns
a count at an unpredictable moment, so neither the bits nor the memory of a step would be
reproducible.

    GPU of compute capability 8.0 and newer    Triton (twell/_autograd.py); sizes are multiples of 8
    CPU                                        dense products in torch, as a reference

Without gradients, a call takes a layer of the TwELL family (twell/_engines.py), as listed for its
sizes, or else the likeliest. A plan reads the weights as they are. It
depends on the number of active units per token, which the first call of a layer counts in its X, so
layers of one size do not share plans if their counts differ.

If X or dY is not finite, an inactive unit counts as zero; in dense products it may give NaN.
The L1 term is that of Cetin et al., arXiv 2603.23198, as in their code: not divided by the number
of units. Their published coefficient, 2e-5, applies to the mean of this term over layers.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require
from sparsebench.kernels._common.capture import is_capturing
from sparsebench.kernels._common.front import PRODUCT, Conditions, Guard, Recordings
from sparsebench.kernels._common.operator import Earlier, Operator, bucket
from sparsebench.kernels._common.product import Selected
from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import aligned, is_traced, refuse_transforms, unflatten
from sparsebench.kernels.nn._packed import FusedPart, loaded
from sparsebench.kernels.twell._autograd import SHARE, dense_forward, gated_mlp, require_one_kind
from sparsebench.kernels.twell._call import TwellCall, operator_of, units_on
from sparsebench.kernels.twell._engines import ENGINES, likeliest

ACTIVE = "_sparsebench_active"  # attribute of Wg: active units per token, a power of two


def eager(x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor, squared: bool, slots: int) -> Tensor:
    """Return Y [m, k]; X [m, k], Wg, Wu and Wd.T [n, k] are contiguous. Raises Unsupported."""
    if not x.shape[0]:
        return x.new_empty(x.shape)
    operands = x, wg, wu, wd_t
    with torch.cuda.device_of(x):
        y: Tensor = plan_of(operands, squared, slots).product.run(*operands)
    return y


def plan_of(
    operands: Sequence[Tensor], squared: bool, slots: int, earlier: Earlier | None = None
) -> Selected:
    """Return the plan of a call by its operands, which the first call makes. Raises Unsupported."""
    x, wg, *_ = operands
    call = call_of(x.shape[0], wg, squared, slots)
    if not hasattr(wg, ACTIVE) and not is_capturing(x):
        setattr(wg, ACTIVE, units_on(x, wg))
    operator = operator_for(wg, call)
    return operator.select(call, lambda product: partial(product.run, *operands), earlier)


def call_of(tokens: int, wg: Tensor, squared: bool, slots: int) -> TwellCall:
    """Return the call that is planned for a number of tokens."""
    n, k = wg.shape
    return TwellCall(bucket(tokens), n, k, wg.dtype, squared, slots=slots)


def operator_for(wg: Tensor, call: TwellCall) -> Operator:
    """Return the plans of a layer, by its gate; they are empty before its first call."""
    return _operator(call._replace(m=0), getattr(wg, ACTIVE, 0), wg.device)


@lru_cache(256)
def _operator(sizes: TwellCall, active: int, device: torch.device) -> Operator:
    """Return the plans of all layers of these sizes."""
    return operator_of(ENGINES, active, device, partial(likeliest, active))


def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


inference = torch_operator("sparse_gated_mlp_inference", eager, _like)

EVEN = 94  # with one unit in 94 active, a step takes as long as a compiled dense one (NOTES.md)


ADAPT = "it trains its own weights; leave an MLP out by filter_fn to adapt it"


class TransposedLinear(nn.Module):
    """nn.Linear without bias, with W [k, n] stored as its transpose, `weight_t` [n, k].

    The kernels read the transpose. If a state dict has a `weight`, loading transposes it.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Copy the weight of a layer."""
        super().__init__()
        self.weight_t = nn.Parameter(linear.weight.detach().t().contiguous())

    @property
    def weight(self) -> Tensor:
        """Return W [k, n] in the parameter's memory."""
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
    down            like nn.Linear, but its parameter is the transpose, `weight_t`
    slots           for active units per token on average; by default a 64th of all units
    sparse          True: calls compute and store only active units; False: they do as dense layers
                    do. A CUDA graph keeps the value of its capture; torch.compile compiles both
    active          int32 on the layer's device: active units per token in the last call with
                    gradients, on average, rounded up. Above `slots` it was dense, and slower

    Y and the gradients equal those of dense layers for any number of active units. Sparse calls
    without gradients do not update `active`. A state dict of three nn.Linear loads, too, and
    transposes `down.weight`. Raises FormatError.
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
        valid = activation in ("relu", "relu2")
        require(valid, f"activation: expected relu or relu2, found {activation!r}")
        slots = -(-n // SHARE) if slots is None else slots
        require(0 < slots <= n, f"slots: expected 1 to {n}, the hidden units, found {slots}")
        self.in_features, self.hidden_features = k, n
        self.activation, self.slots = activation, slots
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.gate, self.up = nn.Linear(k, n, **options), nn.Linear(k, n, **options)
        self.down = TransposedLinear(nn.Linear(n, k, **options))
        for name in ("gate_proj", "up_proj", "down_proj"):
            self.add_module(name, FusedPart("SparseGatedMLP", ADAPT))
        self.sparse = True
        self._recordings: dict[tuple[str, int], Recordings] = {}  # calls without Python (front.py)
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
        """Copy gate and up [n, k] and down [k, n]. Raises FormatError."""
        require(gate.dim() == 2, f"gate: expected a matrix [n, k], found {list(gate.shape)}")
        n, k = gate.shape
        for name, weight, size in (("up", up, [n, k]), ("down", down, [k, n])):
            shape = [*weight.shape]
            require(shape == size, f"{name}: expected {size}, found {shape}")
        options: dict[str, Any] = {"device": gate.device, "dtype": gate.dtype}
        mlp = cls(k, n, activation=activation, slots=slots, **options)
        with torch.no_grad():
            for layer, weight in ((mlp.gate, gate), (mlp.up, up), (mlp.down, down)):
                layer.weight.copy_(weight)
        return mlp

    def forward(self, x: Tensor, *, l1: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return Y [..., k] of X [..., k]; with `l1` also the L1 term, fp32. Raises Unsupported."""
        k, kind = self.in_features, (self.activation, self.slots)
        if self.sparse and not l1 and not torch.compiler.is_compiling():
            recordings = self._recordings.get(kind)
            fast: Tensor | None = None if recordings is None else recordings.replay(x)
            if fast is not None:
                return fast
        refuse_transforms()
        if x.dim() == 0 or x.shape[-1] != k:
            raise Unsupported(f"expected [..., {k}], found {list(x.shape)}")
        if not isinstance(self.gate, nn.Linear) or not isinstance(self.up, nn.Linear):
            raise Unsupported(f"expected gate and up without adapters, found some: {ADAPT}")
        with loaded(self.gate, self.up, self.down):
            return self._computed(x, kind, l1=l1)

    def _computed(
        self, x: Tensor, kind: tuple[str, int], *, l1: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the results of a call that is not replayed."""
        wg: Tensor = self.gate.weight
        wu: Tensor = self.up.weight
        wd_t: Tensor = self.down.weight_t
        cast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
        if cast:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, wg, wu, wd_t = (t.to(dtype) for t in (x, wg, wu, wd_t))
        flat, squared = x.reshape(-1, self.in_features), self.activation == "relu2"
        require_one_kind(flat, wg, wu, wd_t)
        if self.sparse and not l1 and x.is_cuda and not _differentiated(flat, wg, wu, wd_t):
            return self._inference(x, flat, wg, wu, wd_t, kind, recorded_calls=not cast)
        tokens = max(1, flat.shape[0])
        if self.sparse:
            y, norms, offsets, *_ = gated_mlp(flat, wg, wu, wd_t, squared, self.slots)
            count = offsets[-1]
        else:
            y, norms, count = dense_forward(flat, wg, wu, wd_t, squared, l1)
        self.active.copy_(count // -tokens).neg_()  # rounded up
        y = unflatten(y, x)
        return (y, norms.sum() / tokens) if l1 else y

    def _inference(
        self,
        x: Tensor,
        flat: Tensor,
        wg: Tensor,
        wu: Tensor,
        wd_t: Tensor,
        kind: tuple[str, int],
        *,
        recorded_calls: bool,
    ) -> Tensor:
        """Return Y of a call without gradients, and record it if nothing must be copied."""
        squared = self.activation == "relu2"
        operands = aligned(flat), aligned(wg), aligned(wu), aligned(wd_t)
        if is_traced():
            return unflatten(inference(*operands, squared, self.slots), x)
        weights = operands[1:]

        def run(rows: Tensor) -> list[Tensor]:
            return [eager(rows, *weights, squared, self.slots)]

        def in_python() -> Tensor:
            return unflatten(run(operands[0])[0], x)

        copied = any(a is not b for a, b in zip(operands, (flat, wg, wu, wd_t), strict=True))
        call = call_of(len(flat), wg, squared, self.slots)
        planned = len(flat) > 0 and call in self.operator.plans
        if copied or not recorded_calls or not planned:
            return in_python()
        recordings = self._recordings.setdefault(kind, Recordings(PRODUCT))
        y: Tensor = recordings.call([x], Conditions(self._guards()), run, in_python)
        return y

    @property
    def operator(self) -> Operator:
        """Return the plans of calls without gradients."""
        wg = self.gate.weight
        return operator_for(wg, call_of(1, wg, self.activation == "relu2", self.slots))

    def adapt(self) -> bool:
        """Choose sparse or dense products, whichever is faster at the last call's active units.

        Set and return `sparse`. Waits for the device: call it after the first step, then about
        every 100.
        """
        active = int(self.active)
        self.sparse = active <= self.slots and active * EVEN <= self.hidden_features
        return self.sparse

    def _guards(self) -> list[Guard]:
        """Return what must not change while recorded calls hold: modules, and their weights."""
        guards = []
        for part, name in {"gate": "weight", "up": "weight", "down": "weight_t"}.items():
            parameters = (module := getattr(self, part))._parameters
            guards.append(Guard(self._modules, part, module, content=False))
            guards.append(Guard(parameters, name, parameters[name], content=False))
        return guards

    def extra_repr(self) -> str:
        """Return the activation, the slots and `sparse`."""
        slots = f"slots={self.slots} of {self.hidden_features}"
        return f"activation={self.activation}, {slots}, sparse={self.sparse}"


def _differentiated(*operands: Tensor) -> bool:
    """Return whether autograd must see a call with these operands."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in operands)
