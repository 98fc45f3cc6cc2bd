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
from sparsebench.kernels._common.front import (
    BackwardProduct,
    Conditions,
    Derivative,
    Front,
    Guard,
    Recordings,
    Signature,
    node,
    record,
)
from sparsebench.kernels._common.operator import Earlier, Operator, bucket
from sparsebench.kernels._common.product import Selected
from sparsebench.kernels._common.tape import MatrixProduct, on_tape
from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import (
    aligned,
    device_guard,
    is_current,
    is_traced,
    readable,
    rows_of,
    unflatten,
)
from sparsebench.kernels._kernel import refuse
from sparsebench.kernels.nn._spense_engines import ACTIVATIONS, call_of, operator_of
from sparsebench.kernels.spense._call import SpenseCall
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
    kind = x.dtype if scale is None else E4M3
    return _multiply(x, Spense((n, k), kind, (rows, columns), sparse, dense), activation, scale)


def _refusal(x: Tensor, w: Spense, scale: Tensor | None) -> str | None:
    """Return why no kernel can read these operands, or None."""
    if x.device != w.sparse.device or w.sparse.device != w.dense.device:
        return f"expected inputs on {w.sparse.device}, found {x.device}"
    if scale is not None and (scale.dtype, scale.shape) != (torch.float32, w.shape[:1]):
        expected = f"expected fp32 scales [{w.shape[0]}]"
        return f"{expected}, found {scale.dtype} {list(scale.shape)}"
    if not (w.sparse.is_contiguous() and w.dense.is_contiguous()):
        return f"expected contiguous tiles, found {w.sparse.stride()}, {w.dense.stride()}"
    return None


def planned_run(
    x: Tensor, w: Spense, activation: str | None, scale: Tensor | None
) -> Callable[[Tensor], Tensor] | None:
    """Return the product that is planned for as many rows as X [..., k] has.

    None if there is no plan, if X must be rounded, if an operand is refused, or if torch does not
    count writes to W.
    """
    m = x.numel() // w.shape[1]
    plain = x.is_cuda and m > 0 and x.dtype == w.dtype and is_current(x.device)
    if not plain or _refusal(x, w, scale) or w.sparse.is_inference():
        return None
    operator, call = _planned_as(m, w, activation, x.device)
    if (selected := operator.plans.get(call)) is None:
        return None
    product = selected.product.run
    return lambda rows: product(rows, w.sparse, w.dense, scale)


def multiply(
    x: Tensor, w: Spense, activation: str | None, scale: Tensor | None, *, training: bool
) -> Tensor:
    """Return Y or H of X [m, k], as `eager`; `training` if autograd must see the call."""
    if is_traced():
        layout = *w.shape, *w.sparse_shape, activation
        y: Tensor = linear(x, w.sparse, w.dense, *layout, scale)
        return y
    run = partial(_multiply, w=w, activation=activation, scale=scale)
    if not training:
        return run(x)
    return node(signature_of(activation), _derivative(w, activation), run, None, x)


def multiply_recorded(
    recordings: Recordings,
    x: Tensor,
    w: Spense,
    activation: str | None,
    scale: Tensor | None,
    guards: Sequence[Guard],
    *,
    bias: Tensor | None = None,
    training: bool,
) -> Tensor:
    """Return Y [..., n] of X [..., k] on a GPU, and record it if it repeats the call before it.

    recordings  of the weight, with the signature of its activation
    training    whether autograd must see the call
    """

    def in_python() -> Tensor:
        y = multiply(rows_of(x), w, activation, scale, training=training)
        return unflatten(y if bias is None else y.add_(bias), x)

    derivative = _derivative(w, activation) if scale is None else None
    conditions = Conditions(guards, bias=bias, derivative=derivative)
    return recordings.product(x, conditions, planned_run(x, w, activation, scale), in_python)


def _derivative(w: Spense, activation: str | None) -> Derivative:
    """Return how a call is differentiated: by X alone."""
    versions = w.sparse._version, w.dense._version

    def product(gradient: Tensor, rows: Tensor | None = None) -> list[Tensor]:
        return [_dx(gradient, rows, w, activation)]

    def run(
        front: Front | None, dy: Tensor, saved: Sequence[Tensor | None], _: Sequence[bool]
    ) -> list[Tensor]:
        if (w.sparse._version, w.dense._version) != versions:
            raise RuntimeError("expected W as forward read it, found it modified before backward")
        rows = None if (x := saved[0]) is None else rows_of(x)
        gradient = aligned(rows_of(dy))
        if torch.is_grad_enabled() or is_traced():  # operators refuse second derivatives
            layout = *w.shape, *w.sparse_shape, activation
            dx: Tensor = dgrad(gradient, rows, w.sparse, w.dense, *layout)
        else:
            inputs = [gradient] if rows is None else [gradient, readable(rows)]
            (dx,) = record(front, 1, inputs, product)
        return [unflatten(dx, dy)]

    return run


