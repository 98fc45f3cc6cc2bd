"""The operators of a gated MLP that trains with few active hidden units, and their gradients.

    forward                                         backward
    G       dense, by cuBLAS; not kept              dH      of active units
    index   the active units by token and by        dX      dG @ Wg + dU @ Wu, of active units
            unit, with g and u of each              dW      sums over the tokens of a unit

Kernels are bound once per size (_common/triton.py, Template): a call allocates outputs and passes
addresses. On a CPU both operators are dense products, a reference and not a kernel.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu
from triton import knobs

from sparsebench.errors import Unsupported
from sparsebench.formats.active_csr import ActiveCsr
from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import aligned
from sparsebench.kernels._common.triton import Template, unsupported
from sparsebench.kernels.twell import _gather, _index, _overflow
from sparsebench.kernels.twell._call import NAMES
from sparsebench.kernels.twell._index import require_room
from sparsebench.results.record import Problem

SHARE = 64  # units per slot of a token: if all slots are taken, a dense step is faster
PLANS = 64  # cached, one per size: the kernels of a call, bound without its tensors

Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Offsets, columns, g, u, unit offsets, tokens, places: an ActiveCsr, and u of each entry."""


def _forward(
    x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor, squared: bool, slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return Y [m, k], a token's sum of |H| [m], and the seven of Packed. Raises Unsupported.

    X [m, k], Wg, Wu and Wd.T [n, k]; relu squared, or relu.
    """
    require_one_kind(x, wg, wu, wd_t)
    if not wg.shape == wu.shape == wd_t.shape == (len(wg), x.shape[1]):
        sizes = [[*w.shape] for w in (wg, wu, wd_t)]
        raise Unsupported(f"expected three weights [n, {x.shape[1]}], found {sizes}")
    (m, k), n = x.shape, wg.shape[0]
    if not on_kernels(x):
        with torch.autocast(x.device.type, enabled=False):
            y, norms, active = dense_forward(x, wg, wu, wd_t, squared, True)
        offsets, *packed = (torch.zeros_like(t) for t in _packed_like(x, n, slots))
        offsets[-1] = active
        return y, norms, offsets, *packed  # type: ignore[return-value]  # nine
    x, wg, wu, wd_t = map(aligned, (x, wg, wu, wd_t))
    plan, g = _forward_plan(m, n, k, x.dtype, x.device, squared, slots), x.new_empty(m, n)
    with torch.cuda.device_of(x):
        torch.mm(x, wg.t(), out=g)  # autocast does not touch calls with out=
        return tuple(plan(x, wu, wd_t, g))  # type: ignore[return-value]  # nine


def _backward(
    dy: Tensor,
    dnorms: Tensor,
    x: Tensor,
    wg: Tensor,
    wu: Tensor,
    wd_t: Tensor,
    packed: list[Tensor],
    squared: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dX [m, k], dWg, dWu and dWd.T [n, k]. Raises Unsupported."""
    require_one_kind(dy, x, wg, wu, wd_t)
    if not on_kernels(x):
        with torch.autocast(x.device.type, enabled=False):
            return _dense_backward(dy, dnorms, x, (wg, wu, wd_t), squared)
    (m, k), n, capacity = x.shape, wg.shape[0], packed[1].shape[0]
    sparse, dense = _backward_plan(m, n, k, x.dtype, x.device, squared, capacity)
    inputs = [aligned(t) for t in (dy, dnorms, x, wg, wu, wd_t, *packed)]
    with torch.cuda.device_of(x):
        out = sparse(*inputs)
        dense(*inputs, *out)
    return tuple(out)  # type: ignore[return-value]  # four


def _forward_sizes(x: Tensor, wg: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    y, norms = x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)
    return y, norms, *_packed_like(x, wg.shape[0], slots=rest[-1])


def _backward_sizes(dy: Tensor, dnorms: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in inputs[:4])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, ctx.squared, _ = inputs
    ctx.save_for_backward(*operands, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dnorms: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, wg, wu, wd_t, *packed = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(x)
    if dnorms is None:
        dnorms = x.new_zeros(x.shape[0], dtype=torch.float32)
    out = gated_mlp_backward(dy, dnorms, x, wg, wu, wd_t, packed, ctx.squared)
    return *out, None, None


gated_mlp = torch_operator(
    "sparse_gated_mlp", _forward, _forward_sizes, save=_save, backward=_gradients
)
gated_mlp_backward = torch_operator(
    *("sparse_gated_mlp_backward", _backward, _backward_sizes),
    advice="; set the layer's `sparse` to False",
)


# ---- plans ----


@lru_cache(PLANS)
def _forward_plan(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, squared: bool, slots: int
) -> Template:
    """Return the plan that computes _forward's results from X, Wu, Wd.T and G.

    Raises Unsupported.
    """
    require_kernels(m, n, k, dtype, device)
    x, y, wu, wd_t, g = _shaped(dtype, (m, k), (m, k), (n, k), (n, k), (m, n))
    (norms,) = _shaped(torch.float32, (m,))
    listing, active = _index.listing(g, m * slots)
    up, u, h = _gather.up(x, wu, active, squared=squared)
    lists = active.offsets, active.columns
    down = _gather.dsd("norms", lists, (h,), (wd_t,), (y, norms))
    dense = _overflow.forward(x, wu, wd_t, g, y, norms, active, squared=squared, device=device)
    by_unit = active.unit_offsets, active.tokens, active.places
    results = y, norms, *lists, active.values, u, *by_unit
    return Template([*listing, up, down, *dense], (x, wu, wd_t, g), results)


@lru_cache(PLANS)
def _backward_plan(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, squared: bool, capacity: int
) -> tuple[Template, Template]:
    """Return two plans of dX, dWg, dWu and dWd.T: sparse, and for too many active units.

    The first takes dY, dnorms, X, Wg, Wu, Wd.T and Packed; the second takes these and the four
    results. The second needs more memory, and runs when the first has freed its own. Raises
    Unsupported.
    """
    require_kernels(m, n, k, dtype, device)
    dy, x, dx = _shaped(dtype, *[(m, k)] * 3)
    wg, wu, wd_t, dwg, dwu, dwd_t = _shaped(dtype, *[(n, k)] * 6)
    (dnorms,) = _shaped(torch.float32, (m,))
    packed = _packed_like(x, n, capacity // m)
    offsets, columns, values, u, unit_offsets, tokens, places = packed
    active = ActiveCsr((m, n), offsets, columns, values, unit_offsets, tokens, places)
    slopes, by_token, (dg, du, h) = _gather.slopes(dy, wd_t, active, u, dnorms, squared=squared)
    out, dsd, by_unit = (dx, dwg, dwu, dwd_t), _gather.dsd, (unit_offsets, tokens)
    sums = [
        dsd("two_products", (offsets, columns), by_token, (wg, wu), (dx,)),
        dsd("two_outputs", by_unit, (dg, du), (x,), (dwg, dwu)),
        dsd("plain", by_unit, (h,), (dy,), (dwd_t,)),
    ]
    dense = _overflow.backward(
        x, dy, (wg, wu, wd_t), dnorms, out, active, squared=squared, device=device
    )
    inputs = dy, dnorms, x, wg, wu, wd_t, *packed
    return Template([slopes, *sums], inputs, out), Template(dense, (*inputs, *out), out)


def _shaped(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return tensors without data."""
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def require_kernels(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise Unsupported if the kernels cannot compute the call."""
    if dtype not in NAMES:
        raise Unsupported(f"expected fp16, bf16 or fp32 on a GPU, found {dtype}")
    if reason := unsupported(Problem("ffn", {"dtype": NAMES[dtype]}), device):
        raise Unsupported(reason)
    if n % 8 or k % 8:
        raise Unsupported(f"expected multiples of 8, found {n} hidden units and {k} features")
    require_room(m, n, k)


# ---- operands ----


def _packed_like(x: Tensor, n: int, slots: int) -> Packed:
    """Return the seven tensors that forward keeps, uninitialised."""
    m, int32 = x.shape[0], torch.int32
    room = m * slots
    return (
        x.new_empty(m + 1, dtype=int32),
        x.new_empty(room, dtype=torch.int16),
        x.new_empty(room),
        x.new_empty(room),
        x.new_empty(n + 1, dtype=int32),
        x.new_empty(room, dtype=int32),
        x.new_empty(room, dtype=int32),
    )


def require_one_kind(*tensors: Tensor) -> None:
    """Raise Unsupported unless all have one dtype and one device."""
    first = tensors[0]
    if all(t.dtype == first.dtype and t.device == first.device for t in tensors):
        return
    for field in ("dtype", "device"):
        values = sorted({str(getattr(t, field)) for t in tensors})
        if len(values) > 1:
            raise Unsupported(f"expected operands of one {field}, found {' and '.join(values)}")


def on_kernels(x: Tensor) -> bool:
    """Return whether Triton computes this call, and not torch's reference."""
    return bool(len(x)) and (x.device.type != "cpu" or knobs.runtime.interpret)


# ---- dense layers, and the reference ----


def dense_forward(
    x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor, squared: bool, l1: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Y [m, k], a token's sum of |H| [m] if `l1`, and the total number of active units."""
    act = relu(x @ wg.t())
    active = act.detach().count_nonzero()
    h = (act.square() if squared else act) * (x @ wu.t())
    norms = h.abs().sum(1, dtype=torch.float32) if l1 else h.new_empty(0)
    return h @ wd_t, norms, active


def _dense_backward(
    dy: Tensor, dnorms: Tensor, x: Tensor, weights: tuple[Tensor, Tensor, Tensor], squared: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Recompute the hidden units and return all gradients."""
    wg, wu, wd_t = weights
    g, u = x @ wg.t(), x @ wu.t()
    act, active = relu(g).square() if squared else relu(g), ~(g <= 0)
    h = act * u
    dh = dy @ wd_t.t() + (dnorms[:, None] * h.float().sign()).to(h.dtype)
    dg = (dh * u * (2 * g if squared else 1)).where(active, 0)
    du = (dh * act).where(active, 0)
    return dg @ wg + du @ wu, dg.t() @ x, du.t() @ x, h.t() @ dy
