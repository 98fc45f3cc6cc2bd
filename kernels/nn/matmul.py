"""Y[..., n] = X[..., k] @ W[n, k].T for a weight in any format.

Without a kernel's name, each weight has the plans that layers have (selection.py): the first call
with a number of tokens may time what its format offers.

    dense    torch's own product; gradients of X and W
    bsr      as BlockSparseLinear (_bsr_plans.py); gradients of X and W
    spense   as SpenseLinear (_spense_op.py) on Hopper, a dense product on a CPU; gradient of X
             spense_mma on other GPUs; no gradient
    csr      csr_cuda on a GPU, scipy_csr on a CPU; gradients as for a named kernel
    bitmap   bitmap_mma, or torch's own product with a dense copy of W (_frozen_op.py); gradient of
             X, from the copy
    other    Unsupported: the caller must name a kernel

A named kernel, such as torch_bsr, has gradients if there are kernels NAME_dgrad and NAME_wgrad. It
is prepared once for each weight, number of tokens and stream, and uses its own buffers for X and Y,
so X and Y are copied. Preparing may search, which takes up to seconds. If the weight was written in
place, which torch's version counters show, it is prepared again.

A call that cannot run, or whose gradient cannot, raises Unsupported with the reason before the
product is computed. No other kernel takes its place.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import linear

from sparsebench._discovery import load, modules
from sparsebench.errors import SuiteError, Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.formats.dense import Dense
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.capture import captured_into, keep, sweep
from sparsebench.kernels._common.cuda import HOPPER
from sparsebench.kernels._common.front import Guard, recorded
from sparsebench.kernels._common.transforms import transformed, watched
from sparsebench.kernels._kernel import Kernel, Launch, Operands, unsupported
from sparsebench.kernels.nn import _bsr_autograd, _frozen_op, _spense_op
from sparsebench.kernels.nn._bsr_pattern import pattern_of
from sparsebench.kernels.nn._frozen_op import NAMES
from sparsebench.results.record import Problem

FRONT = "_sparsebench_front"  # attribute of a weight: calls without Python (front.py)
SUFFIXES = {"linear": "", "linear_dgrad": "_dgrad", "linear_wgrad": "_wgrad"}
PREPARED = 8  # launches that a weight keeps, each with buffers for its number of tokens
DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda w, x: linear(x, w),
    "linear_dgrad": lambda w, dy: dy @ w,
    "linear_wgrad": lambda dy, x: dy.T @ x,
}


def matmul(x: Tensor, w: Format, kernel: str | None = None, **options: Any) -> Tensor:
    """Return X @ W.T, a new tensor [..., n] of X [..., k].

    w        [n, k], packed: Bsr.from_dense(weight, block=64). Gradients flow to its `values`, and
             through them to the dense weight that it was packed from
    kernel   name of a kernel for the op linear that reads this format, as in a suite; by default
             the format selects it (see the module's docstring)
    options  of the named kernel, as in a suite: tuned=True

    A CUDA graph that captures the call keeps the weight, and everything that the kernel reads of
    it, alive. The caller must keep X, as for any torch op, and must call a named kernel once before
    each capture. Raises Unsupported, FormatError.
    """
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        raise Unsupported(f"matmul: expected X as a dense torch.Tensor, found {_kind(x)}")
    if not isinstance(w, Format):
        expected = "expected W in a format, such as Bsr.from_dense(weight, block=64)"
        raise Unsupported(f"matmul: {expected}; found {_kind(w)}")
    if kernel is not None and not isinstance(kernel, str):
        raise Unsupported(f"matmul: expected the name of a kernel, found {_kind(kernel)}")
    if kernel is None and not torch.compiler.is_compiling():
        front = w.__dict__.get(FRONT)
        fast: Tensor | None = None if front is None else front(x)
        if fast is not None:
            return fast
    n, k = w.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise Unsupported(f"matmul: expected X [..., {k}], found {list(x.shape)}")
    flat = x.reshape(-1, k)
    _require_alike(flat, w)
    if kernel is None and options:
        raise Unsupported(f"matmul: expected kernel=NAME beside {', '.join(options)}, found none")
    with torch.cuda.device_of(flat), torch.autocast(x.device.type, enabled=False):
        if kernel is None and isinstance(w, Bsr):
            keep(w)
            return _bsr(x, w)
        y = _by_format(flat, w) if kernel is None else _by_name(flat, w, kernel, options)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], n)


def _kind(value: object) -> str:
    return f"a tensor of {value.layout}" if isinstance(value, Tensor) else type(value).__name__


def _by_format(x: Tensor, w: Format) -> Tensor:
    """Run what the format selects."""
    keep(w)
    if isinstance(w, Dense):
        return linear(x, w.values)
    training = torch.is_grad_enabled() and x.requires_grad
    if isinstance(w, Spense):
        if x.is_cuda and torch.cuda.get_device_capability(x.device) != HOPPER:
            return _by_name(x, w, "spense_mma", {})
        tensors, layout = (x, w.sparse, w.dense), (*w.shape, *w.sparse_shape, None)
        if _is_seen() or not _spense_op.planned(*tensors, layout, None):
            operands: tuple[Any, ...] = (*tensors, *layout)
            traced = training or _is_seen()
            y: Tensor = (_spense_op.linear if traced else _spense_op.eager)(*operands)
            return y
        guards = _guards(w)
        front, rest = w.__dict__.get(FRONT), (layout, None)
        y, made = _spense_op.multiply_recorded(front, x, tensors, rest, guards, training=training)
        return _keep_front(w, made, y)
    if isinstance(w, Bitmap):
        return linear(x, _dense_copy(w)) if training or _is_seen() else _frozen(x, w)
    if isinstance(w, Csr):
        if not x.is_cuda:
            return _by_name(x, w, "scipy_csr", {})
        values = torch.is_grad_enabled() and w.values.requires_grad
        if training or values or _is_seen():
            return _by_name(x, w, "csr_cuda", {})
        return _frozen(x, w)
    raise Unsupported(f"matmul: expected kernel=NAME for the format {type(w).__name__}, found none")


def _bsr(x: Tensor, w: Bsr) -> Tensor:
    """Return Y [..., n] of X [..., k]."""
    if captured_into():  # writes into the index replace its pattern
        keep(pattern_of(w.offsets, w.columns))
    if torch.compiler.is_compiling():
        return _bsr_autograd.multiply(x, w.values, None, w.offsets, w.columns, w.shape[0])
    names = "values", "bias", "offsets", "columns"
    guards = [Guard(None, name, getattr(w, name, None)) for name in names]
    front = w.__dict__.get(FRONT)
    y, made = _bsr_autograd.multiply_recorded(front, x, w.shape[0], guards, cast=False)
    return _keep_front(w, made, y)


def _frozen(x: Tensor, w: Bitmap | Csr) -> Tensor:
    """Multiply by a weight without a gradient (_frozen_op.py)."""
    x = _bsr_autograd.readable(x)
    if not x.is_cuda or not _frozen_op.is_planned(x.shape[0], w):
        return _frozen_op.multiply(x, w)
    return _recorded(x, w, partial(_frozen_op.multiply, x, w))


def _recorded(x: Tensor, w: Format, run: Callable[[], Tensor]) -> Tensor:
    """Run a planned call, and record it for the next ones."""
    y, made = recorded(w.__dict__.get(FRONT), x, run, _guards(w))
    return _keep_front(w, made, y)


def _guards(w: Format) -> list[Guard]:
    return [Guard(None, name, array) for name, array in w.arrays().items()]


def _keep_front(w: Format, front: Any, y: Tensor) -> Tensor:
    """Keep what has the recordings of a weight, and return Y."""
    object.__setattr__(w, FRONT, front)
    return y


def _is_seen() -> bool:
    """Return whether torch traces, transforms or differentiates forward."""
    return transformed() or watched() or forward_ad._current_level >= 0


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


_dense_copy: Callable[[Bitmap], Tensor]
_dense_copy = torch.compiler.disable(_frozen_op.dense_copy)  # looks up the copy


# ---- a kernel by its name ----


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


_by_name: Callable[[Tensor, Format, str, Mapping[str, Any]], Tensor]
_by_name = torch.compiler.disable(_run_named)  # looks up launches


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

    versions  of its arrays at that time
    prepared  by key and stream, the most recently used one last
    choices   of launches that graphs have taken, so that preparing again needs no search
    taken_by  launches by number of the capture and key; their graphs keep them alive
    """

    versions: tuple[int, ...]
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
    arrays = [*w.arrays().values()]
    if any(array.is_inference() for array in arrays):
        expected = "expected a weight made outside of torch.inference_mode"
        raise Unsupported(f"matmul: {expected}, because torch does not count writes to this one")
    versions = tuple(array._version for array in arrays)
    if id(w) not in _WEIGHTS:
        finalize(w, _WEIGHTS.pop, id(w), None)  # a later weight may get the same id
    elif _WEIGHTS[id(w)].versions == versions:
        return _WEIGHTS[id(w)]
    _WEIGHTS[id(w)] = Weight(versions)
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
