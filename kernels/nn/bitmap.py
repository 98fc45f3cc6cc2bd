"""A linear layer with zeros anywhere, to run a pruned model: Y = X @ W.T + bias. W is frozen.

    records, offsets    buffers: W as in formats/bitmap.py
    forward             sparsebench.matmul runs one of these: bitmap_mma, for few tokens;
                        bitmap_pairs, with a copy of W as two 2:4 matrices of 0.56 to 0.75 of the
                        dense bytes; or, for many tokens, a dense product with a dense copy
                        (bitmap/NOTES.md). The first such call makes a copy, and the dense one
                        stays. torch.compile and torch.export see an operator

X has a gradient, from the dense copy. X has the dtype of W, which cannot change.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require, require_matrix
from sparsebench.formats.bitmap import COLUMNS, ROWS, UNIT, Bitmap
from sparsebench.kernels._common.front import Guard, Recordings
from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import has_mode, unflatten
from sparsebench.kernels._kernel import NAMES
from sparsebench.kernels.nn._dense_copy import dense_copy
from sparsebench.kernels.nn._frozen_op import SIGNATURE, plan
from sparsebench.kernels.nn._packed import PackedLinear, dense_linear, frozen, frozen_bias
from sparsebench.kernels.nn.matmul import matmul, of_layer

_BITMAPS = WeakTensorKeyDictionary()  # so that there is only one dense copy


def bitmap_of(records: Tensor, offsets: Tensor, n: int, k: int, dtype: torch.dtype) -> Bitmap:
    """Return W [n, k] in the memory of these tensors; the same object for the same tensors."""
    w: Bitmap | None = _BITMAPS.get(records)
    same = w is not None and (w.shape, w.dtype) == ((n, k), dtype)
    if w is None or not same or _addresses(w.records, w.offsets) != _addresses(records, offsets):
        w = Bitmap((n, k), dtype, offsets.detach(), records.detach())
        _BITMAPS[records] = w
    return w


def _addresses(records: Tensor, offsets: Tensor) -> tuple[int, int]:
    return records.data_ptr(), offsets.data_ptr()


def _linear(x: Tensor, records: Tensor, offsets: Tensor, n: int, k: int) -> Tensor:
    """Return Y [m, n] of X [m, k]. Raises Unsupported."""
    return matmul(x, bitmap_of(records, offsets, n, k, x.dtype))


def _dgrad(dy: Tensor, records: Tensor, offsets: Tensor, n: int, k: int) -> Tensor:
    """Return dX [m, k] of dY [m, n]."""
    return dy @ dense_copy(bitmap_of(records, offsets, n, k, dy.dtype))


def _y(x: Tensor, records: Tensor, offsets: Tensor, n: int, k: int) -> Tensor:
    return x.new_empty(x.shape[0], n)


def _dx(dy: Tensor, records: Tensor, offsets: Tensor, n: int, k: int) -> Tensor:
    return dy.new_empty(dy.shape[0], k)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, records, offsets, ctx.n, ctx.k = inputs
    ctx.save_for_backward(records, offsets)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return dgrad(dy, *ctx.saved_tensors, ctx.n, ctx.k), None, None, None, None


linear = torch_operator("bitmap_linear", _linear, _y, save=_save, backward=_backward)
dgrad = torch_operator("bitmap_dgrad", _dgrad, _dx)


BUFFERS = "records", "offsets"


class BitmapLinear(PackedLinear):
    """nn.Linear with W [out_features, in_features] as a bitmap: the same call and bias.

    stored  bytes of `records`, a multiple of 16; a state dict fills them

    Raises FormatError.
    """

    LAYOUT = f"n, k, position in {', '.join(NAMES.values())}"
    records: Tensor
    offsets: Tensor

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
        """Allocate zeros for a state dict to fill."""
        nn.Module.__init__(self)
        self._recordings = Recordings(SIGNATURE)  # calls without Python (front.py)
        require(dtype in NAMES, f"expected {', '.join(NAMES.values())}, found {dtype}")
        require(stored % UNIT == 0, f"stored: expected a multiple of {UNIT} bytes, found {stored}")
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        tiles = -(-out_features // ROWS) * -(-in_features // COLUMNS)
        self.register_buffer("records", torch.zeros(stored, dtype=torch.uint8, device=device))
        offsets = torch.zeros(tiles + 1, dtype=torch.int32, device=device)
        self.register_buffer("offsets", offsets)
        zeros = torch.zeros(out_features, device=device, dtype=dtype)
        self.bias = frozen(zeros) if bias else None

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """Pack the nonzeros of a weight [n, k], and copy the bias [n]."""
        require_matrix(weight)
        w, (n, k) = Bitmap.from_dense(weight.detach()), weight.shape
        layer = cls(k, n, stored=0, bias=False, device="meta", dtype=w.dtype)
        layer.records, layer.offsets = w.records, w.offsets
        if bias is not None:
            layer.bias = frozen_bias(bias, n, w.records, w.dtype)
        return layer

    @property
    def packed(self) -> Tensor:
        return self.records

    @property
    def outside(self) -> torch.dtype:
        return self.dtype

    @property
    def bitmap(self) -> Bitmap:
        """Return W in the memory of the buffers; the same object until they are moved."""
        sizes = self.out_features, self.in_features
        return bitmap_of(self.records, self.offsets, *sizes, self.dtype)

    def to_dense(self) -> nn.Linear:
        """Return the layer as nn.Linear."""
        return dense_linear(self.bitmap.to_dense(), self.bias)

    def require_index(self) -> None:
        """Raise FormatError unless the offsets ascend from 0 to the end of the records."""
        ends = int(self.offsets[0]), int(self.offsets[-1]) * UNIT
        expected = f"offsets: expected to ascend from 0 to {len(self.records)} bytes"
        ascending = ends == (0, len(self.records)) and bool((self.offsets.diff() >= 0).all())
        require(ascending, f"{expected}, found {ends[0]} to {ends[1]}, or a descent")

    def get_extra_state(self) -> Tensor:
        """Return int64 [3]: n, k, position of the dtype in NAMES."""
        return torch.tensor([self.out_features, self.in_features, [*NAMES].index(self.dtype)])

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., n] of X [..., k]. Raises Unsupported."""
        if not torch.compiler.is_compiling():
            fast: Tensor | None = self._recordings.replay(x)
            if fast is not None:
                return fast
        bias = self.bias
        if has_mode():  # under forward AD, torch multiplies, and has the tangent
            y = self._traced(x)
            return y if bias is None else y + bias
        guards = [Guard(self._buffers, name, self._buffers[name]) for name in BUFFERS]
        guards.append(Guard(self._parameters, "bias", self._parameters.get("bias"), content=False))
        return of_layer(self._recordings, x, self.bitmap, bias, guards)

    def _traced(self, x: Tensor) -> Tensor:
        """Return X @ W.T by the operator, after the checks that a trace can make."""
        n, k = self.out_features, self.in_features
        if x.dim() == 0 or x.shape[-1] != k or x.dtype != self.dtype:
            expected = f"expected {self.dtype} [..., {k}]"
            raise Unsupported(f"{expected}, found {x.dtype} {list(x.shape)}")
        flat = x if x.dim() == 2 else x.reshape(-1, k)
        return unflatten(linear(flat, self.records, self.offsets, n, k), x)

    def _select(self, m: int) -> None:
        """Plan m tokens without a search."""
        plan(m, self.bitmap)

    def extra_repr(self) -> str:
        """Return the sizes, and the bytes as a fraction of dense."""
        part = len(self.records) / (self.in_features * self.out_features * self.dtype.itemsize)
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bytes={part:.2f} of dense, bias={self.bias is not None}"
