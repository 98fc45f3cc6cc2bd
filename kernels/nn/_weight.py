"""`weight` of a layer whose weight is packed: it has dtype, device and sizes, and no values.

Code that was written for nn.Linear reads `layer.weight.dtype` (T5), `.device` (peft) or `.shape`.
Those work. An operation on it raises Unsupported and names the layer, because a dense copy would
cost the memory that packing saved. torch skips the fast paths of nn.TransformerEncoderLayer, which
read the weights of their layers themselves, if one of them overrides `__torch_function__`.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported

PROPERTIES = {"dtype", "grad_fn", "is_leaf", "is_quantized", "is_sparse", "itemsize", "layout"}
PROPERTIES |= {"names", "ndim", "shape"}
METHODS = {
    "__len__",
    "__repr__",
    "dim",
    "element_size",
    "is_complex",
    "is_floating_point",
    "nelement",
}
METHODS |= {"numel", "size", "stride", "type"}


class PackedWeight(Tensor):
    """A tensor without values; `layer` names its class, and `packed` has the values."""

    layer: str
    packed: Tensor
    _is_hf_initialized = True  # transformers then leaves it alone

    @classmethod
    def of(cls, layer: Any, dtype: torch.dtype, packed: Tensor) -> Self:
        """Return the weight [out_features, in_features] of a layer that stores `packed`."""
        shape = layer.out_features, layer.in_features
        weight = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        weight.layer, weight.packed = type(layer).__name__, packed
        return weight

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the device of the packed tensors."""
        return self.packed.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Return whether the packed tensors are on an NVIDIA GPU."""
        return self.packed.device.type == "cuda"

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Return whether the packed tensors are on the meta device."""
        return self.packed.device.type == "meta"

    @property
    def requires_grad(self) -> bool:
        """Return whether the packed values have a gradient; setting it sets that."""
        return self.packed.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.packed.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether the packed values have a gradient."""
        self.packed.requires_grad_(requires_grad)
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run functions that read no value. Raises Unsupported for everything else."""
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
        if name in (PROPERTIES if func.__name__ == "__get__" else METHODS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        operands = [part for arg in args for part in (arg if isinstance(arg, list) else [arg])]
        layer = next((part.layer for part in operands if isinstance(part, cls)), "the layer")
        raise Unsupported(
            f"{layer} has no dense weight for {name}: to_dense().weight is a copy of it"
        )


class FusedPart(nn.Module):
    """The name of a layer that a gated MLP has merged into another, so that tools fail on it.

    An adapter for `gate_proj` would otherwise be left out in silence.
    """

    def __init__(self, mlp: str, advice: str) -> None:
        """Name the MLP's class, and say what to do instead."""
        super().__init__()
        self.mlp, self.advice = mlp, advice

    def forward(self, *_: Any) -> Tensor:
        """Raise Unsupported."""
        raise Unsupported(f"expected a layer, found {self}")

    def __repr__(self) -> str:
        """Say what to do instead."""
        return f"a part of {self.mlp}: {self.advice}"
