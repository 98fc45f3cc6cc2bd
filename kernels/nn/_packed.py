"""The base of the layers whose weights are packed and frozen: SpenseLinear and BitmapLinear.

`weight` of a layer whose weight is packed has dtype, device and sizes, and no values. Code that was
written for nn.Linear reads `layer.weight.dtype` (T5), `.device` (peft) or `.shape`. Those work. An
operation on it raises Unsupported and names the layer, because a dense copy would cost the memory
that packing saved. torch skips the fast paths of nn.TransformerEncoderLayer, which read the weights
of their layers themselves, if one of them overrides `__torch_function__`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require
from sparsebench.kernels._common.operator import ahead

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
        traced = torch.compiler.is_dynamo_compiling()  # it knows no such context
        plain = traced or not torch._C._len_torch_dispatch_stack()
        with nullcontext() if plain else _disable_current_modes():  # a fake tensor has no subclass
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


INSIDE = "base_layer", "original_module"  # of peft's wrappers: adapters, and layers that it copies


def unwrapped(layer: nn.Module) -> Any:
    """Return a layer without the adapters that wrap it."""
    inner = next((getattr(layer, name) for name in INSIDE if hasattr(layer, name)), None)
    return layer if inner is None else unwrapped(inner)


def loaded(*layers: nn.Module) -> AbstractContextManager[None]:
    """Load what accelerate has offloaded of layers that are read, but not called."""
    offloaded = [layer for layer in layers if "_hf_hook" in layer.__dict__]
    return _loaded(offloaded) if offloaded else NOTHING_TO_LOAD


NOTHING_TO_LOAD = nullcontext()


@contextmanager
def _loaded(offloaded: list[Any]) -> Iterator[None]:
    for layer in offloaded:
        layer._hf_hook.pre_forward(layer)
    yield
    for layer in offloaded:
        layer._hf_hook.post_forward(layer, None)


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


def plan_each(tokens: Iterable[int], plan: Callable[[int], None], *, search: bool) -> None:
    """Call plan(m) for each number of tokens, without a gradient; it may compile, and `search`."""
    with torch.no_grad(), ahead(search=search):
        for m in tokens:
            plan(m)


class PackedLinear(nn.Linear):
    """nn.Linear whose W [out_features, in_features] is packed in buffers and frozen.

    LAYOUT  names of the numbers in the extra state of a state dict, for messages
    """

    LAYOUT: str
    _recordings: Any  # calls without Python (front.py)
    bias: nn.Parameter | None  # type: ignore[assignment]

    @property
    @abstractmethod
    def packed(self) -> Tensor:
        """Return the buffer with most of W."""

    @property
    @abstractmethod
    def outside(self) -> torch.dtype:
        """Return the dtype of X, Y and the bias."""

    @property
    def weight(self) -> PackedWeight:  # type: ignore[override]
        """Return dtype, device and sizes of W, without values."""
        return PackedWeight.of(self, self.outside, self.packed)

    def reset_parameters(self) -> None:
        """Leave the packed weights as they are."""

    def freeze(self) -> Self:
        """Return the layer, whose weights are always frozen, as BlockSparseLinear.freeze does."""
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer. Raises Unsupported for another dtype, and then leaves it as it was."""
        for dtype in (torch.uint8, self.outside):
            result = fn(self.packed.new_empty(1, dtype=dtype)).dtype
            if result != dtype:
                expected = f"expected {dtype}, because the weights are packed"
                raise Unsupported(f"{expected}, found {result}")
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def plan(self, tokens: Iterable[int], *, search: bool = True) -> Self:
        """Plan the product of these numbers of tokens now instead of at a first call.

        search  time what can run it, and keep the fastest; False takes what is listed

        If a bitmap's dense copy is faster than the bitmap, it is made, and takes n k elements. The
        gate and up of a SpenseGatedMLP are planned by its own `plan`.
        """
        self._recordings.clear()
        plan_each(tokens, self._search if search else self._select, search=search)
        return self

    def _search(self, m: int) -> None:
        self(self.packed.new_zeros(m, self.in_features, dtype=self.outside))

    @abstractmethod
    def _select(self, m: int) -> None:
        """Plan m tokens without a search."""

    def set_extra_state(self, state: Tensor) -> None:
        """Raise FormatError for another layout, so that fp16 bytes are never read as bf16."""
        expected, loaded = self.get_extra_state().tolist(), state.tolist()
        require(loaded == expected, f"{self.LAYOUT}: expected {expected}, found {loaded}")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        """Load as nn.Module does, but check the extra state before anything is written."""
        if (layout := state_dict.get(f"{prefix}_extra_state")) is not None:
            self.set_extra_state(layout)
        super()._load_from_state_dict(state_dict, prefix, *args, **options)
