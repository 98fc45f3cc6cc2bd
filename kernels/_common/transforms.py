"""Detect calls that torch traces, and lay operands out as kernels read them.

Kernels take addresses, so a call that torch traces must go through an operator. The fast paths of
layers check this first. Under torch.func there is no address, so layers refuse it.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from sparsebench.errors import Unsupported

ALIGNMENT = 16  # bytes: of addresses and strides, for TMA and vector loads
PLAIN = Tensor, nn.Parameter  # types that have an address


def refuse_transforms() -> None:
    """Raise Unsupported if torch.func differentiates or maps the call, or TorchScript traces it."""
    if torch._C._are_functorch_transforms_active():
        raise Unsupported("expected torch.autograd.grad since 0.4, found a transform of torch.func")
    if torch._C._get_tracing_state() is not None:
        raise Unsupported("expected torch.export or torch.compile, found torch.jit.trace")


def is_traced() -> bool:
    """Return whether an operator must run: `has_mode`, or forward AD is on. Raises Unsupported."""
    refuse_transforms()
    return forward_ad._current_level >= 0 or has_mode()


def has_mode() -> bool:
    """Return whether torch.compile, torch.export or a mode (FLOP counter, fake tensors) is on."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_current(device: torch.device) -> bool:
    """Return whether a launch without a device guard would run on this device."""
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which this device is the current one; Triton launches on that one."""
    return nullcontext() if is_current(device) else torch.cuda.device(device)


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
