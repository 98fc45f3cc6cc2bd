"""A linear layer with zeros anywhere, to run a pruned model: Y = X @ W.T + bias. W is frozen.

    records, offsets    buffers: W as formats/bitmap.py
    forward             sparsebench.matmul: bitmap_mma where that was measured ahead of dense, else
                        a dense product, by a copy of W that stays from its first call on

X has a gradient, by the dense copy. X has the dtype of W, which cannot change.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require
from sparsebench.formats.bitmap import COLUMNS, ROWS, UNIT, Bitmap
from sparsebench.kernels.nn.matmul import NAMES, matmul


def require_layout(layer: nn.Module, what: str, state: Tensor) -> None:
    """Raise FormatError unless `state` is the layer's extra state: numbers that `what` names."""
    expected, found = layer.get_extra_state().tolist(), state.tolist()
    require(found == expected, f"{what}: expected {expected}, found {found}")


def load_layout_first(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any
) -> None:
    """Load as nn.Module does, but the extra state, which may raise, before anything is written."""
    if (layout := state_dict.get(f"{prefix}_extra_state")) is not None:
        layer.set_extra_state(layout)
    nn.Module._load_from_state_dict(layer, state_dict, prefix, *args, **options)


class BitmapLinear(nn.Module):
    """nn.Linear with W [out_features, in_features] as a bitmap: the same call and bias.

    stored  bytes of `records`, a multiple of 16, which a state dict then fills

    Raises FormatError.
    """

    records: Tensor
    offsets: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        stored: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Make room for a state dict."""
        super().__init__()
        require(dtype in NAMES, f"expected {', '.join(NAMES.values())}, found {dtype}")
        require(stored % UNIT == 0, f"stored: expected a multiple of {UNIT} bytes, found {stored}")
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        tiles = -(-out_features // ROWS) * -(-in_features // COLUMNS)
        self.register_buffer("records", torch.zeros(stored, dtype=torch.uint8, device=device))
        offsets = torch.zeros(tiles + 1, dtype=torch.int32, device=device)
        self.register_buffer("offsets", offsets)
        zeros = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.bias = None if zeros is None else nn.Parameter(zeros, requires_grad=False)
        self._bitmap: Bitmap | None = None

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """Pack a weight [n, k], of which every zero is left out, and a copy of the bias [n]."""
        w, (n, k) = Bitmap.from_dense(weight.detach()), weight.shape
        options: dict[str, Any] = {"stored": 0, "device": "meta", "dtype": w.dtype}
        layer = cls(k, n, bias=bias is not None, **options)
        layer.records, layer.offsets = w.records, w.offsets
        if bias is not None:
            require(bias.shape == (n,), f"bias: expected [{n}], found {list(bias.shape)}")
            copied = bias.detach().to(w.records.device, w.dtype, copy=True)
            layer.bias = nn.Parameter(copied, requires_grad=False)
        return layer

    @property
    def bitmap(self) -> Bitmap:
        """Return W, in the memory of the buffers; the same object as long as they are the same."""
        w = self._bitmap
        if w is None or w.records is not self.records or w.offsets is not self.offsets:
            shape = self.out_features, self.in_features
            w = self._bitmap = Bitmap(shape, self.dtype, self.offsets, self.records)
        return w

    def to_dense(self) -> nn.Linear:
        """Return the layer as nn.Linear."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = nn.Parameter(self.bitmap.to_dense(), requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone(), requires_grad=False)
        return linear

    def require_index(self) -> None:
        """Raise FormatError unless the offsets rise from 0 to the end of the records."""
        ends = int(self.offsets[0]), int(self.offsets[-1]) * UNIT
        expected = f"offsets: expected to rise from 0 to {len(self.records)} bytes"
        rises = ends == (0, len(self.records)) and bool((self.offsets.diff() >= 0).all())
        require(rises, f"{expected}, found {ends[0]} to {ends[1]}, or a step back")

    def get_extra_state(self) -> Tensor:
        """Return int64 [3]: n, k, position of the dtype in NAMES."""
        return torch.tensor([self.out_features, self.in_features, [*NAMES].index(self.dtype)])

    def set_extra_state(self, state: Tensor) -> None:
        """Raise FormatError for another layout: fp16 bytes would be read as bf16."""
        require_layout(self, f"n, k, which of {', '.join(NAMES.values())}", state)

    _load_from_state_dict = load_layout_first

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer. Raises Unsupported for another dtype; then nothing has changed."""
        found = fn(self.records.new_empty(1, dtype=self.dtype)).dtype
        if found != self.dtype:
            raise Unsupported(f"expected {self.dtype} as W has, which is packed, found {found}")
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., n] of X [..., k]. Raises Unsupported."""
        y = matmul(x, self.bitmap)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Describe the layer."""
        part = len(self.records) / (self.in_features * self.out_features * self.dtype.itemsize)
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bytes={part:.2f} of dense, bias={self.bias is not None}"