def _planned_as(
    m: int, w: Spense, activation: str | None, device: torch.device
) -> tuple[Operator, SpenseCall]:
    """Return the operator of a weight, and the call by which it plans m tokens."""
    layout = *w.shape, *w.sparse_shape, activation
    return operator_of(layout, w.dtype, device), call_of(layout, w.dtype, bucket(m))


def select(m: int, w: Spense, activation: str | None) -> None:
    """Plan m tokens without a search."""
    operator, call = _planned_as(m, w, activation, w.sparse.device)
    operator.select(call)


def _multiply(
    x: Tensor,
    w: Spense,
    activation: str | None,
    scale: Tensor | None,
    earlier: Earlier | None = None,
) -> Tensor:
    """Run the planned product; rounds X by token to e4m3 if needed. Raises Unsupported."""
    refuse(_refusal(x, w, scale))
    if not x.shape[0]:
        return _empty(x, w.shape[0], activation, scale)
    x, tokens = readable(x), None
    with device_guard(x.device):
        if x.dtype != w.dtype and x.is_cuda:
            read = x.new_empty(x.shape, dtype=w.dtype)
            x, tokens = read, elementwise.scaled(x, read)
        elif x.dtype != w.dtype:
            x, tokens = round_rows(x)
        operands = x, w.sparse, w.dense, scale, tokens
        operator, call = _planned_as(len(x), w, activation, x.device)
        selected = operator.select(call, lambda product: partial(product.run, *operands), earlier)
        y: Tensor = selected.product.run(*operands)
    return y


def planned_product(
    x: Tensor, w: Spense, activation: str | None, scale: Tensor | None, earlier: Earlier | None
) -> tuple[Tensor, Selected]:
    """Return Y or H of X, and the plan, which `earlier` may know (Operator.select)."""
    y = _multiply(x, w, activation, scale, earlier)
    operator, call = _planned_as(len(x), w, activation, x.device)
    return y, operator.plans[call]


def _empty(x: Tensor, n: int, activation: str | None, scale: Tensor | None) -> Tensor:
    """Allocate Y or H."""
    kind = x.dtype if scale is None else E4M3 if activation else BF16
    return x.new_empty(x.shape[0], n // 2 if activation else n, dtype=kind)


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
    return _dx(dy, x, Spense((n, k), dy.dtype, (rows, columns), sparse, dense), activation)


def _dx(dy: Tensor, x: Tensor | None, w: Spense, activation: str | None) -> Tensor:
    """Return dX [m, k] of dY [m, n]; with an activation, of dH [m, n / 2] and X [m, k].

    Raises Unsupported.
    """
    if dy.dtype not in (torch.float16, BF16):
        raise Unsupported(f"expected fp16 or bf16 for a gradient, found {dy.dtype}")
    if not dy.shape[0]:
        return dy.new_empty(0, w.shape[1])
    kind = dy.device.type
    cast = torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if cast else nullcontext():  # it takes 10 µs
        if kind == "cpu":
            dense = w.to_dense()
            if activation is not None and x is not None:
                dy = _differentiated(dy, x @ dense.T, activation)
            return dy @ dense
        if activation is not None and x is not None:
            dy = gated_gradient(_multiply(x, w, None, None), readable(dy).contiguous(), activation)
        dense = written_out(w)
        dx = dy @ dense
        on_tape(dx, owners=(w.sparse, w.dense), call=MatrixProduct(dy, dense, dx))
        return dx


def _differentiated(dh: Tensor, products: Tensor, activation: str) -> Tensor:
    """Return dG and dU in the order of `interleaved`, of G and U in this order, on a CPU."""
    gate, up = products.unflatten(1, (-1, 2, TURN)).unbind(2)
    dh = dh.unflatten(1, (-1, TURN))
    dg = DERIVATIVES[activation](dh * up, gate)
    return torch.stack((dg, dh * ACTIVATIONS[activation](gate)), 2).flatten(1)


def _linear_sizes(x: Tensor, sparse: Tensor, dense: Tensor, n: int, k: int, *layout: Any) -> Tensor:
    _, _, activation, scale = (*layout, None, None)[:4]  # torch omits defaults
    return _empty(x, n, activation, scale)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, sparse, dense, *sizes, activation, _ = inputs
    ctx.save_for_backward(x if activation else None, sparse, dense)
    ctx.layout = *sizes, activation


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return dgrad(dy, *ctx.saved_tensors, *ctx.layout), *(None,) * 8


linear = torch_operator(
    "spense_linear", eager, _linear_sizes, save=_save, backward=_linear_backward
)
dgrad = torch_operator(
    "spense_dgrad", _dgrad, lambda dy, x, sparse, dense, n, k, *_: dy.new_empty(dy.shape[0], k)
)


def round_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix [m, k] in e4m3, with 448 as each row's largest element, and scales [m]."""
    wide = matrix.float()
    scale = (wide.abs().amax(1) / LARGEST).clamp_min(1e-30)  # for rows of zeros
    return (wide / scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), scale
