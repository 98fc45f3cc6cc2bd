"""Y[..., n] = X[..., k] @ W[n, k].T for a weight in any format.

Without a kernel's name, each weight has the plans that layers have (operator.py): the first call
with a number of tokens may time what its format offers.

    dense    torch's own product; gradients of X and W
    bsr      as BlockSparseLinear (_bsr_engines.py); gradients of X and W
    spense   as SpenseLinear (_spense_op.py): its engine for the device; gradient of X
    csr      csr_cuda, with gradients of X and W; torch's own dense product on a CPU
    bitmap   bitmap_mma, or torch's own product with a dense copy of W (_frozen_op.py); gradient of
             X, from the copy
    other    Unsupported: the caller must name a kernel

A named kernel, one of sparsebench's own, is planned as in a layer (_named_kernel.py), and again
after a write that torch counts. It has gradients if there are kernels NAME_dgrad and NAME_wgrad.

A call that cannot run, or whose gradient cannot, raises Unsupported with the reason before the
product is computed. No other kernel takes its place.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.formats.dense import Dense
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.capture import captured_into, keep
from sparsebench.kernels._common.front import PRODUCT, Conditions, Guard, Recordings, Signature
from sparsebench.kernels._common.transforms import is_traced, readable
from sparsebench.kernels._kernel import NAMES
from sparsebench.kernels.nn import _bsr_autograd, _frozen_op, _spense_op
from sparsebench.kernels.nn._bsr_pattern import pattern_of
from sparsebench.kernels.nn._named_kernel import by_name

RECORDINGS = "_sparsebench_recordings"  # attribute of a weight: calls without Python (front.py)


def matmul(x: Tensor, w: Format, kernel: str | None = None) -> Tensor:
    """Return X @ W.T, a new tensor [..., n] of X [..., k].

    w        [n, k], packed: Bsr.from_dense(weight, block=64). Gradients flow to its `values`, and
             through them to the dense weight that it was packed from
    kernel   name of a kernel of ours for the op linear that reads this format, as in a suite; by
             default the format selects it (see the module's docstring)

    A CUDA graph that captures the call keeps the weight, and everything that the kernel reads of
    it, alive. The caller must keep X, as for any torch op, and must call a kernel once before a
    capture. Raises Unsupported, FormatError.
    """
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        raise Unsupported(f"matmul: expected X as a dense torch.Tensor, found {_kind(x)}")
    if not isinstance(w, Format):
        expected = "expected W in a format, such as Bsr.from_dense(weight, block=64)"
        raise Unsupported(f"matmul: {expected}; found {_kind(w)}")
    if kernel is not None and not isinstance(kernel, str):
        raise Unsupported(f"matmul: expected the name of a kernel, found {_kind(kernel)}")
    if kernel is None and not torch.compiler.is_compiling():
        recordings: Recordings | None = w.__dict__.get(RECORDINGS)
        fast: Tensor | None = None if recordings is None else recordings.replay(x)
        if fast is not None:
            return fast
    k = w.shape[1]
    if x.dim() == 0 or x.shape[-1] != k:
        raise Unsupported(f"matmul: expected X [..., {k}], found {list(x.shape)}")
    flat = x.reshape(-1, k)
    _require_alike(flat, w)
    here = not torch.compiler.is_compiling() and _bsr_autograd.is_current(x.device)
    if here and not torch.is_autocast_enabled(x.device.type):  # the contexts take 20 µs
        return _multiply(x, flat, w, kernel)
    with torch.cuda.device_of(flat), torch.autocast(x.device.type, enabled=False):
        return _multiply(x, flat, w, kernel)


def _multiply(x: Tensor, rows: Tensor, w: Format, kernel: str | None) -> Tensor:
    """Return the product of X, which has these rows, on the current device without autocast."""
    if kernel is None and isinstance(w, Bsr):
        keep(w)
        return _bsr(x, w)
    y = _by_format(rows, w) if kernel is None else by_name(rows, w, kernel)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], w.shape[0])


def _kind(value: object) -> str:
    return f"a tensor of {value.layout}" if isinstance(value, Tensor) else type(value).__name__


def _by_format(x: Tensor, w: Format) -> Tensor:
    """Run what the format selects."""
    keep(w)
    if isinstance(w, Dense):
        return linear(x, w.values)
    training = torch.is_grad_enabled() and x.requires_grad
    if isinstance(w, Spense):
        if not x.is_cuda or is_traced():
            return _spense_op.multiply(x, w, None, None, training=training)
        recordings, guards = _recordings_of(w, _spense_op.signature_of(None)), _guards(w)
        return _spense_op.multiply_recorded(recordings, x, w, None, None, guards, training=training)
    if isinstance(w, Bitmap):
        return linear(x, _dense_copy(w)) if training or is_traced() else _frozen(x, w)
    if isinstance(w, Csr):
        if not x.is_cuda:
            return linear(x, w.to_dense())
        values = torch.is_grad_enabled() and w.values.requires_grad
        if training or values or is_traced():
            return by_name(x, w, "csr_cuda")
        return _frozen(x, w)
    raise Unsupported(f"matmul: expected kernel=NAME for the format {type(w).__name__}, found none")


def _bsr(x: Tensor, w: Bsr) -> Tensor:
    """Return Y [..., n] of X [..., k]."""
    if captured_into():  # writes into the index replace its pattern
        keep(pattern_of(w.offsets, w.columns))
    if torch.compiler.is_compiling() or not x.is_cuda:
        return _bsr_autograd.multiply(x, w.values, None, w.offsets, w.columns, w.shape[0])
    names = "values", "bias", "offsets", "columns"
    guards = [Guard(None, name, getattr(w, name, None)) for name in names]
    recordings = _recordings_of(w, _bsr_autograd.SIGNATURE)
    return _bsr_autograd.multiply_recorded(recordings, x, w.shape[0], guards, cast=False)


def _frozen(x: Tensor, w: Bitmap | Csr) -> Tensor:
    """Multiply by a weight without a gradient (_frozen_op.py)."""
    in_python = partial(_frozen_op.multiply, readable(x), w)
    if not x.is_cuda:
        return in_python()
    product, conditions = _frozen_op.planned_run(x.shape[0], w), Conditions(_guards(w))
    return _recordings_of(w, PRODUCT).product(x, conditions, product, in_python)


def of_layer(
    recordings: Recordings, x: Tensor, w: Bitmap, bias: Tensor | None, guards: Sequence[Guard]
) -> Tensor:
    """Return X @ W.T and the bias, and record the call if it repeats the call before it.

    recordings  of the layer, with the SIGNATURE of _frozen_op.py
    guards      of the layer's tensors
    """

    def in_python() -> Tensor:
        y = matmul(x, w)
        return y if bias is None else y + bias

    layout = x.dtype, x.device, x.dim() > 0 and x.shape[-1]
    plain = x.is_cuda and layout == (w.dtype, w.records.device, w.shape[1])
    traced = is_traced() or torch.is_autocast_enabled(x.device.type)
    if not plain or traced or not (m := x.numel() // w.shape[1]):
        return in_python()
    product = _frozen_op.planned_run(m, w)
    if product is None:
        with torch.no_grad():  # with a gradient, the path in Python multiplies by the dense copy
            _frozen_op.multiply(readable(x.reshape(m, -1)), w)
        return in_python()
    conditions = Conditions(guards, bias=bias, derivative=_frozen_op.derivative_of(w))
    return recordings.product(x, conditions, product, in_python)


def _guards(w: Format) -> list[Guard]:
    return [Guard(None, name, array) for name, array in w.arrays().items()]


def _recordings_of(w: Format, signature: Signature) -> Recordings:
    """Return the recorded calls of a weight, which the first call makes."""
    if (recordings := w.__dict__.get(RECORDINGS)) is None:
        recordings = Recordings(signature)
        object.__setattr__(w, RECORDINGS, recordings)
    return recordings


def _require_alike(x: Tensor, w: Format) -> None:
    """Raise Unsupported unless X has the device and the dtype of W."""
    arrays = [*w.arrays().values()]
    stored = {a.dtype for a in arrays if a.is_floating_point()} or {getattr(w, "dtype", x.dtype)}
    if stored != {x.dtype} or x.dtype not in NAMES:
        expected = f"X in the dtype of W, one of {', '.join(NAMES.values())}"
        dtypes = f"{x.dtype} and {', '.join(map(str, stored))}"
        raise Unsupported(f"matmul: expected {expected}; found {dtypes}")
    if devices := {str(a.device) for a in arrays} - {str(x.device)}:
        raise Unsupported(f"matmul: expected X on {', '.join(devices)} like W, found {x.device}")


_dense_copy: Callable[[Bitmap], Tensor]
_dense_copy = torch.compiler.disable(_frozen_op.dense_copy)  # looks up the copy
