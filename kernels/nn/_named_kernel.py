"""A product by a named kernel, as a suite runs it, for `sparsebench.matmul`.

A kernel is prepared once for each op, number of tokens and stream, with buffers for its
activations, and again if torch counts a write to the weight. Each CUDA graph takes a launch for
itself.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsebench._discovery import load, modules
from sparsebench.errors import SuiteError, Unsupported
from sparsebench.formats._format import Format
from sparsebench.kernels._common.capture import captured_into, keep, sweep
from sparsebench.kernels._kernel import NAMES, Kernel, Launch, Operands, unsupported
from sparsebench.kernels.nn._stamp import Stamp, arrays_of, stamp_of
from sparsebench.results.record import Problem

SUFFIXES = {"linear": "", "linear_dgrad": "_dgrad", "linear_wgrad": "_wgrad"}
PREPARED = 8  # launches that a weight keeps, each with buffers for its number of tokens
DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda w, x: linear(x, w),
    "linear_dgrad": lambda w, dy: dy @ w,
    "linear_wgrad": lambda dy, x: dy.T @ x,
}


def _run_named(x: Tensor, w: Format, name: str, options: Mapping[str, Any]) -> Tensor:
    kernel = _load(name)
    if kernel.consumes != "any" and load("formats", kernel.consumes) is not type(w):
        stored = type(w).__name__
        raise Unsupported(f"matmul: {name}: expected format {kernel.consumes}, found {stored}")
    for option in options.keys() - (accepted := _options(kernel)):
        expected = f"expected an option of {', '.join(sorted(accepted)) or 'none'}"
        raise Unsupported(f"matmul: {name}: {expected}; found {option!r}")
    product, arrays = Product(name, w, dict(options)), w.arrays()
    product.require("linear", x)
    others = [array for which, array in arrays.items() if which != "values"]
    if torch.is_grad_enabled() and any(array.requires_grad for array in others):
        raise Unsupported(f"matmul: {name}: only `values` of a weight can have a gradient")
    values = arrays.get("values")
    if torch.is_grad_enabled():
        if x.requires_grad:
            product.prepare_gradient("linear_dgrad", x)
        if values is not None and values.requires_grad:
            product.prepare_gradient("linear_wgrad", x)
    return _NamedProduct.apply(x, values, product)  # type: ignore[no-any-return,no-untyped-call]


by_name: Callable[[Tensor, Format, str, Mapping[str, Any]], Tensor]
by_name = torch.compiler.disable(_run_named)  # looks up launches


class _NamedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor | None, product: "Product") -> Tensor:
        ctx.save_for_backward(x, values)  # so a write before backward is an error
        ctx.product = product
        return product.run("linear", x=x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, _), (needs_x, needs_w, _) = ctx.saved_tensors, ctx.needs_input_grad
        with torch.cuda.device_of(dy):
            dx = ctx.product.run("linear_dgrad", dy=dy) if needs_x else None
            dw = ctx.product.run("linear_wgrad", dy=dy, x=x) if needs_w else None
        return dx, dw, None


@dataclass(frozen=True, eq=False)
class Product:
    """A weight, a named kernel for the op linear, its options, and the kernels of its gradients."""

    kernel: str
    w: Format
    options: dict[str, Any]

    def require(self, op: str, x: Tensor) -> Kernel:
        """Return the kernel of an op. Raises Unsupported if there is none or it cannot run."""
        name = self.kernel + SUFFIXES[op]
        if name not in modules("kernels") and op != "linear":
            raise Unsupported(f"matmul: {self.kernel} has no gradient: there is no kernel {name}")
        kernel = _load(name)
        if reason := unsupported(kernel, self._problem(op, x), x.device):
            raise Unsupported(f"matmul: {name}: {reason}")
        return kernel

    def run(self, op: str, **activations: Tensor) -> Tensor:
        """Return the product, or the values of the weight's gradient, in new memory."""
        activations = {name: tensor.detach() for name, tensor in activations.items()}
        (n, k), first = self.w.shape, next(iter(activations.values()))
        if not len(first):
            values = self.w.arrays().get("values", first)
            empty = {"linear": (0, n), "linear_dgrad": (0, k), "linear_wgrad": values.shape}
            return first.new_zeros(empty[op])
        with _lock:  # no other thread may overwrite the buffers before the launch reads them
            prepared = self._prepared(op, activations)
            for name, buffer in prepared.activations.items():
                buffer.copy_(activations[name])
            out = prepared.launch()
            return (out if isinstance(out, Tensor) else out.arrays()["values"]).clone()

    def prepare_gradient(self, op: str, x: Tensor) -> None:
        """Prepare backward, so that an unsupported gradient raises before the product runs."""
        self.require(op, x)
        if not len(x) or captured_into() or self._place(op, x) in _weight(self.w).prepared:
            return
        activations = {"dy": x.detach().new_ones(len(x), self.w.shape[0])}
        if op == "linear_wgrad":
            activations["x"] = x.detach()
        with _lock:
            self._prepared(op, activations)

    def _prepared(self, op: str, activations: Mapping[str, Tensor]) -> "Prepared":
        """Return the launch for these sizes on this stream, or the one that a capture takes."""
        weight, place = _weight(self.w), self._place(op, next(iter(activations.values())))
        if graph := captured_into():
            return weight.take(place[0], graph[0])
        if place not in weight.prepared:
            sweep()
            while len(weight.prepared) >= PREPARED:
                weight.prepared.popitem(last=False)
            pinned = weight.choices.get(place[0])
            weight.prepared[place] = self._prepare(op, activations, pinned)
        weight.prepared.move_to_end(place)
        return weight.prepared[place]

    def _place(self, op: str, x: Tensor) -> "tuple[Key, int]":
        """Return the key and the stream: calls on two streams may run at the same time."""
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        options = str(sorted(self.options.items()))
        return Key(self.kernel, op, options, tokens=len(x), dtype=x.dtype), stream

    def _prepare(
        self, op: str, activations: Mapping[str, Tensor], pinned: Mapping[str, Any] | None
    ) -> "Prepared":
        first, values = next(iter(activations.values())), self.w.arrays().get("values")
        kernel, buffers = self.require(op, first), {n: _copy(a) for n, a in activations.items()}
        w: Any = self.w  # the launch gets a copy, because it is freed when w is
        w = copy(w) if values is None else replace(w, values=values.detach())
        sparse_output = op == "linear_wgrad"
        operands = Operands(
            problem=self._problem(op, first),
            weights={} if sparse_output else {"w": w},
            activations=buffers,
            definition=DEFINITIONS[op],
            pinned=pinned,
            pattern=w if sparse_output else None,
        )
        accepted = _options(kernel)  # a gradient's kernel may accept fewer
        options = {name: value for name, value in self.options.items() if name in accepted}
        return Prepared(kernel.prepare(operands, **options), buffers)

    def _problem(self, op: str, x: Tensor) -> Problem:
        n, k = self.w.shape
        return Problem(op, {"dtype": NAMES[x.dtype], "m": len(x), "n": n, "k": k})


