"""Y[..., n] = X[..., k] @ W[n, k].T for a weight in any format, by our kernel or by the one named.

    format   without a name runs                                              gradients
    dense    torch's own product                                              X, W
    bsr      what BlockSparseLinear runs (_bsr_plans.py says which)           X, W
    spense   what SpenseLinear runs: spense_wgmma, on a CPU a dense product   X
             on GPUs that are no Hopper spense_mma                            none
    csr      cusparse_csr, on a CPU scipy_csr                                 by name
    bitmap   bitmap_mma where it is ahead of dense: on Hopper, up to 16       none
             tokens of layers as large as those in kernels/bitmap/NOTES.md,
             half of it zeros or more. Elsewhere torch's own product, by a    X
             dense copy of W, which is unpacked at the first such call and
             kept: twice the memory and more
    another  nothing: a kernel must be named

    a kernel by its name, such as torch_bsr                                   by name

By name: the gradients are those of the kernels NAME_dgrad and NAME_wgrad, where there are such.
What cannot run raises Unsupported with the reason, before the product: a gradient, too. Nothing
else runs in its place.

A kernel by its name is prepared once for a weight, a number of tokens and a stream, and reads an X
and writes a Y of its own. So X and Y are copied. Preparing may search, and takes up to seconds. The
weight is looked at by torch's version counters: one that was written in place is prepared anew.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor
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
from sparsebench.kernels._kernel import DTYPES, Kernel, Launch, Operands, unsupported
from sparsebench.kernels.nn import _bsr_autograd, _spense_op
from sparsebench.kernels.nn._bsr_pattern import pattern_of
from sparsebench.results.record import Problem

NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "tf32"}
# Where bitmap_mma was ahead of cuBLAS: at one token W of 14336 x 4096 or more (1.1 and more), up to
# FEW tokens of 28672 x 8192 (1.17 and more). Of the dense bytes a bitmap has 0.58 at 50 %.
FEW, ELEMENTS, MORE_ELEMENTS, ROWS, BYTES = 16, 14336 * 4096, 28672 * 8192, 4096, 0.6
CSR = {"cuda": "cusparse_csr", "cpu": "scipy_csr"}
SUFFIXES = {"linear": "", "linear_dgrad": "_dgrad", "linear_wgrad": "_wgrad"}
PREPARED = 8  # launches that are kept of a weight: with the buffers of as many sizes
DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda w, x: linear(x, w),
    "linear_dgrad": lambda w, dy: dy @ w,
    "linear_wgrad": lambda dy, x: dy.T @ x,
}


def matmul(x: Tensor, w: Format, kernel: str | None = None, **options: Any) -> Tensor:
    """Return X @ W.T, a new tensor [..., n] of X [..., k].

    w        [n, k], packed: Bsr.from_dense(weight, block=64). Gradients go to its `values`, and
             through them to a dense weight that it was packed from
    kernel   the name of a kernel of op linear that reads this format, as in a suite; by default
             ours (the table above)
    options  of the named kernel, as in a suite: tuned=True

    A CUDA graph that the call is captured into keeps the weight and all that the kernel reads of
    it; X is the caller's to keep, as for any op of torch. A named kernel is called once before each
    capture. Raises Unsupported, FormatError.
    """
    n, k = w.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise Unsupported(f"matmul: expected X [..., {k}], found {list(x.shape)}")
    flat = x.reshape(-1, k)
    _require_alike(flat, w)
    if kernel is None and options:
        raise Unsupported(f"matmul: expected kernel=NAME with {', '.join(options)}, found none")
    with torch.cuda.device_of(flat), torch.autocast(x.device.type, enabled=False):
        y = _shipped(flat, w) if kernel is None else _named(flat, w, kernel, options)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], n)


def _shipped(x: Tensor, w: Format) -> Tensor:
    """Run what the table names for the format."""
    keep(w)
    if isinstance(w, Dense):
        return linear(x, w.values)
    if isinstance(w, Bsr):
        if captured_into():  # the index may be written, and then the pattern is another one
            keep(pattern_of(w.offsets, w.columns))
        return _bsr_autograd.multiply(x, w.values, None, w.offsets, w.columns, w.shape[0])
    if isinstance(w, Csr):
        return _named(x, w, CSR.get(x.device.type, CSR["cuda"]), {})
    if isinstance(w, Spense):
        if x.is_cuda and torch.cuda.get_device_capability(x.device) != HOPPER:
            return _named(x, w, "spense_mma", {})
        grows = torch.is_grad_enabled() and x.requires_grad
        seen = grows or torch.compiler.is_compiling()
        op = _spense_op.linear if seen else _spense_op.eager
        return op(x, w.sparse, w.dense, *w.shape, *w.sparse_shape)
    if isinstance(w, Bitmap):
        few = x.is_cuda and torch.cuda.get_device_capability(x.device) == HOPPER
        if few and bits_are_ahead(len(x), w) and not (torch.is_grad_enabled() and x.requires_grad):
            return _named(x, w, "bitmap_mma", {})
        return linear(x, _unpacked(w))
    found = type(w).__name__
    raise Unsupported(f"matmul: expected kernel=NAME, as none of ours is of {found}; found none")


def bits_are_ahead(m: int, w: Bitmap) -> bool:
    """Say whether bitmap_mma was ahead of cuBLAS at a layer of at most this size, on an H200."""
    (n, k), size = w.shape, w.dtype.itemsize
    large = n * k >= (MORE_ELEMENTS if m > 1 else ELEMENTS) and n >= ROWS
    return size == 2 and m <= FEW and large and w.stored_bytes <= BYTES * n * k * size


def _require_alike(x: Tensor, w: Format) -> None:
    """Raise Unsupported unless X is on the device of W, and of its dtype."""
    arrays = [*w.arrays().values()]
    stored = {a.dtype for a in arrays if a.is_floating_point()} or {getattr(w, "dtype", x.dtype)}
    if stored != {x.dtype} or x.dtype not in NAMES:
        known = f"X in the dtype of W, one of {', '.join(NAMES.values())}"
        found = f"{x.dtype} and {', '.join(map(str, stored))}"
        raise Unsupported(f"matmul: expected {known}; found {found}")
    if devices := {str(a.device) for a in arrays} - {str(x.device)}:
        raise Unsupported(f"matmul: expected X on {', '.join(devices)} as W, found {x.device}")


def _dense_copy(w: Bitmap) -> Tensor:
    weight = _weight(w)
    if weight.dense is None:
        weight.dense = w.to_dense()
    keep(weight.dense)
    return weight.dense


_unpacked: Callable[[Bitmap], Tensor] = torch.compiler.disable(_dense_copy)  # it is looked up


# ---- a kernel by its name ----


def _by_name(x: Tensor, w: Format, name: str, options: Mapping[str, Any]) -> Tensor:
    kernel = _known(name)
    if kernel.consumes != "any" and load("formats", kernel.consumes) is not type(w):
        found = type(w).__name__
        raise Unsupported(f"matmul: {name}: expected format {kernel.consumes}, found {found}")
    for option in options.keys() - (known := _options(kernel)):
        expected = f"expected an option of {', '.join(sorted(known)) or 'none'}"
        raise Unsupported(f"matmul: {name}: {expected}; found {option!r}")
    product, arrays = Product(name, w, dict(options)), w.arrays()
    product.require("linear", x)
    others = [array for which, array in arrays.items() if which != "values"]
    if torch.is_grad_enabled() and any(array.requires_grad for array in others):
        raise Unsupported(f"matmul: {name}: expected no gradient but for `values`, found one")
    values = arrays.get("values")
    if torch.is_grad_enabled():
        if x.requires_grad:
            product.prepare_gradient("linear_dgrad", x)
        if values is not None and values.requires_grad:
            product.prepare_gradient("linear_wgrad", x)
    return _Named.apply(x, values, product)  # type: ignore[no-any-return,no-untyped-call]


_named: Callable[[Tensor, Format, str, Mapping[str, Any]], Tensor]
_named = torch.compiler.disable(_by_name)  # it looks up what was prepared


class _Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor | None, product: "Product") -> Tensor:
        ctx.save_for_backward(x, values)  # a weight that is written before backward is an error
        ctx.product = product
        return product.run("linear", x=x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, _), (of_x, of_w, _), product = ctx.saved_tensors, ctx.needs_input_grad, ctx.product
        with torch.cuda.device_of(dy):
            dx = product.run("linear_dgrad", dy=dy) if of_x else None
            dw = product.run("linear_wgrad", dy=dy, x=x) if of_w else None
        return dx, dw, None


@dataclass(frozen=True, eq=False)
class Product:
    """A weight and a kernel of op linear by its name, with options; its gradients' kernels."""

    kernel: str
    w: Format
    options: dict[str, Any]

    def require(self, op: str, x: Tensor) -> Kernel:
        """Return the kernel of an op; Unsupported where there is none or it cannot run here."""
        name = self.kernel + SUFFIXES[op]
        if name not in modules("kernels") and op != "linear":
            raise Unsupported(f"matmul: {self.kernel} has no gradient here: no kernel {name}")
        kernel = _known(name)
        if reason := unsupported(kernel, self._problem(op, x), x.device):
            raise Unsupported(f"matmul: {name}: {reason}")
        return kernel

    def run(self, op: str, **activations: Tensor) -> Tensor:
        """Return the product, or the values of a weight's gradient, in new memory."""
        activations = {name: tensor.detach() for name, tensor in activations.items()}
        (n, k), some = self.w.shape, next(iter(activations.values()))
        if not len(some):
            values = self.w.arrays().get("values", some)
            empty = {"linear": (0, n), "linear_dgrad": (0, k), "linear_wgrad": values.shape}
            return some.new_zeros(empty[op])
        with _lock:  # nobody writes into the activations before they are read
            prepared = self._prepared(op, activations)
            for name, buffer in prepared.activations.items():
                buffer.copy_(activations[name])
            out = prepared.launch()
            return (out if isinstance(out, Tensor) else out.arrays()["values"]).clone()

    def prepare_gradient(self, op: str, x: Tensor) -> None:
        """Prepare what backward needs, so that it is refused before the product is computed."""
        self.require(op, x)
        if not len(x) or captured_into() or self._place(op, x) in _weight(self.w).prepared:
            return
        given = {"dy": x.detach().new_ones(len(x), self.w.shape[0])}
        with _lock:
            self._prepared(op, given | ({"x": x.detach()} if op == "linear_wgrad" else {}))

    def _prepared(self, op: str, activations: Mapping[str, Tensor]) -> "Prepared":
        """Return the launch of these sizes on this stream; in a capture, one for its graph."""
        some, weight = next(iter(activations.values())), _weight(self.w)
        place = self._place(op, some)
        if graph := captured_into():
            return weight.taken(place[0], graph[0])
        if place not in weight.prepared:
            sweep()
            while len(weight.prepared) >= PREPARED:
                weight.prepared.popitem(last=False)
            made = self._prepare(op, activations, weight.choices.get(place[0]))
            weight.prepared[place] = made
        weight.prepared.move_to_end(place)
        return weight.prepared[place]

    def _place(self, op: str, some: Tensor) -> "tuple[Key, int]":
        """Return what is asked for, and the stream: calls on two may run at the same time."""
        stream = torch.cuda.current_stream(some.device).cuda_stream if some.is_cuda else 0
        options = str(sorted(self.options.items()))
        return (self.kernel, op, options, len(some), some.dtype), stream

    def _prepare(
        self, op: str, activations: Mapping[str, Tensor], pinned: Mapping[str, Any] | None
    ) -> "Prepared":
        some, values = next(iter(activations.values())), self.w.arrays().get("values")
        kernel, buffers = self.require(op, some), {n: _own(a) for n, a in activations.items()}
        # Not w itself: what is prepared is freed with it.
        w: Any = self.w
        w = copy(w) if values is None else replace(w, values=values.detach())
        weights, pattern = ({}, w) if op == "linear_wgrad" else ({"w": w}, None)
        asked = self._problem(op, some), weights, buffers, DEFINITIONS[op], pinned, pattern
        return Prepared(kernel.prepare(Operands(*asked), **self._options(kernel)), buffers)

    def _problem(self, op: str, some: Tensor) -> Problem:
        sizes = dict(zip("nk", self.w.shape, strict=True))
        return Problem(op, {"dtype": NAMES[some.dtype], "m": len(some), **sizes})

    def _options(self, kernel: Kernel) -> dict[str, Any]:
        """Return the options that a kernel takes: those of a gradient may be fewer."""
        return {name: value for name, value in self.options.items() if name in _options(kernel)}


