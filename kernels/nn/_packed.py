"""Helpers shared by the layers whose weights are packed and frozen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require


def frozen(tensor: Tensor) -> nn.Parameter:
    """Return a parameter without a gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def frozen_bias(bias: Tensor, n: int, like: Tensor, dtype: torch.dtype) -> nn.Parameter:
    """Return a copy of a bias [n] on the device of `like`. Raises FormatError."""
    require(bias.shape == (n,), f"bias: expected [{n}], found {list(bias.shape)}")
    return frozen(bias.detach().to(like.device, dtype, copy=True))


def dense_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an nn.Linear with this weight and a copy of the bias, both frozen."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = frozen(weight)
    if bias is not None:
        linear.bias = frozen(bias.detach().clone())
    return linear


def require_dtype(fn: Callable[[Tensor], Tensor], like: Tensor, dtype: torch.dtype) -> None:
    """Raise Unsupported if `fn`, which nn.Module applies to all tensors, changes this dtype."""
    result = fn(like.new_empty(1, dtype=dtype)).dtype
    if result != dtype:
        raise Unsupported(f"expected {dtype}, because the weights are packed, found {result}")


def require_layout(layer: nn.Module, names: str, state: Tensor) -> None:
    """Raise FormatError unless `state` equals the layer's extra state; `names` explains it."""
    expected, loaded = layer.get_extra_state().tolist(), state.tolist()
    require(loaded == expected, f"{names}: expected {expected}, found {loaded}")


def load_layout_first(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any
) -> None:
    """Load as nn.Module does, but check the extra state before anything is written."""
    if (layout := state_dict.get(f"{prefix}_extra_state")) is not None:
        layer.set_extra_state(layout)
    nn.Module._load_from_state_dict(layer, state_dict, prefix, *args, **options)
