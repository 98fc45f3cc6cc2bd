"""Three operators of torch with autograd: a block-sparse linear layer and both its gradients.

    Y [m, n]  = X [m, k] @ W [n, k].T            linear
    dX [m, k] = dY [m, n] @ W                    dgrad
    dW        = dY.T @ X where W has blocks      wgrad

W is [n, k] in BSR (formats/bsr.py): offsets and columns, int32, and values [blocks, r, c]. Offsets
and columns must never be written into: plans depend on them, and live as long as they do
(_bsr_plans.py). The operators are opaque to torch.compile. A captured CUDA graph holds only their
kernels. Each operator is linear in both operands; its derivatives are the other two operators.

A layer calls `multiply`: `linear` without torch's dispatcher, except under torch.compile.
"""

from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import FormatError, Unsupported
from sparsebench.kernels.nn._bsr_plans import Call, planned

ALIGNMENT = 16  # bytes: of addresses and strides, for TMA and vector loads


def _linear(x: Tensor, values: Tensor, offsets: Tensor, columns: Tensor, n: int) -> Tensor:
    """Return Y [m, n] of X [m, k]. Raises FormatError, Unsupported."""
    m, k = x.shape
    call = Call("linear", m, (n, k), _block(values, columns), x.dtype)
    return _multiply(call, x, values, offsets, columns, (m, n))


def _dgrad(dy: Tensor, values: Tensor, offsets: Tensor, columns: Tensor, k: int) -> Tensor:
    """Return dX [m, k] of dY [m, n]. Raises FormatError, Unsupported."""
    m, n = dy.shape
    call = Call("dgrad", m, (n, k), _block(values, columns), dy.dtype)
    return _multiply(call, dy, values, offsets, columns, (m, k))


def _wgrad(dy: Tensor, x: Tensor, offsets: Tensor, columns: Tensor, r: int, c: int) -> Tensor:
    """Return dW [blocks, r, c] of dY [m, n] and X [m, k]. Raises FormatError, Unsupported."""
    (tokens, n), (m, k) = dy.shape, x.shape
    if tokens != m:
        raise Unsupported(f"expected {m} tokens of dY as of X, found {tokens}")
    call = Call("wgrad", m, (n, k), (r, c), x.dtype)
    return _multiply(call, dy, readable(x), offsets, columns, (columns.shape[0], r, c))


def _multiply(
    call: Call, a: Tensor, b: Tensor, offsets: Tensor, columns: Tensor, out: tuple[int, ...]
) -> Tensor:
    """Check that dtypes and devices agree, and run the planned kernel. Raises Unsupported."""
    if a.dtype != b.dtype:
        raise Unsupported(f"expected operands of one dtype, found {a.dtype} and {b.dtype}")
    if not a.device == b.device == offsets.device == columns.device:
        devices = {str(t.device) for t in (a, b, offsets, columns)}
        raise Unsupported(f"expected one device, found {', '.join(sorted(devices))}")
    if not call.m or not columns.shape[0]:
        return a.new_zeros(out)
    with torch.cuda.device_of(a):
        return planned(call, offsets, columns)(readable(a), b)


def _block(values: Tensor, columns: Tensor) -> tuple[int, int]:
    """Return r and c; raise FormatError unless values are one aligned block for each column."""
    shape = values.shape
    if len(shape) != 3 or shape[0] != columns.shape[0]:
        expected = f"[{len(columns)}, r, c]"
        raise FormatError(f"values: expected shape {expected}, found {list(shape)}")
    if not values.is_contiguous():
        raise FormatError(f"values: expected contiguous, found strides {list(values.stride())}")
    if values.is_cuda and values.data_ptr() % ALIGNMENT:
        found = f"{values.data_ptr() % ALIGNMENT} modulo {ALIGNMENT}"
        raise FormatError(
            f"values: expected an address of a multiple of {ALIGNMENT}, found {found}"
        )
    return shape[1], shape[2]


