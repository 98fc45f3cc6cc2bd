"""The torch operators of BitmapLinear, for torch.compile, torch.export and dispatch modes.

    Y [m, n]  = X [m, k] @ W.T      bitmap_linear: sparsebench.matmul, which chooses the kernel
    dX [m, k] = dY [m, n] @ W       bitmap_dgrad: with the dense copy of W that matmul keeps

Otherwise a layer calls matmul itself. Both find the same Bitmap by its records, so that there is
only one dense copy.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsebench.formats.bitmap import Bitmap
from sparsebench.kernels.nn._frozen_op import dense_copy
from sparsebench.kernels.nn.matmul import matmul

_BITMAPS = WeakTensorKeyDictionary()


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


@torch.library.custom_op("sparsebench::bitmap_linear", mutates_args=())
def linear(x: Tensor, records: Tensor, offsets: Tensor, n: int, k: int) -> Tensor:
    """Return Y [m, n] of X [m, k]. Raises Unsupported."""
    return matmul(x, bitmap_of(records, offsets, n, k, x.dtype))


@linear.register_fake
def _(x: Tensor, records: Tensor, offsets: Tensor, n: int, k: int) -> Tensor:
    return x.new_empty(x.shape[0], n)


@torch.library.custom_op("sparsebench::bitmap_dgrad", mutates_args=())
def dgrad(dy: Tensor, records: Tensor, offsets: Tensor, n: int, k: int) -> Tensor:
    """Return dX [m, k] of dY [m, n]."""
    return dy @ dense_copy(bitmap_of(records, offsets, n, k, dy.dtype))


@dgrad.register_fake
def _(dy: Tensor, records: Tensor, offsets: Tensor, n: int, k: int) -> Tensor:
    return dy.new_empty(dy.shape[0], k)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, records, offsets, ctx.n, ctx.k = inputs
    ctx.save_for_backward(records, offsets)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return dgrad(dy, *ctx.saved_tensors, ctx.n, ctx.k), None, None, None, None


linear.register_autograd(_backward, setup_context=_save)
