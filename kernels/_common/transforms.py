"""Detect calls that torch transforms or traces, and lay operands out as kernels read them.

Kernels take addresses, so a call that torch.func transforms, or that a mode watches, must go
through an operator or an autograd.Function with `setup_context` and `vmap`. The fast paths of
layers check this first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 16  # bytes: of addresses and strides, for TMA and vector loads
PLAIN = Tensor, nn.Parameter  # types that have an address


def is_transformed() -> bool:
    """Return whether torch.func differentiates or maps the call."""
    return torch._C._are_functorch_transforms_active()


def is_watched() -> bool:
    """Return whether torch.compile, torch.export or a mode (FLOP counter, fake tensors) traces."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def rows_of(x: Tensor) -> Tensor:
    """Return X [..., k] as [m, k]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def aligned(x: Tensor) -> Tensor:
    """Return X, or a contiguous copy at a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def readable(matrix: Tensor) -> Tensor:
    """Return the matrix [m, k], or a contiguous copy if a kernel could not read its rows."""
    (m, k), (step, one) = matrix.shape, matrix.stride()
    gap = one == 1 and step > k and not step * matrix.element_size() % ALIGNMENT
    if not matrix.data_ptr() % ALIGNMENT and (gap or (step, one) == (k, 1)):
        return matrix
    return aligned(matrix).view(-1).view(m, k)  # a single row may have any stride


def unflatten(y: Tensor, x: Tensor) -> Tensor:
    """Return Y [m, n] as [..., n] for X [..., k], in the same memory.

    Autograd does not see it as a view, because FSDP2 loses its hooks if a view is written to.
    """
    if x.dim() == 2:
        return y
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1]))  # type: ignore[no-any-return]


def one_by_one(
    function: Callable[..., Any], size: int, dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Call once for each element of a batch, as vmap would, and stack the results at 0.

    dims  for each argument: the dimension of the batch, None, or a list for a list
    """

    def at(i: int, arg: Any, dim: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [at(i, each, where) for each, where in zip(arg, dim, strict=True)]
        return arg if dim is None else arg.select(dim, i)

    results = [function(*map(at, [i] * len(args), args, dims)) for i in range(size)]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])
