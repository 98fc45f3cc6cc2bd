"""The base of the layers whose weights are packed and frozen: SpenseLinear and BitmapLinear."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require
from sparsebench.kernels.nn._weight import PackedWeight


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


class PackedLinear(nn.Linear):
    """nn.Linear whose W [out_features, in_features] is packed in buffers and frozen.

    LAYOUT  names of the numbers in the extra state of a state dict, for messages
    """

    LAYOUT: str
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

    def plan(self, tokens: Iterable[int]) -> Self:
        """Plan, and search, the product of these numbers of tokens now instead of at a first call.

        If a bitmap's dense copy is faster than the bitmap, it is made, and takes n k elements. The
        gate and up of a SpenseGatedMLP are planned by its own `plan`.
        """
        for m in tokens:
            with torch.no_grad():
                self(self.packed.new_zeros(m, self.in_features, dtype=self.outside))
        return self

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
