"""The torch operators of a block-sparse linear layer and of both its gradients.

    Y [m, n]  = X [m, k] @ W [n, k].T            linear
    dX [m, k] = dY [m, n] @ W                    dgrad
    dW        = dY.T @ X, for stored blocks      wgrad

W is [n, k] in BSR (formats/bsr.py): offsets and columns, int32, and values [blocks, r, c]. The
gradients have no derivatives. A captured CUDA graph holds only kernels. A layer calls `multiply`,
which takes one of two paths:

    node      without torch's dispatcher; backward uses the pattern that forward used. Calls that
              repeat are recorded, and run without Python, backward included (front.py)
    linear    an operator that is opaque to torch.compile, torch.export and dispatch modes
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sparsebench.errors import FormatError, Unsupported
from sparsebench.kernels._common.front import (
    BackwardProduct,
    Conditions,
    Front,
    Guard,
    Recordings,
    Signature,
    node,
    record,
)
from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import (
    ALIGNMENT,
    PLAIN,
    device_guard,
    is_current,
    is_traced,
    readable,
    rows_of,
    unflatten,
)
from sparsebench.kernels._kernel import output_dtype
from sparsebench.kernels.bsr._call import BsrCall
from sparsebench.kernels.nn._bsr_pattern import COMPARE_EVERY, PlannedPattern, pattern_of

SIGNATURE = Signature(
    held=("values",),
    backward=(BackwardProduct(("dy", "values"), ("x",)), BackwardProduct(("dy", "x"), ("values",))),
)
DGRAD, WGRAD = 1, 2  # the products of backward


# ---- products of a pattern ----


def _y(pattern: PlannedPattern, x: Tensor, values: Tensor, n: int, live: bool) -> Tensor:
    """Return Y [m, n] of X [m, k]. Raises FormatError, Unsupported."""
    m, k = x.shape
    call = BsrCall("linear", m, (n, k), _block(values, pattern.columns), x.dtype, live)
    return _run(pattern, call, x, values, (m, n))


def _dx(
    pattern: PlannedPattern, dy: Tensor, values: Tensor, k: int, front: Front | None = None
) -> Tensor:
    """Return dX [m, k] of dY [m, n]. Raises FormatError, Unsupported."""
    m, n = dy.shape
    block, live = _block(values, pattern.columns), values.requires_grad
    call = BsrCall("dgrad", m, (n, k), block, dy.dtype, live)
    return _run(pattern, call, dy, values, (m, k), front)


def _dw(
    pattern: PlannedPattern, dy: Tensor, x: Tensor, r: int, c: int, front: Front | None = None
) -> Tensor:
    """Return dW [blocks, r, c] of dY [m, n] and X [m, k]. Raises FormatError, Unsupported."""
    (tokens, n), (m, k) = dy.shape, x.shape
    if tokens != m:
        raise Unsupported(f"expected dY with {m} tokens like X, found {tokens}")
    call = BsrCall("wgrad", m, (n, k), (r, c), x.dtype)
    return _run(pattern, call, dy, readable(x), (pattern.columns.shape[0], r, c), front)


def _run(
    pattern: PlannedPattern,
    call: BsrCall,
    a: Tensor,
    b: Tensor,
    out: tuple[int, ...],
    front: Front | None = None,
) -> Tensor:
    """Check types, dtypes and devices, then run the planned kernel. Raises Unsupported.

    front  a Front that records the call if it is planned, or None
    """
    _require_alike(pattern, a, b)
    device = a.device
    if not call.m or not out[0]:
        return a.new_zeros(out, dtype=output_dtype(a.dtype))
    a = readable(a)
    with device_guard(device):
        if front is None or not pattern.is_planned(call):
            return pattern.run(call, a, b)
        packed = call.op == "dgrad" and not call.live  # then launches need not read the values
        number, fixed = (DGRAD if call.op == "dgrad" else WGRAD), [1] if packed else []
        return record(front, number, [a, b], lambda *t: [pattern.run(call, *t)], fixed=fixed)[0]


def _require_alike(pattern: PlannedPattern, a: Tensor, b: Tensor) -> None:
    """Raise Unsupported unless both operands have one dtype, the pattern's device and addresses."""
    if a.dtype != b.dtype:
        raise Unsupported(f"expected operands of one dtype, found {a.dtype} and {b.dtype}")
    device = a.device
    if device != pattern.device or b.device != device:
        devices = {str(d) for d in (device, b.device, pattern.device)}
        raise Unsupported(f"expected one device, found {', '.join(sorted(devices))}")
    for operand in (a, b):
        if type(operand) not in PLAIN and is_traceable_wrapper_subclass(operand):
            raise Unsupported(f"expected a torch.Tensor with an address, found {type(operand)}")


def _block(values: Tensor, columns: Tensor) -> tuple[int, int]:
    """Return r and c. Raises FormatError unless values are aligned, one block for each column."""
    shape = values.shape
    if len(shape) != 3 or shape[0] != columns.shape[0]:
        expected = f"[{len(columns)}, r, c]"
        raise FormatError(f"values: expected shape {expected}, found {list(shape)}")
    if not values.is_contiguous():
        raise FormatError(f"values: expected contiguous, found strides {list(values.stride())}")
    if values.is_cuda and values.data_ptr() % ALIGNMENT:
        rest = values.data_ptr() % ALIGNMENT
        raise FormatError(f"values: expected an address divisible by {ALIGNMENT}, off by {rest}")
    return shape[1], shape[2]


# ---- the operators ----


