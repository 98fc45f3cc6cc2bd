"""The autograd node of a product in Python, which calls take that front.cpp does not replay."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebench.kernels._common.transforms import rows_of, unflatten

LINEAR, DGRAD, WGRAD = range(3)
"""Products of a Front, of [X] or [X, values]; [dY], [dY, values] or [dY, X]; and [dY, X]."""

Run = Callable[..., Tensor]
"""Returns a product of rows [m, ...], for one layout of each operand, without a check."""


class Derivative(NamedTuple):
    """How calls are differentiated.

    run           (front, dY, X, values, for_x, for_values) -> dX and dW, each a tensor or None; a
                  tensor that it does not need is None. It may add its products to the front, which
                  is None if there is nothing to repeat
    values, bias  which may have a gradient, or None
    keeps_x       whether dX needs X
    """

    run: Callable[..., tuple[Tensor | None, Tensor | None]]
    values: Tensor | None = None
    bias: Tensor | None = None
    keeps_x: bool = False


class PythonNode(torch.autograd.Function):
    """Y [..., n] = run(X [..., k]) in Python, without torch's dispatcher, which takes 100 µs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor | None,
        bias: Tensor | None,
        keeps_x: bool,
        gradients: Callable[..., tuple[Tensor | None, Tensor | None]],
        run: Run,
    ) -> Tensor:
        needs_x, needs_values, needs_bias, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_values or keeps_x else None, values if needs_x else None)
        ctx.gradients = gradients
        ctx.bias_dtype = bias.dtype if bias is not None and needs_bias else None
        return unflatten(run(rows_of(x)), x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        for_x, for_values, *_ = ctx.needs_input_grad
        dx = dw = dbias = None
        if for_x or for_values:
            dx, dw = ctx.gradients(dy, *ctx.saved_tensors, for_x, for_values)
        if (dtype := ctx.bias_dtype) is not None:
            leading = [*range(dy.dim() - 1)]  # an empty list would sum over all dimensions
            dbias = dy.sum(leading, dtype=dtype) if leading else dy.to(dtype)
        return dx, dw, dbias, None, None, None


# Function.apply looks for torch.func's wrappers first, which callers of `node` have done.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, PythonNode).apply


def node(x: Tensor, run: Run, derivative: Derivative) -> Tensor:
    """Return run(X) with the gradient of the Derivative, which records nothing."""
    gradients, values, bias, keeps_x = derivative
    return _apply(x, values, bias, keeps_x, partial(gradients, None), run)
