"""Repeat the planned calls of a layer in Python: the stand-in for front.cpp without a compiler.

    layer(x) --> Repeats(x) --> guards hold --> the call for the layout of x --> y
                     |                                    |
                     +----- None: the layer takes its own path, which checks, plans and adds a call

A repeated call skips the checks of the layer's own path, but plans, arguments and launches are the
same. Calls that need a gradient, or that torch traces or transforms, take that path.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsebench.kernels._common.capture import is_capturing
from sparsebench.kernels._common.transforms import batched, rows_of, transformed, watched

ALIGNMENT = 16  # bytes, of the address of X
MOST = 64  # calls of a weight, one for each layout of X; the oldest makes room
PLAIN = Tensor, torch.nn.Parameter

Run = Callable[[Tensor], Tensor]
"""Returns Y [m, n] of X [m, k], for one layout of X, without a check and with the bias."""


class Repeats:
    """Calls by the layout of X; the interface is that of Front in front.cpp."""

    def __init__(self, limit: int) -> None:
        """Allow so many calls until the layer's own path must be taken once; 0: any number."""
        self.stale = False
        self._limit = self._left = limit
        self._guards: list[tuple[Mapping[str, Any] | None, str, Any]] = []
        self._tensors: list[tuple[Tensor, int, int | None, bool]] = []
        self._runs: dict[Any, Run] = {}

    def guard(self, holder: Mapping[str, Any] | None, name: str, value: Any, content: bool) -> None:
        """Require that `holder[name]` stays this object, and that a tensor stays as it is."""
        if holder is not None:
            self._guards.append((holder, name, value))
        if isinstance(value, Tensor):
            version = value._version if content else None
            self._tensors.append((value, value.data_ptr(), version, value.requires_grad))

    def differentiate(self, *_: Any) -> None:
        """Ignore how calls are differentiated: such calls are not repeated."""

    def add(self, x: Tensor, run: Run) -> None:
        """Repeat `run` for tensors with the layout of X."""
        if (layout := _layout(x)) is not None:
            if len(self._runs) >= MOST:
                del self._runs[next(iter(self._runs))]
            self._runs[layout] = run

    def __call__(self, x: Tensor) -> Tensor | None:
        """Return Y [..., n] of X [..., k], or None if the layer must take its own path."""
        run = self._runs.get(_layout(x)) if _is_plain(x) else None
        if run is None:
            return None
        for holder, name, value in self._guards:
            if holder is not None and holder.get(name) is not value:
                self.stale = True
                return None
        differentiated = torch.is_grad_enabled()
        if differentiated and x.requires_grad:
            return None
        for t, address, version, trained in self._tensors:
            written = version is not None and t._version != version
            if written or t.data_ptr() != address or t.requires_grad != trained:
                self.stale = True
                return None
            if differentiated and trained:
                return None
        if self._limit:
            self._left -= 1
            if self._left <= 0:
                return None
        return batched(run(rows_of(x)), x)

    def due(self) -> bool:
        """Return whether the limit has been reached, and count anew."""
        is_due = self._limit > 0 and self._left <= 0
        if is_due:
            self._left = self._limit
        return is_due

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as None, because the calls are of this layer's memory."""
        return type(None), ()


def _layout(x: Tensor) -> tuple[Any, ...] | None:
    """Return what decides which plan multiplies X, or None if a kernel cannot read it."""
    if type(x) not in PLAIN or x.data_ptr() % ALIGNMENT:
        return None
    return x.shape, x.stride(), x.dtype, x.device


def _is_plain(x: Tensor) -> bool:
    """Return whether the call runs on the current device, and torch does not have to see it."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return False
    seen = transformed() or watched() or forward_ad._current_level >= 0
    return not (seen or torch.is_autocast_enabled(x.device.type) or is_capturing(x))
