"""Y[..., n] = X[..., k] @ W[n, k].T for a weight in any format.

Without a kernel's name, each weight has the plans that layers have (operator.py): the first call
with a number of tokens may time what its format offers.

    dense    torch's own product; gradients of X and W
    bsr      as BlockSparseLinear (_bsr_engines.py); gradients of X and W. A captured call packs W
             inside of the graph, unless W is frozen (Bsr.freeze); then X alone has a gradient
    spense   as SpenseLinear (_spense_op.py): its engine for the device; gradient of X
    csr      csr_cuda, with gradients of X and W, or without one a dense product with a copy of W
             (_dense_copy.py); torch's own dense product on a CPU
    bitmap   bitmap_mma, or bitmap_pairs or a dense product with a copy of W (_dense_copy.py);
             gradient of X, from a dense copy
    other    Unsupported: the caller must name a kernel

A named kernel, one of sparsebench's own, is planned as in a layer, by an operator with it alone,
and again after a write that torch counts. It has gradients if there are kernels NAME_dgrad and
NAME_wgrad.

A call that cannot run, or whose gradient cannot, raises Unsupported with the reason before the
product is computed. No other kernel takes its place.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as disable_dynamo
from torch.autograd import forward_ad
from torch.nn.functional import linear

from sparsebench._discovery import load, modules
from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.formats.dense import Dense
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.capture import captured_into, keep, make_lasting
from sparsebench.kernels._common.front import PRODUCT, Conditions, Guard, Recordings, Signature
from sparsebench.kernels._common.operator import Engine, Operator
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.stamp import by_stamp
from sparsebench.kernels._common.torch_operator import refuse_tangents
from sparsebench.kernels._common.transforms import is_current, is_traced, readable
from sparsebench.kernels._kernel import NAMES, Operands
from sparsebench.kernels.nn import _bsr_autograd, _frozen_op, _spense_op
from sparsebench.kernels.nn._bsr_pattern import freeze_index, pattern_of
from sparsebench.kernels.nn._dense_copy import dense_copy
from sparsebench.results.record import Problem

RECORDINGS = "_sparsebench_recordings"  # attribute of a weight: calls without Python (front.py)
NAMED = "_sparsebench_named"  # attribute of a weight: plans of named kernels
SUFFIXES = {"linear": "", "linear_dgrad": "_dgrad", "linear_wgrad": "_wgrad"}
DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda w, x: linear(x, w),
    "linear_dgrad": lambda w, dy: dy @ w,
    "linear_wgrad": lambda dy, x: dy.T @ x,
}


def matmul(x: Tensor, w: Format, kernel: str | None = None) -> Tensor:
    """Return X @ W.T, a new tensor [..., n] of X [..., k].

    w        [n, k], packed: Bsr.from_dense(weight, block=64). Gradients flow to its `values`, and
             through them to the dense weight that it was packed from
    kernel   name of a kernel of ours for the op linear that reads this format, as in a suite; by
             default the format selects it (see the module's docstring)

    A CUDA graph that captures the call keeps the weight, and everything that the kernel reads of
    it, alive. The caller must keep X, as for any torch op, and must call a kernel once before a
    capture. Raises Unsupported, FormatError.
    """
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        raise Unsupported(f"matmul: expected X as a dense torch.Tensor, found {_kind(x)}")
    if not isinstance(w, Format):
        expected = "expected W in a format, such as Bsr.from_dense(weight, block=64)"
        raise Unsupported(f"matmul: {expected}; found {_kind(w)}")
    if kernel is not None and not isinstance(kernel, str):
        raise Unsupported(f"matmul: expected the name of a kernel, found {_kind(kernel)}")
    if kernel is None and not torch.compiler.is_compiling():
        recordings: Recordings | None = w.__dict__.get(RECORDINGS)
        fast: Tensor | None = None if recordings is None else recordings.replay(x)
        if fast is not None:
            return fast
    k = w.shape[1]
    if x.dim() == 0 or x.shape[-1] != k:
        raise Unsupported(f"matmul: expected X [..., {k}], found {list(x.shape)}")
    flat = x.reshape(-1, k)
    _require_alike(flat, w)
    here = not torch.compiler.is_compiling() and is_current(x.device)
    if here and not torch.is_autocast_enabled(x.device.type):  # the contexts take 20 µs
        return _multiply(x, flat, w, kernel)
    with torch.cuda.device_of(flat), torch.autocast(x.device.type, enabled=False):
        return _multiply(x, flat, w, kernel)


def _multiply(x: Tensor, rows: Tensor, w: Format, kernel: str | None) -> Tensor:
    """Return the product of X, which has these rows, on the current device without autocast."""
    if isinstance(w, Bsr) and not torch.compiler.is_compiling() and w.is_frozen:
        freeze_index(w.offsets, w.columns)
    if kernel is None and isinstance(w, Bsr):
        keep(w)
        return _bsr(x, w)
    y = _by_format(rows, w) if kernel is None else by_name(rows, w, kernel)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], w.shape[0])


def _kind(value: object) -> str:
    return f"a tensor of {value.layout}" if isinstance(value, Tensor) else type(value).__name__


def _by_format(x: Tensor, w: Format) -> Tensor:
    """Run what the format selects."""
    keep(w)
    if isinstance(w, Dense):
        return linear(x, w.values)
    training = torch.is_grad_enabled() and x.requires_grad
    if isinstance(w, Spense):
        if not x.is_cuda or is_traced():
            return _spense_op.multiply(x, w, None, None, training=training)
        recordings, guards = _recordings_of(w, _spense_op.signature_of(None)), _guards(w)
        return _spense_op.multiply_recorded(recordings, x, w, None, None, guards, training=training)
    if isinstance(w, Bitmap):
        return linear(x, _dense_weight(w)) if training or is_traced() else _frozen(x, w)
    if isinstance(w, Csr):
        if not x.is_cuda:
            return linear(x, w.to_dense())
        values = torch.is_grad_enabled() and w.values.requires_grad
        if training or values or is_traced():
            return by_name(x, w, "csr_cuda")
        return _frozen(x, w)
    raise Unsupported(f"matmul: expected kernel=NAME for the format {type(w).__name__}, found none")


def _bsr(x: Tensor, w: Bsr) -> Tensor:
    """Return Y [..., n] of X [..., k]."""
    if captured_into():  # writes into the index replace its pattern
        keep(pattern_of(w.offsets, w.columns))
    if torch.compiler.is_compiling() or not x.is_cuda:
        return _bsr_autograd.multiply(x, w.values, None, w.offsets, w.columns, w.shape[0])
    names = "values", "bias", "offsets", "columns"
    guards = [Guard(None, name, getattr(w, name, None)) for name in names]
    recordings = _recordings_of(w, _bsr_autograd.SIGNATURE)
    return _bsr_autograd.multiply_recorded(recordings, x, w.shape[0], guards, cast=False)


def _frozen(x: Tensor, w: Bitmap | Csr) -> Tensor:
    """Multiply by a weight without a gradient (_frozen_op.py)."""
    in_python = partial(_frozen_op.multiply, readable(x), w)
    if not x.is_cuda:
        return in_python()
    product, conditions = _frozen_op.planned_run(x.shape[0], w), Conditions(_guards(w))
    return _recordings_of(w, PRODUCT).product(x, conditions, product, in_python)


def of_layer(
    recordings: Recordings, x: Tensor, w: Bitmap, bias: Tensor | None, guards: Sequence[Guard]
) -> Tensor:
    """Return X @ W.T and the bias, and record the call if it repeats the call before it.

    recordings  of the layer, with the SIGNATURE of _frozen_op.py
    guards      of the layer's tensors
    """

    def in_python() -> Tensor:
        y = matmul(x, w)
        return y if bias is None else y + bias

    layout = x.dtype, x.device, x.dim() > 0 and x.shape[-1]
    plain = x.is_cuda and layout == (w.dtype, w.records.device, w.shape[1])
    traced = is_traced() or torch.is_autocast_enabled(x.device.type)
    if not plain or traced or not (m := x.numel() // w.shape[1]):
        return in_python()
    product = _frozen_op.planned_run(m, w)
    if product is None:
        with torch.no_grad():  # with a gradient, the path in Python multiplies by the dense copy
            _frozen_op.multiply(readable(x.reshape(m, -1)), w)
        return in_python()
    conditions = Conditions(guards, bias=bias, derivative=_frozen_op.derivative_of(w))
    return recordings.product(x, conditions, product, in_python)


def _guards(w: Format) -> list[Guard]:
    return [Guard(None, name, array) for name, array in w.arrays().items()]


def _recordings_of(w: Format, signature: Signature) -> Recordings:
    """Return the recorded calls of a weight, which the first call makes."""
    if (recordings := w.__dict__.get(RECORDINGS)) is None:
        recordings = Recordings(signature)
        object.__setattr__(w, RECORDINGS, recordings)
    return recordings


def _require_alike(x: Tensor, w: Format) -> None:
    """Raise Unsupported unless X has the device and the dtype of W."""
    arrays = [*w.arrays().values()]
    stored = {a.dtype for a in arrays if a.is_floating_point()} or {getattr(w, "dtype", x.dtype)}
    if stored != {x.dtype} or x.dtype not in NAMES:
        expected = f"X in the dtype of W, one of {', '.join(NAMES.values())}"
        dtypes = f"{x.dtype} and {', '.join(map(str, stored))}"
        raise Unsupported(f"matmul: expected {expected}; found {dtypes}")
    if devices := {str(a.device) for a in arrays} - {str(x.device)}:
        raise Unsupported(f"matmul: expected X on {', '.join(devices)} like W, found {x.device}")


# disable_dynamo is torch.compiler.disable, but imports torch._dynamo (1 s) in the first call
_dense_weight: Callable[[Bitmap], Tensor]
_dense_weight = disable_dynamo(dense_copy)  # looks up the copy


# ---- named kernels ----


@dataclass(eq=False)
class NamedPlans:
    """The operators of a weight by kernel and op, and what each product reads of the weight."""

    operators: dict[str, Operator] = field(default_factory=dict)
    stored: dict[Product, tuple[Tensor | None, ...]] = field(default_factory=dict)


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
by_name = disable_dynamo(_run_named)  # looks up plans


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
        if forward_ad._current_level >= 0:
            refuse_tangents(f"matmul: {ctx.name}", dy)
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
    plans: NamedPlans = by_stamp(w, "matmul", NAMED, NamedPlans)
    keep(plans)
    bare: Any = w  # plans hold a copy, and are freed when w is
    bare = copy(bare) if values is None else replace(bare, values=values.detach())
    bare.__dict__.pop(NAMED, None)
    weights, pattern = ({}, bare) if op == "linear_wgrad" else ({"w": bare}, None)
    problem = _problem(op, w, first)
    operands = Operands(problem, weights, rows, DEFINITIONS[op], pattern=pattern)
    bound = engine.bind(operands, (engine,))
    operator = plans.operators.setdefault(engine.name + op, bound.operator)
    product = operator.select(bound.call, bound.run).product
    if product not in plans.stored:
        plans.stored[product] = make_lasting(partial(bound.weights, product), first.device)
    output = bound.result(product.run(*bound.activations, *plans.stored[product]))
    return output if isinstance(output, Tensor) else output.arrays()["values"]


def _problem(op: str, w: Format, x: Tensor) -> Problem:
    n, k = w.shape
    return Problem(op, {"dtype": NAMES[x.dtype], "m": len(x), "n": n, "k": k})
