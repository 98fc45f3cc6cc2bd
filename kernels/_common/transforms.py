"""Detect calls that torch transforms or traces: torch.func, and modes that watch operators.

Kernels take addresses, so such a call must go through an operator or an autograd.Function with
`setup_context` and `vmap`. The fast paths of layers check this first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_transformed() -> bool:
    """Return whether torch.func differentiates or maps the call."""
    return torch._C._are_functorch_transforms_active()


def is_watched() -> bool:
    """Return whether torch.compile, torch.export or a mode (FLOP counter, fake tensors) traces."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def rows_of(x: Tensor) -> Tensor:
    """Return X [..., k] as [m, k]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


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
