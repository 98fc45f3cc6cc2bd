"""The torch operators of layers with 2:4 hybrid weights (spense.py): the product, and dX.

    Y [m, n]  = X [m, k] @ W.T              linear; if W is fp8, times the scales of W and X
    H [m, h]  = act(X @ Wg.T) * (X @ Wu.T)  linear with an activation; W is gate and up, [2 h, k]
    dX [m, k] = dY [m, n] @ W               dgrad, in 16 bits; W has no gradient

The operators are opaque to torch.compile. A captured CUDA graph holds only their kernels. Which
kernel runs, and which plans are kept, is up to _spense_engines.py.

dgrad writes W out as a dense matrix, multiplies with cuBLAS and frees the matrix. Tensor cores need
2:4 along the axis that is summed over, and in dX that axis is n. With an activation, dgrad computes
G and U again from the 2:4 weights, so forward saves only X; without an activation it saves nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common import elementwise
from sparsebench.kernels._common.cuda import MatrixProduct, on_tape
from sparsebench.kernels._common.front import (
    BackwardProduct,
    Conditions,
    Derivative,
    Front,
    Guard,
    Recordings,
    Signature,
    record,
)
from sparsebench.kernels._common.operator import Earlier, bucket
from sparsebench.kernels._common.product import Selected
from sparsebench.kernels._common.python_node import node
from sparsebench.kernels._common.transforms import (
    aligned,
    is_traced,
    is_watched,
    readable,
    rows_of,
    unflatten,
)
from sparsebench.kernels.nn._spense_engines import ACTIVATIONS, Layout, call_of, operator_of
from sparsebench.kernels.spense._gated_gradient import gated_gradient
from sparsebench.kernels.spense._written_out import written_out
from sparsebench.kernels.spense.spense_ffn import TURN

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LARGEST = 448  # finite e4m3 value
DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # dG from dA and G, for A = act(G)
    "silu": torch.ops.aten.silu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": partial(torch.ops.aten.threshold_backward, threshold=0),
}


def signature_of(activation: str | None) -> Signature:
    """Return what a call reads: dX needs X only if G and U are computed again."""
    reads = ("dy",) if activation is None else ("dy", "x")
    return Signature(backward=(BackwardProduct(reads, ("x",)),))


def eager(
    x: Tensor,
    sparse: Tensor,
    dense: Tensor,
    n: int,
    k: int,
    rows: int,
    columns: int,
    activation: str | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Return Y [m, n] of X [m, k]. Raises Unsupported.

    sparse, dense  tiles of W [n, k] (formats/spense.py), whose sparse part is [rows, columns]
    activation     if set, W is gate and up as spense_ffn.py orders them; returns H [m, n / 2]
    scale          fp32 [n], with W and H in fp8; None for 16 bits
    """
    if x.device != sparse.device or sparse.device != dense.device:
        raise Unsupported(f"expected inputs on {sparse.device}, found {x.device}")
    if scale is not None and (scale.dtype, scale.shape) != (torch.float32, (n,)):
        raise Unsupported(f"expected fp32 scales [{n}], found {scale.dtype} {list(scale.shape)}")
    kind = x.dtype if scale is None else E4M3
    if not x.shape[0]:
        return _empty(x, n, activation, scale)
    if not (sparse.is_contiguous() and dense.is_contiguous()):
        raise Unsupported(f"expected contiguous tiles, found {sparse.stride()}, {dense.stride()}")
    layout = n, k, rows, columns, activation
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _multiply(readable(x), sparse, dense, layout, scale, kind)
    with torch.cuda.device(x.device):
        return _multiply(readable(x), sparse, dense, layout, scale, kind)


