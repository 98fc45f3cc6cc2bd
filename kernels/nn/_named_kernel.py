"""A product by a named kernel of ours, for `sparsebench.matmul`: an operator with it alone.

Each op and bucket of tokens is planned once, and again if torch counts a write to the weight.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsebench._discovery import load, modules
from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.kernels._common.capture import keep
from sparsebench.kernels._common.operator import Engine, Operator
from sparsebench.kernels._common.transforms import readable
from sparsebench.kernels._kernel import NAMES, Operands
from sparsebench.kernels.nn._stamp import stamped
from sparsebench.results.record import Problem

ATTRIBUTE = "_sparsebench_named"
SUFFIXES = {"linear": "", "linear_dgrad": "_dgrad", "linear_wgrad": "_wgrad"}
DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda w, x: linear(x, w),
    "linear_dgrad": lambda w, dy: dy @ w,
    "linear_wgrad": lambda dy, x: dy.T @ x,
}


@dataclass(eq=False)
class NamedPlans:
    """The operators of a weight by kernel and op, and what each product reads of the weight."""

    operators: dict[str, Operator] = field(default_factory=dict)
    stored: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)


def _run_named(x: Tensor, w: Format, name: str) -> Tensor:
    engine_of(name, "linear", w, x)
    values = w.arrays().get("values")
    if torch.is_grad_enabled():
        if x.requires_grad:
            engine_of(name, "linear_dgrad", w, x)
        if values is not None and values.requires_grad:
            engine_of(name, "linear_wgrad", w, x)
    return _NamedProduct.apply(x, values, w, name)  # type: ignore[no-any-return,no-untyped-call]


by_name: Callable[[Tensor, Format, str], Tensor]
by_name = torch.compiler.disable(_run_named)  # looks up plans


class _NamedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor | None, w: Format, name: str) -> Tensor:
        ctx.save_for_backward(x, values)  # so a write before backward is an error
        ctx.w, ctx.name = w, name
        return _run(name, w, "linear", x=x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, _), (needs_x, needs_w, *_) = ctx.saved_tensors, ctx.needs_input_grad
        with torch.cuda.device_of(dy):
            dx = _run(ctx.name, ctx.w, "linear_dgrad", dy=dy) if needs_x else None
            dw = _run(ctx.name, ctx.w, "linear_wgrad", dy=dy, x=x) if needs_w else None
        return dx, dw, None, None


def engine_of(name: str, op: str, w: Format, x: Tensor) -> Engine:
    """Return the engine of an op that a kernel names. Raises Unsupported, SuiteError."""
    place = name + SUFFIXES[op]
    if place not in modules("kernels") and op != "linear":
        expected = f"expected a kernel {place} for the gradient of {name}"
        raise Unsupported(f"matmul: {expected}, found none")
    engine = load("kernels", place)
    if not isinstance(engine, Engine):
        gone = "since 0.4 a suite runs those of libraries"
        raise Unsupported(f"matmul: {place}: expected a kernel of sparsebench's own; {gone}")
    if load("formats", engine.consumes) is not type(w):
        expected = f"expected format {engine.consumes}, found {type(w).__name__}"
        raise Unsupported(f"matmul: {place}: {expected}")
    if engine.op != op:
        raise Unsupported(f"matmul: {place}: expected a kernel of {op}, found one of {engine.op}")
    if reason := engine.unsupported(_problem(op, w, x), x.device):
        raise Unsupported(f"matmul: {place}: {reason}")
    return engine


def _run(name: str, w: Format, op: str, **activations: Tensor) -> Tensor:
    """Return the product, or the values of the weight's gradient; the first call plans it."""
    rows = {key: readable(a.detach()) for key, a in activations.items()}  # of 16 bytes
    (n, k), first, values = w.shape, next(iter(rows.values())), w.arrays().get("values")
    if not len(first):
        empty = {"linear": (0, n), "linear_dgrad": (0, k)}
        return first.new_zeros(empty[op] if values is None or op in empty else values.shape)
    engine = engine_of(name, op, w, first)
    plans: NamedPlans = stamped(w, "matmul", ATTRIBUTE, NamedPlans)
    keep(plans)
    bare: Any = w  # plans hold a copy, and are freed when w is
    bare = copy(bare) if values is None else replace(bare, values=values.detach())
    bare.__dict__.pop(ATTRIBUTE, None)
    weights, pattern = ({}, bare) if op == "linear_wgrad" else ({"w": bare}, None)
    problem = _problem(op, w, first)
    operands = Operands(problem, weights, rows, DEFINITIONS[op], pattern=pattern)
    bound = engine.bind(operands, (engine,))
    operator = plans.operators.setdefault(engine.name + op, bound.operator)
    product = operator.select(bound.call, bound.run).product
    if id(product) not in plans.stored:
        plans.stored[id(product)] = bound.weights(product)
    output = bound.result(product.run(*bound.activations, *plans.stored[id(product)]))
    return output if isinstance(output, Tensor) else output.arrays()["values"]


def _problem(op: str, w: Format, x: Tensor) -> Problem:
    n, k = w.shape
    return Problem(op, {"dtype": NAMES[x.dtype], "m": len(x), "n": n, "k": k})
