"""Find gated MLPs among the modules of a model, and check what they compute.

    Y = down_proj(act_fn(gate_proj(X)) * up_proj(X))     gate_proj, up_proj [h, k]  down_proj [k, h]

The names are those of Hugging Face. A module with these names is run on two tokens, and refused if
it computes anything else.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from sparsebench.errors import FormatError, SparsebenchError
from sparsebench.formats._format import require
from sparsebench.harness.models.pruning import layer as layers
from sparsebench.kernels.nn import BitmapLinear, BlockSparseLinear, SpenseLinear

PARTS = "gate_proj", "up_proj", "down_proj"
ACTIVATIONS = layers.ACTIVATIONS | {"relu2": lambda x: relu(x).square()}
STEP = 8  # the kernels need sizes that are multiples of it
Activation = Callable[[Tensor], Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Gated:
    """The three layers of a gated MLP, and its activation."""

    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    act: Activation

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """Return the parts of a module, or None if it lacks any."""
        gate, up, down, act = (getattr(module, name, None) for name in (*PARTS, "act_fn"))
        if not is_dense(gate) or not is_dense(up) or not is_dense(down):
            return None
        return cls(gate, up, down, act) if callable(act) else None

    @property
    def layers(self) -> dict[str, nn.Linear]:
        return dict(zip(PARTS, (self.gate, self.up, self.down), strict=True))

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate and up [h, k] and down [k, h], detached."""
        return self.gate.weight.detach(), self.up.weight.detach(), self.down.weight.detach()

    @property
    def activation(self) -> str | None:
        """Return the name of the activation; None if it is unknown."""
        return activation_of(self.act, self.gate.weight.device)


def activation_of(act: Activation, device: torch.device) -> str | None:
    """Return the name of an activation, judged by its values from -8 to 8; None if unknown."""
    x = torch.linspace(-8, 8, 129, device=device)
    y = act(x)
    names = (n for n, each in ACTIVATIONS.items() if torch.allclose(y, each(x), atol=1e-5))
    return next(names, None)


class DenseGatedMLP(nn.Module):
    """A dense gated MLP with Hugging Face's names, made from a sparse one."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor, activation: str):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = map(linear_of, (gate, up, down))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.activation]
        y: Tensor = self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))
        return y


def outermost(
    model: nn.Module, takes: Callable[[nn.Module, str], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that `takes` accepts, by name, and none of those inside them."""
    last: str | None = None
    for name, module in model.named_modules():
        inside = last is not None and (not last or name.startswith(f"{last}."))
        if not inside and takes(module, name):
            last = name
            yield name, module


def is_dense(module: object) -> TypeGuard[nn.Linear]:
    """Return whether this is an nn.Linear that is not one of the sparse layers."""
    sparse = BlockSparseLinear | SpenseLinear | BitmapLinear
    return isinstance(module, nn.Linear) and not isinstance(module, sparse)


def linear_of(weight: Tensor) -> nn.Linear:
    """Return an nn.Linear with this weight [n, k] and no bias."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=weight.requires_grad)
    return layer


def parts_of(module: nn.Module) -> Gated:
    """Return the parts of a gated MLP. Raises FormatError if it lacks any."""
    if (parts := Gated.of(module)) is None:
        raise FormatError(f"expected {', '.join(PARTS)} and act_fn, found {type(module).__name__}")
    return parts


def require_gated(module: nn.Module, activations: tuple[str, ...]) -> tuple[Gated, str]:
    """Return the parts, and the name of the activation.

    Raises FormatError unless the module computes a gated MLP with one of the `activations`, and
    consists of plain layers.
    """
    parts, kind = parts_of(module), type(module).__name__
    for name, layer in parts.layers.items():
        with_name(name, require_plain, layer)
        with_name(name, require_steps, layer)
        require(layer.bias is None, f"{name}: expected no bias, found one")
    others = {name for name, _ in module.named_children()} - {*PARTS, "act_fn"}
    require(not others, f"expected only the parts of a gated MLP, found {', '.join(others)}")
    activation = parts.activation or type(parts.act).__name__
    names = " or ".join(activations)
    require(activation in activations, f"expected an activation {names}, found {activation}")
    gate, up, down = parts.weights
    draw = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, gate.shape[1], generator=draw, device="cpu").to(gate)
    with torch.no_grad():
        expected = linear(ACTIVATIONS[activation](linear(x, gate)) * linear(x, up), down).float()
        error = float((module(x).float() - expected).norm() / expected.norm().clamp_min(1e-30))
    message = f"expected {kind} to compute a gated MLP, found a relative error of {error:.2g}"
    require(error <= 2 * torch.finfo(gate.dtype).eps, message)
    return parts, activation


def require_plain(layer: nn.Linear) -> None:
    """Raise FormatError unless this is a plain nn.Linear with finite weights and no hooks."""
    kind = type(layer).__name__
    require(type(layer) is nn.Linear, f"expected nn.Linear, found its subclass {kind}")
    require_sound(layer, layer.weight)


def require_sound(module: nn.Module, *weights: Tensor) -> None:
    """Raise FormatError unless a module has no hooks, and weights that are plain and finite."""
    for weight in weights:
        kind = type(weight).__name__
        require(type(weight) is nn.Parameter, f"expected a plain weight, found {kind}")
        require(not weight.is_meta, "expected weights, found none (device meta)")
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    require(not hooks, "expected a layer without hooks, because they would be lost")
    for weight in weights:
        finite = bool(weight.isfinite().all())
        require(finite, "expected finite weights, found NaN or infinity")


def require_steps(layer: nn.Linear) -> None:
    """Raise FormatError unless both sizes are multiples of STEP."""
    n, k = layer.weight.shape
    fits = not n % STEP and not k % STEP
    require(fits, f"expected multiples of {STEP}, found a weight {n}x{k}")


def with_name(name: str, function: Callable[..., T], *args: object) -> T:
    """Call a function, and prefix its errors with the layer's name."""
    try:
        return function(*args)
    except SparsebenchError as error:
        raise FormatError(f"{name}: {error}") from error