def planned_run(
    x: Tensor, sparse: Tensor, dense: Tensor, layout: Layout, scale: Tensor | None
) -> Callable[[Tensor], Tensor] | None:
    """Return the product that `eager` has planned for as many rows as X [..., k] has.

    None if there is no plan, if X must be rounded, if `eager` refuses an operand, or if torch does
    not count writes to W.
    """
    kind, (n, k, *_) = x.dtype if scale is None else E4M3, layout
    m = x.numel() // k
    fits = x.is_cuda and m > 0 and x.dtype == kind and x.device == sparse.device == dense.device
    if not fits or x.device.index != torch.cuda.current_device():
        return None
    if not (sparse.is_contiguous() and dense.is_contiguous()) or sparse.is_inference():
        return None
    if scale is not None and (scale.dtype, scale.shape) != (torch.float32, (n,)):
        return None
    operator = operator_of(layout, kind, x.device)
    selected = operator.plans.get(call_of(layout, kind, bucket(m)))
    if selected is None:
        return None
    product = selected.product.run
    return lambda rows: product(rows, sparse, dense, scale)


def multiply(x: Tensor, sparse: Tensor, dense: Tensor, *rest: Any, training: bool) -> Tensor:
    """Return Y by the operands of `eager`; `training` if autograd must see the call."""
    if is_watched() or (training and is_traced()):
        y: Tensor = linear(x, sparse, dense, *rest)
        return y
    if not training:
        return eager(x, sparse, dense, *rest)
    derivative = _derivative(sparse, dense, rest[:5])

    def run(rows: Tensor) -> Tensor:
        return eager(rows, sparse, dense, *rest)

    return node(signature_of(rest[4]), derivative, run, None, x)


def multiply_recorded(
    recordings: Recordings,
    x: Tensor,
    tiles: tuple[Tensor, Tensor],
    layout: Layout,
    scale: Tensor | None,
    guards: Sequence[Guard],
    *,
    bias: Tensor | None = None,
    training: bool,
) -> Tensor:
    """Return Y [..., n] of X [..., k] on a GPU, and record it if it repeats the call before it.

    recordings  of the weight, with the signature of its activation
    tiles       of W; `layout` and `scale` are those of `eager`
    training    whether autograd must see the call
    """

    def in_python() -> Tensor:
        y = multiply(rows_of(x), *tiles, *layout, scale, training=training)
        return unflatten(y if bias is None else y.add_(bias), x)

    product = planned_run(x, *tiles, layout, scale)
    if product is None:
        return in_python()

    def run(rows: Tensor) -> list[Tensor]:
        y = product(rows)
        return [y if bias is None else y.add_(bias)]

    derivative = _derivative(*tiles, layout) if scale is None else None
    conditions = Conditions(guards, bias=bias, derivative=derivative)
    y: Tensor = recordings.call([x], conditions, run, in_python)
    return y


def _derivative(sparse: Tensor, dense: Tensor, layout: tuple[Any, ...]) -> Derivative:
    """Return how a call is differentiated: by X alone."""
    versions = sparse._version, dense._version

    def product(gradient: Tensor, rows: Tensor | None = None) -> list[Tensor]:
        return [_dgrad(gradient, rows, sparse, dense, *layout)]

    def run(
        front: Front | None, dy: Tensor, saved: Sequence[Tensor | None], _: Sequence[bool]
    ) -> list[Tensor]:
        if (sparse._version, dense._version) != versions:
            raise RuntimeError("expected W as forward read it, found it modified before backward")
        rows = None if (x := saved[0]) is None else rows_of(x)
        gradient = aligned(rows_of(dy))
        if torch.is_grad_enabled() or is_watched():  # for second derivatives and dispatch modes
            dx: Tensor = dgrad(gradient, rows, sparse, dense, *layout)
        else:
            inputs = [gradient] if rows is None else [gradient, readable(rows)]
            (dx,) = record(front, 1, inputs, product)
        return [unflatten(dx, dy)]

    return run


def _multiply(
    x: Tensor,
    sparse: Tensor,
    dense: Tensor,
    layout: Layout,
    scale: Tensor | None,
    kind: torch.dtype,
    earlier: Earlier | None = None,
) -> Tensor:
    """Run the planned product, on the current device; rounds X by token to e4m3 if needed."""
    tokens = None
    if x.dtype != kind and x.is_cuda:
        read = x.new_empty(x.shape, dtype=kind)
        x, tokens = read, elementwise.scaled(x, read)
    elif x.dtype != kind:
        x, tokens = round_rows(x)
    operands = x, sparse, dense, scale, tokens
    operator, call = operator_of(layout, kind, x.device), call_of(layout, kind, bucket(x.shape[0]))
    selected = operator.plans.get(call)
    if selected is None:
        selected = operator.select(call, lambda product: partial(product.run, *operands), earlier)
    y: Tensor = selected.product.run(*operands)
    return y