def readable(matrix: Tensor) -> Tensor:
    """Return the matrix [m, k], or a contiguous copy where a kernel could not read its rows."""
    (m, k), (step, one) = matrix.shape, matrix.stride()
    aligned = not matrix.data_ptr() % ALIGNMENT
    gap = one == 1 and step > k and not step * matrix.element_size() % ALIGNMENT
    if aligned and (gap or (step, one) == (k, 1)):
        return matrix
    flat = matrix.contiguous() if aligned else matrix.clone(memory_format=torch.contiguous_format)
    return flat.view(-1).view(m, k)  # a single row may come with any stride


linear = torch.library.custom_op("sparsebench::block_sparse_linear", _linear, mutates_args=())
dgrad = torch.library.custom_op("sparsebench::block_sparse_dgrad", _dgrad, mutates_args=())
wgrad = torch.library.custom_op("sparsebench::block_sparse_wgrad", _wgrad, mutates_args=())


@linear.register_fake
def _(x: Tensor, values: Tensor, offsets: Tensor, columns: Tensor, n: int) -> Tensor:
    return x.new_empty(x.shape[0], n)


@dgrad.register_fake
def _(dy: Tensor, values: Tensor, offsets: Tensor, columns: Tensor, k: int) -> Tensor:
    return dy.new_empty(dy.shape[0], k)


@wgrad.register_fake
def _(dy: Tensor, x: Tensor, offsets: Tensor, columns: Tensor, r: int, c: int) -> Tensor:
    return x.new_empty(columns.shape[0], r, c)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the index, and each operand only if the gradient of the other one is needed."""
    a, b, offsets, columns = inputs[:4]
    of_a, of_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if of_b else None, b if of_a else None, offsets, columns)
    ctx.shapes = a.shape, b.shape


def _of_linear(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, values, *index = ctx.saved_tensors
    (_, k), (_, r, c) = ctx.shapes
    dx = None if values is None else dgrad(dy, values, *index, k)
    dvalues = None if x is None else wgrad(dy, x, *index, r, c)
    return dx, dvalues, None, None, None


def _of_dgrad(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
    dy, values, *index = ctx.saved_tensors
    (_, n), (_, r, c) = ctx.shapes
    ddy = None if values is None else linear(dx, values, *index, n)
    dvalues = None if dy is None else wgrad(dy, dx, *index, r, c)
    return ddy, dvalues, None, None, None


def _of_wgrad(ctx: Any, dvalues: Tensor) -> tuple[Tensor | None, ...]:
    dy, x, *index = ctx.saved_tensors
    (_, n), (_, k) = ctx.shapes
    dvalues = dvalues.contiguous()
    ddy = None if x is None else linear(x, dvalues, *index, n)
    dx = None if dy is None else dgrad(dy, dvalues, *index, k)
    return ddy, dx, None, None, None, None


linear.register_autograd(_of_linear, setup_context=_save)
dgrad.register_autograd(_of_dgrad, setup_context=_save)
wgrad.register_autograd(_of_wgrad, setup_context=_save)


def multiply(x: Tensor, values: Tensor, offsets: Tensor, columns: Tensor, n: int) -> Tensor:
    """Return Y [m, n] of X [m, k], as `linear` does, faster. Raises FormatError, Unsupported."""
    if torch.compiler.is_compiling():
        y: Tensor = linear(x, values, offsets, columns, n)
        return y
    if torch.is_inference_mode_enabled():  # neither gradients nor forward-mode derivatives
        return _linear(x, values, offsets, columns, n)
    return _Eager.apply(x, values, offsets, columns, n)  # type: ignore[no-any-return,no-untyped-call]


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, offsets: Tensor, columns: Tensor, n: int
    ) -> Tensor:
        _save(ctx, (x, values, offsets, columns), x)
        return _linear(x, values, offsets, columns, n)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # for second derivatives
            return _of_linear(ctx, dy)
        x, values, offsets, columns = ctx.saved_tensors
        (_, k), (_, r, c) = ctx.shapes
        dx = None if values is None else _dgrad(dy, values, offsets, columns, k)
        dvalues = None if x is None else _wgrad(dy, x, offsets, columns, r, c)
        return dx, dvalues, None, None, None