@dataclass(frozen=True, eq=False)
class Prepared:
    """A launch, and the buffers of the activations that it reads."""

    launch: Launch
    activations: dict[str, Tensor]


class Key(NamedTuple):
    """Identifies a launch of a weight on any stream; `tokens` and `dtype` of X or dY."""

    kernel: str
    op: str
    options: str
    tokens: int
    dtype: torch.dtype


@dataclass(eq=False)
class Weight:
    """The launches prepared for a weight.

    stamp     of its arrays at that time
    arrays    the arrays
    prepared  by key and stream, the most recently used one last
    choices   of launches that graphs have taken, so that preparing again needs no search
    taken_by  launches by number of the capture and key; their graphs keep them alive
    """

    stamp: Stamp
    arrays: list[Tensor]
    prepared: OrderedDict[tuple[Key, int], Prepared] = field(default_factory=OrderedDict)
    choices: dict[Key, Mapping[str, Any]] = field(default_factory=dict)
    taken_by: WeakValueDictionary[tuple[int, Key], Prepared] = field(
        default_factory=WeakValueDictionary
    )

    def take(self, key: Key, graph: int) -> Prepared:
        """Reserve a launch for a graph, because replays run beside other calls."""
        if taken := self.taken_by.get((graph, key)):
            return taken
        place = next((place for place in self.prepared if place[0] == key), None)
        if place is None:
            launch = f"matmul: {key.kernel}, {key.op} of {key.tokens} tokens, is not prepared"
            raise RuntimeError(f"{launch}: call it once before each capture of a CUDA graph")
        prepared = self.prepared.pop(place)
        self.choices[key] = prepared.launch.choice
        keep(prepared)
        self.taken_by[graph, key] = prepared
        return prepared


def _weight(w: Format) -> Weight:
    """Return the launches prepared for the current contents of a weight. Raises Unsupported."""
    stamp = stamp_of(w, "matmul")
    if id(w) not in _WEIGHTS:
        finalize(w, _WEIGHTS.pop, id(w), None)  # a later weight may get the same id
    elif _WEIGHTS[id(w)].stamp == stamp:
        return _WEIGHTS[id(w)]
    _WEIGHTS[id(w)] = Weight(stamp, arrays_of(w))
    return _WEIGHTS[id(w)]


def _copy(activation: Tensor) -> Tensor:
    return torch.empty_like(activation, memory_format=torch.contiguous_format).copy_(activation)


def _load(name: str) -> Kernel:
    kernel = load("kernels", name)
    if not isinstance(kernel, Kernel):
        raise SuiteError(f"{name}: expected KERNEL to be a Kernel, found {kernel!r}")
    return kernel


def _options(kernel: Kernel) -> set[str]:
    parameters = inspect.signature(kernel.prepare).parameters.values()
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


_WEIGHTS: dict[int, Weight] = {}
_lock = RLock()