def _linear(x: Tensor, values: Tensor, offsets: Tensor, columns: Tensor, n: int) -> Tensor:
    """Return Y [m, n] of X [m, k]. Raises FormatError, Unsupported."""
    pattern = pattern_of(offsets, columns)
    return _y(pattern, x, values, n, live=not pattern.frozen)


def _dgrad(dy: Tensor, values: Tensor, offsets: Tensor, columns: Tensor, k: int) -> Tensor:
    """Return dX [m, k] of dY [m, n]. Raises FormatError, Unsupported."""
    return _dx(pattern_of(offsets, columns), dy, values, k)


def _wgrad(dy: Tensor, x: Tensor, offsets: Tensor, columns: Tensor, r: int, c: int) -> Tensor:
    """Return dW [blocks, r, c] of dY [m, n] and X [m, k]. Raises FormatError, Unsupported."""
    return _dw(pattern_of(offsets, columns), dy, x, r, c)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the index, and each operand only if the other one needs a gradient."""
    a, b, offsets, columns = inputs[:4]
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None, offsets, columns)
    ctx.shapes = a.shape, b.shape


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, values, *index = ctx.saved_tensors
    (_, k), (_, r, c) = ctx.shapes
    dx = None if values is None else dgrad(dy, values, *index, k)
    dvalues = None if x is None else wgrad(dy, x, *index, r, c)
    return dx, dvalues, None, None, None


def _linear_sizes(x: Tensor, values: Tensor, offsets: Tensor, columns: Tensor, n: int) -> Tensor:
    return x.new_empty((x.shape[0], n), dtype=output_dtype(x.dtype))


linear = torch_operator(
    "block_sparse_linear", _linear, _linear_sizes, save=_save, backward=_linear_backward
)
dgrad = torch_operator(
    *("block_sparse_dgrad", _dgrad),
    lambda dy, values, offsets, columns, k: dy.new_empty(dy.shape[0], k),
)
wgrad = torch_operator(
    *("block_sparse_wgrad", _wgrad),
    lambda dy, x, offsets, columns, r, c: x.new_empty(columns.shape[0], r, c),
)


# ---- the layer's product ----


def multiply(
    x: Tensor, values: Tensor, bias: Tensor | None, offsets: Tensor, columns: Tensor, n: int
) -> Tensor:
    """Return Y [..., n] of X [..., k], plus the bias [n]. Raises FormatError, Unsupported."""
    if is_traced():
        y = linear(rows_of(x), values, offsets, columns, n)
        return unflatten(y if bias is None else y + bias.to(y.dtype), x)
    pattern = pattern_of(offsets, columns)

    def run(rows: Tensor) -> Tensor:
        y = _y(pattern, rows, values, n, live=values.requires_grad)
        return y if bias is None else y.add_(bias)

    if not _differentiated(x, values, bias):
        return unflatten(run(rows_of(x)), x)
    sizes = (n, x.shape[-1]), _block(values, pattern.columns)
    return node(SIGNATURE, partial(_gradients, pattern, *sizes), run, bias, x, values)


def multiply_recorded(
    recordings: Recordings, x: Tensor, n: int, guards: Sequence[Guard], *, cast: bool
) -> Tensor:
    """Return `multiply`, and record it if it repeats the call before it.

    recordings  of the weight, with the SIGNATURE
    guards      of values, bias, offsets and columns, in this order
    cast        the operands were cast for autocast
    """
    values, bias, offsets, columns = (guard.value for guard in guards)
    assert isinstance(values, Tensor)
    assert isinstance(offsets, Tensor)
    assert isinstance(columns, Tensor)
    assert not isinstance(bias, nn.Module)
    in_python = partial(multiply, x, values, bias, offsets, columns, n)
    if cast or is_traced() or not is_current(x.device):
        return in_python()
    if recordings.due():
        pattern_of(offsets, columns).calls = -1  # so that the next call compares
    pattern, live, k = pattern_of(offsets, columns), values.requires_grad, x.shape[-1]
    if not (m := x.numel() // max(k, 1)):
        return in_python()
    _require_alike(pattern, x, values)
    block = _block(values, columns)
    call = BsrCall("linear", m, (n, k), block, x.dtype, live)
    values_guard, bias_guard, *index = guards  # each call reads the bias, and values in training
    operand_guards = values_guard._replace(content=not live), bias_guard._replace(content=False)
    conditions = Conditions(
        guards=[*operand_guards, *index],
        held=[values],
        bias=bias,
        derivative=partial(_gradients, pattern, (n, k), block),
        limit=0 if pattern.frozen else COMPARE_EVERY,
    )
    run = partial(pattern.run, call, b=values) if pattern.is_planned(call) else None
    return recordings.product(x, conditions, run, in_python)


def _differentiated(*operands: Tensor | None) -> bool:
    """Return whether autograd must see the call."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


def _gradients(
    pattern: PlannedPattern,
    shape: tuple[int, int],
    block: tuple[int, int],
    front: Front | None,
    dy: Tensor,
    saved: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return dX [..., k] and dW [blocks, r, c] of dY [..., n]: a Derivative of the SIGNATURE."""
    (x, values, *_), (for_x, for_values), (n, k) = saved, needed, shape
    dx = dw = None
    flat = dy if dy.dim() == 2 else dy.reshape(-1, n)
    again = torch.is_grad_enabled() or is_traced()  # operators refuse second derivatives
    index = pattern.offsets, pattern.columns
    if for_x and values is not None:
        dx = dgrad(flat, values, *index, k) if again else _dx(pattern, flat, values, k, front)
        dx = unflatten(dx, dy)
    if for_values and x is not None:
        rows = rows_of(x)
        dw = wgrad(flat, rows, *index, *block) if again else _dw(pattern, flat, rows, *block, front)
    return dx, dw
