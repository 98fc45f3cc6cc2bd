"""A product by a named kernel, for `sparsebench.matmul`.

    ours     the operator with this engine alone plans each op and bucket of tokens once
    others   prepared once for each op, number of tokens and stream (`prepare -> Launch`), with
             buffers for activations, so X and Y are copied; not while a CUDA graph is captured

Both are made again if torch counts a write to the weight.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsebench._discovery import load, modules
from sparsebench.errors import SuiteError, Unsupported
from sparsebench.formats._format import Format
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.operator import Engine, Operator
from sparsebench.kernels._common.transforms import readable
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
        actual = type(w).__name__
        raise Unsupported(f"matmul: {name}: expected format {kernel.consumes}, found {actual}")
    for option in options.keys() - (accepted := _options(kernel)):
        expected = f"expected an option of {', '.join(sorted(accepted)) or 'none'}"
        raise Unsupported(f"matmul: {name}: {expected}; found {option!r}")
    named, arrays = Named(name, w, dict(options)), w.arrays()
    named.require("linear", x)
    others = [array for which, array in arrays.items() if which != "values"]
    if torch.is_grad_enabled() and any(array.requires_grad for array in others):
        expected = "expected a gradient of `values` alone, found one of another array"
        raise Unsupported(f"matmul: {name}: {expected}")
    values = arrays.get("values")
    if torch.is_grad_enabled():
        if x.requires_grad:
            named.plan_gradient("linear_dgrad", x)
        if values is not None and values.requires_grad:
            named.plan_gradient("linear_wgrad", x)
    return _NamedProduct.apply(x, values, named)  # type: ignore[no-any-return,no-untyped-call]


by_name: Callable[[Tensor, Format, str, Mapping[str, Any]], Tensor]
by_name = torch.compiler.disable(_run_named)  # looks up plans


class _NamedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor | None, named: "Named") -> Tensor:
        ctx.save_for_backward(x, values)  # so a write before backward is an error
        ctx.named = named
        return named.run("linear", x=x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, _), (needs_x, needs_w, _) = ctx.saved_tensors, ctx.needs_input_grad
        with torch.cuda.device_of(dy):
            dx = ctx.named.run("linear_dgrad", dy=dy) if needs_x else None
            dw = ctx.named.run("linear_wgrad", dy=dy, x=x) if needs_w else None
        return dx, dw, None


@dataclass(frozen=True, eq=False)
class Named:
    """A weight, a named kernel for the op linear, its options, and the kernels of its gradients."""

    kernel: str
    w: Format
    options: dict[str, Any]

    def require(self, op: str, x: Tensor) -> Kernel:
        """Return the kernel of an op. Raises Unsupported if there is none or it cannot run."""
        name = self.kernel + SUFFIXES[op]
        if name not in modules("kernels") and op != "linear":
            expected = f"expected a kernel {name} for the gradient of {self.kernel}"
            raise Unsupported(f"matmul: {expected}, found none")
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
        kernel, prepared = self.require(op, first), _prepared(self.w)
        keep(prepared)
        if isinstance(kernel, Engine):
            return _values(self._planned(kernel, op, activations, prepared)())
        with _lock:  # no other thread may overwrite the buffers before the launch reads them
            launch, buffers = self._launch(kernel, op, activations, prepared)
            for name, buffer in buffers.items():
                buffer.copy_(activations[name])
            return _values(launch()).clone()

    def plan_gradient(self, op: str, x: Tensor) -> None:
        """Plan backward, so that an unsupported gradient raises before the product runs."""
        kernel, prepared, key = self.require(op, x), _prepared(self.w), (self.kernel, op, len(x))
        if not len(x) or is_capturing(x) or key in prepared.gradients:
            return
        activations = {"dy": x.detach().new_ones(len(x), self.w.shape[0])}
        if op == "linear_wgrad":
            activations["x"] = x.detach()
        if isinstance(kernel, Engine):
            self._planned(kernel, op, activations, prepared)
        else:
            with _lock:
                self._launch(kernel, op, activations, prepared)
        prepared.gradients.add(key)

    def _planned(
        self, engine: Engine, op: str, activations: Mapping[str, Tensor], prepared: "Prepared"
    ) -> Callable[[], Any]:
        """Return the planned call; what it reads of the weight is packed once."""
        rows = {name: readable(a) for name, a in activations.items()}  # kernels read 16 bytes
        bound = engine.bind(self._operands(op, rows), (engine,))
        operator = prepared.operators.setdefault(engine.name + op, bound.operator)
        selected = operator.select(bound.call, bound.run)
        key = id(selected.product)
        if key not in prepared.stored:
            prepared.stored[key] = bound.weights(selected.product)
        operands = *bound.activations, *prepared.stored[key]
        return lambda: bound.result(selected.product.run(*operands))

    def _launch(
        self, kernel: Kernel, op: str, activations: Mapping[str, Tensor], prepared: "Prepared"
    ) -> tuple[Launch, Mapping[str, Tensor]]:
        """Return the launch for these sizes on this stream, and its buffers."""
        first = next(iter(activations.values()))
        if is_capturing(first):
            raise RuntimeError(
                f"matmul: {self.kernel} copies into buffers of its own: expected a call outside of "
                "a CUDA graph, found a capture; layers and kernels of sparsebench can be captured"
            )
        stream = torch.cuda.current_stream(first.device).cuda_stream if first.is_cuda else 0
        place = self.kernel, op, str(sorted(self.options.items())), len(first), stream
        if place not in prepared.launches:
            while len(prepared.launches) >= PREPARED:
                prepared.launches.popitem(last=False)
            buffers = {
                name: torch.empty_like(a, memory_format=torch.contiguous_format).copy_(a)
                for name, a in activations.items()
            }
            accepted = _options(kernel)  # a gradient's kernel may accept fewer
            options = {name: value for name, value in self.options.items() if name in accepted}
            launch = kernel.prepare(self._operands(op, buffers), **options)
            prepared.launches[place] = launch, buffers
        prepared.launches.move_to_end(place)
        return prepared.launches[place]

    def _operands(self, op: str, activations: Mapping[str, Tensor]) -> Operands:
        values = self.w.arrays().get("values")
        w: Any = copy(self.w)  # plans hold the copy, and are freed when w is
        w = w if values is None else replace(w, values=values.detach())
        problem = self._problem(op, next(iter(activations.values())))
        if op == "linear_wgrad":
            return Operands(problem, {}, activations, DEFINITIONS[op], pattern=w)
        return Operands(problem, {"w": w}, activations, DEFINITIONS[op])

    def _problem(self, op: str, x: Tensor) -> Problem:
        n, k = self.w.shape
        return Problem(op, {"dtype": NAMES[x.dtype], "m": len(x), "n": n, "k": k})


@dataclass(eq=False)
class Prepared:
    """What is planned and prepared for a weight, whose arrays had this stamp.

    operators  by engine and op
    stored     what a product reads of the weight
    launches   with the buffers of their activations, the most recently used one last
    gradients  kernels, ops and numbers of tokens whose backward was planned
    """

    stamp: Stamp
    arrays: list[Tensor]
    operators: dict[str, Operator] = field(default_factory=dict)
    stored: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)
    launches: OrderedDict[Any, tuple[Launch, dict[str, Tensor]]] = field(
        default_factory=OrderedDict
    )
    gradients: set[tuple[str, str, int]] = field(default_factory=set)


def _prepared(w: Format) -> Prepared:
    """Return what is prepared for the current contents of a weight. Raises Unsupported."""
    stamp = stamp_of(w, "matmul")
    if id(w) not in _WEIGHTS:
        finalize(w, _WEIGHTS.pop, id(w), None)  # a later weight may get the same id
    elif _WEIGHTS[id(w)].stamp == stamp:
        return _WEIGHTS[id(w)]
    _WEIGHTS[id(w)] = Prepared(stamp, arrays_of(w))
    return _WEIGHTS[id(w)]


def _values(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.arrays()["values"]


def _load(name: str) -> Kernel:
    kernel = load("kernels", name)
    if not isinstance(kernel, Kernel):
        raise SuiteError(f"{name}: expected KERNEL to be a Kernel, found {kernel!r}")
    return kernel


def _options(kernel: Kernel) -> set[str]:
    if isinstance(kernel, Engine):
        return set()
    parameters = inspect.signature(kernel.prepare).parameters.values()
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


_WEIGHTS: dict[int, Prepared] = {}
_lock = RLock()
