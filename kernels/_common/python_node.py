"""The autograd node of a call in Python, for calls that front.cpp does not replay."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsebench.kernels._common.front import Derivative, Signature
from sparsebench.kernels._common.transforms import rows_of, unflatten


class PythonNode(torch.autograd.Function):
    """Y [..., n] = run(X [..., k]) without torch's dispatcher, which takes 100 µs."""

    @staticmethod
    def forward(
        ctx: Any,
        signature: Signature,
        derivative: Derivative,
        run: Callable[[Tensor], Tensor],
        bias: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        _, _, _, needs_bias, *needed = ctx.needs_input_grad
        products = [p for p in signature.numbers if any(needed[i] for i in p[1])]
        indices = {i for reads, _ in products for i in reads}
        ctx.save_for_backward(*(t if i in indices else None for i, t in enumerate(operands)))
        ctx.derivative = derivative
        ctx.bias_dtype = bias.dtype if bias is not None and needs_bias else None
        x = operands[0]
        return unflatten(run(rows_of(x)), x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _, _, _, _, *needed = ctx.needs_input_grad
        gradients: Sequence[Tensor | None] = [None] * len(needed)
        dbias = None
        if any(needed):
            gradients = ctx.derivative(None, dy, ctx.saved_tensors, needed)
        if (dtype := ctx.bias_dtype) is not None:
            leading = [*range(dy.dim() - 1)]  # an empty list would sum over all dimensions
            dbias = dy.sum(leading, dtype=dtype) if leading else dy.to(dtype)
        return None, None, None, dbias, *gradients


# Function.apply looks for torch.func's wrappers first, which callers of `node` have done.
node: Callable[..., Tensor] = super(torch.autograd.Function, PythonNode).apply
"""(signature, derivative, run, bias, *operands) -> run(rows of X), which adds the bias.

operands  X, and the tensors that the Signature holds; they have gradients
"""