@dataclass(frozen=True, eq=False)
class Prepared:
    """A launch, and the activations that it reads."""

    launch: Launch
    activations: dict[str, Tensor]


Key = tuple[str, str, str, int, torch.dtype]


@dataclass(eq=False)
class Weight:
    """What was prepared for a weight.

    versions  of its arrays then
    prepared  by what was asked and the stream, the one used last at the end
    choices   of launches that graphs have taken: to prepare the same again without a search
    taken_by  by number of the capture and what was asked; the graphs keep them
    dense     a copy of a bitmap
    """

    versions: tuple[int, ...]
    prepared: OrderedDict[tuple[Key, int], Prepared] = field(default_factory=OrderedDict)
    choices: dict[Key, Mapping[str, Any]] = field(default_factory=dict)
    taken_by: WeakValueDictionary[tuple[int, Key], Prepared] = field(
        default_factory=WeakValueDictionary
    )
    dense: Tensor | None = None

    def taken(self, key: Key, graph: int) -> Prepared:
        """Give a launch to a graph, for itself: replays run beside other calls."""
        if found := self.taken_by.get((graph, key)):
            return found
        place = next((place for place in self.prepared if place[0] == key), None)
        if place is None:
            what = f"matmul: {key[0]}, {key[1]} of {key[3]} tokens, is not prepared"
            raise RuntimeError(f"{what}: call it once before each capture of a CUDA graph")
        found = self.prepared.pop(place)
        self.choices[key] = found.launch.choice
        keep(found)
        self.taken_by[graph, key] = found
        return found