def planned_product(
    x: Tensor, w: Spense, activation: str | None, scale: Tensor | None, earlier: Earlier | None
) -> tuple[Tensor, Selected]:
    """Return Y or H of X, and the plan, which `earlier` may know (Operator.select)."""
    layout = *w.shape, *w.sparse_shape, activation
    y = _multiply(readable(x), w.sparse, w.dense, layout, scale, w.dtype, earlier)
    return y, operator_of(layout, w.dtype, x.device).plans[call_of(layout, w.dtype, bucket(len(x)))]


def _empty(x: Tensor, n: int, activation: str | None, scale: Tensor | None) -> Tensor:
    """Allocate Y or H."""
    kind = x.dtype if scale is None else E4M3 if activation else BF16
    return x.new_empty(x.shape[0], n // 2 if activation else n, dtype=kind)


linear = torch.library.custom_op("sparsebench::spense_linear", eager, mutates_args=())


@linear.register_fake
def _(x: Tensor, sparse: Tensor, dense: Tensor, n: int, k: int, *layout: Any) -> Tensor:
    _, _, activation, scale = (*layout, None, None)[:4]  # torch omits defaults
    return _empty(x, n, activation, scale)


def _dgrad(
    dy: Tensor,
    x: Tensor | None,
    sparse: Tensor,
    dense: Tensor,
    n: int,
    k: int,
    rows: int,
    columns: int,
    activation: str | None = None,
) -> Tensor:
    """Return dX [m, k] of dY [m, n]; with an activation, of dH [m, n / 2] and X [m, k].

    The other arguments are those of `eager`. Raises Unsupported.
    """
    if dy.dtype not in (torch.float16, BF16):
        raise Unsupported(f"expected fp16 or bf16 for a gradient, found {dy.dtype}")
    if not dy.shape[0]:
        return dy.new_empty(0, k)
    kind = dy.device.type
    cast = torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if cast else nullcontext():  # it takes 10 µs
        packed = Spense((n, k), dy.dtype, (rows, columns), sparse, dense)
        if kind == "cpu":
            w = packed.to_dense()
            if activation is not None and x is not None:
                dy = _differentiated(dy, x @ w.T, activation)
            return dy @ w
        if activation is not None and x is not None:
            products = eager(x, sparse, dense, n, k, rows, columns)
            dy = gated_gradient(products, readable(dy).contiguous(), activation)
        w = written_out(packed)
        dx = dy @ w
        on_tape(dx, owners=(sparse, dense), by_torch=MatrixProduct(dy, w, dx))
        return dx


def _differentiated(dh: Tensor, products: Tensor, activation: str) -> Tensor:
    """Return dG and dU in the order of `interleaved`, of G and U in this order, on a CPU."""
    gate, up = products.unflatten(1, (-1, 2, TURN)).unbind(2)
    dh = dh.unflatten(1, (-1, TURN))
    dg = DERIVATIVES[activation](dh * up, gate)
    return torch.stack((dg, dh * ACTIVATIONS[activation](gate)), 2).flatten(1)


dgrad = torch.library.custom_op("sparsebench::spense_dgrad", _dgrad, mutates_args=())


@dgrad.register_fake
def _(
    dy: Tensor, x: Tensor | None, sparse: Tensor, dense: Tensor, n: int, k: int, *_: Any
) -> Tensor:
    return dy.new_empty(dy.shape[0], k)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, sparse, dense, *sizes, activation, _ = inputs
    ctx.save_for_backward(x if activation else None, sparse, dense)
    ctx.layout = *sizes, activation


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return dgrad(dy, *ctx.saved_tensors, *ctx.layout), *(None,) * 8


linear.register_autograd(_linear_backward, setup_context=_save)


def round_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix [m, k] in e4m3, with 448 as each row's largest element, and scales [m]."""
    wide = matrix.float()
    scale = (wide.abs().amax(1) / LARGEST).clamp_min(1e-30)  # for rows of zeros
    return (wide / scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), scale
