"""Repeat the planned calls of a layer in Python: the stand-in for front.cpp without a compiler.

    layer(x) --> Repeats(x) --> guards hold --> the call for the layout of x --> y
                     |                                    |   if a gradient is needed:
                     |                                    |   PythonNode of autograd
                     +----- None: the layer takes its own path, which checks, plans and adds a call

    backward of y --> the calls for the layouts of dy, x and the values --> dX, dW
                     |
                     +----- none, or create_graph: the Derivative, which checks, plans and adds

A repeated call skips the checks of the layer's own path, but plans, arguments and launches are the
same. Calls that torch traces or transforms take that path.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsebench.kernels._common.capture import is_capturing
from sparsebench.kernels._common.transforms import is_transformed, is_watched, rows_of, unflatten

LINEAR, DGRAD, WGRAD = range(3)
"""Products of a Front, of [X] or [X, values]; [dY], [dY, values] or [dY, X]; and [dY, X]."""
ALIGNMENT = 16  # bytes, of an operand's address
MOST = 64  # calls of a product, one for each layout of its operands; the oldest makes room
PLAIN = Tensor, torch.nn.Parameter

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


class Repeats:
    """Calls by the layout of their operands; the interface is that of Front in front.cpp."""

    def __init__(self, limit: int) -> None:
        """Allow so many calls until the layer's own path must be taken once; 0: any number."""
        self.stale = self._trained = False
        self._limit = self._left = limit
        self._guards: list[tuple[Mapping[str, Any], str, Any]] = []
        self._tensors: list[tuple[Tensor, int, bool]] = []
        self._contents: list[tuple[Tensor, int, int]] = []
        self._runs: tuple[dict[Any, Run], ...] = {}, {}, {}
        self._derivative: Any = None

    def guard(self, holder: Mapping[str, Any] | None, name: str, value: Any, content: bool) -> None:
        """Require that `holder[name]` stays this object, and that a tensor stays as it is."""
        if holder is not None:
            self._guards.append((holder, name, value))
        if isinstance(value, Tensor):
            self._tensors.append((value, value.data_ptr(), value.requires_grad))
            self._trained |= value.requires_grad
            if content:
                self._contents.append((value, value.data_ptr(), value._version))

    def differentiate(self, *derivative: Any) -> None:
        """Take the fields of the Derivative of calls that need a gradient."""
        self._derivative = Derivative(*derivative)

    def add(self, op: int, operands: Sequence[Tensor], run: Run) -> None:
        """Repeat `run` for operands with these layouts."""
        layouts, runs = tuple(map(_layout, operands)), self._runs[op]
        if None not in layouts:
            if len(runs) >= MOST:
                del runs[next(iter(runs))]
            runs[layouts] = run

    def __call__(self, x: Tensor) -> Tensor | None:
        """Return Y [..., n] of X [..., k], or None if the layer must take its own path."""
        run = self._runs[LINEAR].get((_layout(x),)) if _is_plain(x) else None
        if run is None:
            return None
        if not self._holds():
            self.stale = True
            return None
        differentiated = torch.is_grad_enabled() and (self._trained or x.requires_grad)
        if differentiated and self._derivative is None:
            return None
        if self._limit:
            self._left -= 1
            if self._left <= 0:
                return None
        if differentiated:
            return node(x, run, self._derivative, self._gradients)
        return unflatten(run(rows_of(x)), x)

    def _gradients(
        self, dy: Tensor, x: Tensor | None, values: Tensor | None, for_x: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dX and dW, those that are needed; repeat their products if there are calls."""
        dx = dw = None
        if not torch.is_grad_enabled() and _is_plain(dy) and self._holds_contents():
            rows, other = rows_of(dy), None if x is None else rows_of(x)
            if for_x:
                dx = self._run(DGRAD, rows, other if values is None else values)
                dx = None if dx is None else unflatten(dx, dy)
            if for_values:
                dw = self._run(WGRAD, rows, other)
        for_x, for_values = for_x and dx is None, for_values and dw is None
        if for_x or for_values:
            more = self._derivative.run(self, dy, x, values, for_x, for_values)
            dx, dw = more[0] if for_x else dx, more[1] if for_values else dw
        return dx, dw

    def _run(self, op: int, a: Tensor, b: Tensor | None) -> Tensor | None:
        """Return a product, or None if there is no call for these layouts."""
        layouts = (_layout(a),) if b is None else (_layout(a), _layout(b))
        run = self._runs[op].get(layouts)
        if run is None:
            return None
        return run(a) if b is None else run(a, b)

    def _holds(self) -> bool:
        """Return whether every guard holds."""
        for holder, name, value in self._guards:
            if holder.get(name) is not value:
                return False
        for t, address, trained in self._tensors:
            if t.data_ptr() != address or t.requires_grad != trained:
                return False
        return self._holds_contents()

    def _holds_contents(self) -> bool:
        """Return whether the weight is as the added calls read it."""
        for t, address, version in self._contents:
            if t._version != version or t.data_ptr() != address:
                return False
        return True

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
    seen = is_transformed() or is_watched() or forward_ad._current_level >= 0
    kind = "cuda" if x.is_cuda else "cpu"  # `x.device.type` takes 1 µs
    return not (seen or torch.is_autocast_enabled(kind) or is_capturing(x))


# ---- autograd ----


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


def node(
    x: Tensor, run: Run, derivative: Derivative, gradients: Callable[..., Any] | None = None
) -> Tensor:
    """Return run(X) with a gradient: by default that of the Derivative, which repeats nothing."""
    _, values, bias, keeps_x = derivative
    return _apply(x, values, bias, keeps_x, gradients or partial(derivative.run, None), run)