def _weight(w: Format) -> Weight:
    """Return what is prepared for a weight, as it is now. Raises Unsupported."""
    arrays = [*w.arrays().values()]
    if any(array.is_inference() for array in arrays):
        expected = "expected a weight made outside of torch.inference_mode"
        raise Unsupported(f"matmul: {expected}: writes to this one are not counted")
    versions = tuple(array._version for array in arrays)
    if id(w) not in _WEIGHTS:
        finalize(w, _WEIGHTS.pop, id(w), None)  # another one's id may be the same
    elif _WEIGHTS[id(w)].versions == versions:
        return _WEIGHTS[id(w)]
    _WEIGHTS[id(w)] = Weight(versions)
    return _WEIGHTS[id(w)]


def _own(activation: Tensor) -> Tensor:
    return torch.empty_like(activation, memory_format=torch.contiguous_format).copy_(activation)


def _known(name: str) -> Kernel:
    found = load("kernels", name)
    if not isinstance(found, Kernel):
        raise SuiteError(f"{name}: expected KERNEL to be a Kernel, found {found!r}")
    return found


def _options(kernel: Kernel) -> set[str]:
    takes = inspect.signature(kernel.prepare).parameters.values()
    return {p.name for p in takes if p.kind is inspect.Parameter.KEYWORD_ONLY}


_WEIGHTS: dict[int, Weight] = {}
_lock = RLock()
