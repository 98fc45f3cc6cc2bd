"""A gated MLP that is trained with few hidden units on: it computes and keeps those alone.

    G = X @ Wg.T     Y = (act(G) * (X @ Wu.T)) @ Wd.T     L1 = mean over tokens of sum |act(G) * U|

    forward                                         backward
    G       dense, by cuBLAS, and let go            dH      of units that are on
    index   which units are on, by token            dX      dG @ Wg + dU @ Wu, of such units
            and by unit, with g and u of each       dW      sums over the tokens a unit is on for

Kept from forward to backward are X, and of each of the `slots` a token has, on average: g, u, the
unit, and the place and token of the transposed index: 14 bytes of 16-bit operands, where dense
layers keep 6 bytes for every unit: act(G), U and H.

Tiles as TwELL has them (formats/twell.py) would each have slots of their own. Here slots are of all
tokens together: one with all its units on takes as many as it has. Where all do not suffice,
nothing is lost: the call is dense, gate and up are made again in backward (11 products for 9), and
what is kept is as large as before. The device decides; the host never waits, and a CUDA graph holds
both ways, which is why backward has room for two matrices [tokens, units] in any case.

Such a step takes up to 1.8 times as long as dense layers do (kernels/NOTES.md). A layer with many
units on, as one has that is not trained yet, can be told to be dense (`sparse`), or to decide
(`settle`, by what the last call counted): products by cuBLAS, and what dense layers keep. It never
changes by itself: when the host hears of a count depends on how far the device has come, and so
would the bits, and the memory that a step takes.

    CUDA, compute capability 8.0 and newer     Triton: kernels/_active_*.py; sizes of multiples of 8
    CPU                                        torch, dense products: a reference, not a kernel

Where X or dY is not finite, a unit that is off counts as zero; dense products may make it NaN.
The L1 term is that of Cetin et al., arXiv 2603.23198, as their code has it: without a division by
the number of units. Their published coefficient, 2e-5, belongs to a mean of it over layers.
"""

from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from triton import knobs

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require
from sparsebench.kernels import _active_dense, _active_index, _active_products
from sparsebench.kernels._active_index import Active, require_room
from sparsebench.kernels._triton import TMA_ALIGNMENT, Template, supports
from sparsebench.results.record import Problem

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}  # on a GPU
SHARE = 64  # of the units, one is given a slot: with all taken a step is slower than a dense one
EVEN = 94  # of the units, one on: a step takes as long as a compiled dense one (kernels/NOTES.md)
PLANS = 64  # kept, of different sizes: of a call's programs, bound without their tensors

Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Offsets, columns, g, u, unit offsets, tokens, places: an Active, and u beside g."""


class SparseGatedMLP(nn.Module):
    """A gated MLP with relu or relu2 (its square), without bias, for training.

    gate, up, down  nn.Linear, with the state dict that three of them have
    slots           of a token, on average, for units that are on; a 64th of all if not given
    sparse          whether calls compute and keep what is on alone, or as dense layers do; a graph
                    keeps what it was captured with, torch.compile compiles each once
    active          units on for a token in the last call, on average, rounded up: a number on the
                    layer's device; with more than `slots` a sparse call was dense, and slower

    Y, and the gradients, are those of dense layers at any number of units that are on. Down's
    weight lies transposed in memory, as it is read, and so do its gradient and optimizer state:
    another layout (assign=True) is as right, and costs a copy a call. Raises FormatError.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation: str = "relu",
        slots: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draw the weights as nn.Linear does."""
        super().__init__()
        k, n = in_features, hidden_features
        known = activation in ("relu", "relu2")
        require(known, f"activation: expected relu or relu2, found {activation!r}")
        slots = -(-n // SHARE) if slots is None else slots
        require(0 < slots <= n, f"slots: expected 1 to {n}, the hidden units, found {slots}")
        self.in_features, self.hidden_features = k, n
        self.activation, self.slots = activation, slots
        made: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.gate, self.up = nn.Linear(k, n, **made), nn.Linear(k, n, **made)
        self.down = nn.Linear(n, k, **made)
        self.down.weight = nn.Parameter(self.down.weight.detach().t().contiguous().t())
        self.sparse = True
        self.active: Tensor
        active = torch.zeros((), dtype=torch.int32, device=device)
        self.register_buffer("active", active, persistent=False)

    @classmethod
    def from_dense(
        cls,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        *,
        activation: str = "relu",
        slots: int | None = None,
    ) -> Self:
        """Take copies of gate and up [n, k] and down [k, n]. Raises FormatError."""
        require(gate.dim() == 2, f"gate: expected a matrix [n, k], found {list(gate.shape)}")
        n, k = gate.shape
        for name, weight, size in (("up", up, [n, k]), ("down", down, [k, n])):
            found = [*weight.shape]
            require(found == size, f"{name}: expected {size}, found {found}")
        made: dict[str, Any] = {"device": gate.device, "dtype": gate.dtype}
        mlp = cls(k, n, activation=activation, slots=slots, **made)
        with torch.no_grad():
            for layer, weight in ((mlp.gate, gate), (mlp.up, up), (mlp.down, down)):
                layer.weight.copy_(weight)
        return mlp

    def forward(self, x: Tensor, *, l1: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return Y [..., k] of X [..., k], and the L1 term, a number in fp32, if asked.

        Raises Unsupported.
        """
        k = self.in_features
        if x.dim() == 0 or x.shape[-1] != k:
            raise Unsupported(f"expected [..., {k}], found {list(x.shape)}")
        wg, wu, wd_t = self.gate.weight, self.up.weight, self.down.weight.t()
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, wg, wu, wd_t = (t.to(dtype) for t in (x, wg, wu, wd_t))
        flat, squared = x.reshape(-1, k), self.activation == "relu2"
        tokens = max(1, len(flat))
        if self.sparse:
            y, norms, offsets, *_ = gated_mlp(flat, wg, wu, wd_t, squared, self.slots)
            on = offsets[-1]
        else:
            _require_one_kind(flat, wg, wu, wd_t)
            y, norms, on = _dense(flat, wg, wu, wd_t, squared, l1)
        self.active.copy_(on // -tokens).neg_()  # rounded up
        y = y.view(x.shape)
        return (y, norms.sum() / tokens) if l1 else y

    def settle(self) -> bool:
        """Take the faster way from now on, for as many units as were on in the last call.

        Returns `sparse`. Waits for the device: after the first step, then every hundred or so.
        """
        active = int(self.active)
        self.sparse = active <= self.slots and active * EVEN <= self.hidden_features
        return self.sparse

    def extra_repr(self) -> str:
        """Say the activation, the slots, and the way."""
        slots = f"slots={self.slots} of {self.hidden_features}"
        return f"activation={self.activation}, {slots}, sparse={self.sparse}"


# ---- operators ----


def _forward(
    x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor, squared: bool, slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return Y [m, k], a token's sum of |H| [m], and the seven of Packed. Raises Unsupported.

    X [m, k], Wg, Wu and Wd.T [n, k]; relu squared, or relu.
    """
    _require_one_kind(x, wg, wu, wd_t)
    if not wg.shape == wu.shape == wd_t.shape == (len(wg), x.shape[1]):
        sizes = [[*w.shape] for w in (wg, wu, wd_t)]
        raise Unsupported(f"expected three weights [n, {x.shape[1]}], found {sizes}")
    (m, k), n = x.shape, wg.shape[0]
    if not _on_kernels(x):
        with torch.autocast(x.device.type, enabled=False):
            y, norms, on = _dense(x, wg, wu, wd_t, squared, True)
        offsets, *packed = (torch.zeros_like(t) for t in _packed_like(x, n, slots))
        offsets[-1] = on
        return y, norms, offsets, *packed  # type: ignore[return-value]  # nine
    x, wg, wu, wd_t = _plain(x), _plain(wg), _plain(wu), _plain(wd_t)
    plan, g = _forward_plan(m, n, k, x.dtype, x.device, squared, slots), x.new_empty(m, n)
    with torch.cuda.device_of(x):
        torch.mm(x, wg.t(), out=g)  # out= is what autocast leaves alone
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
    _require_one_kind(dy, x, wg, wu, wd_t)
    if not _on_kernels(x):
        with torch.autocast(x.device.type, enabled=False):
            return _dense_backward(dy, dnorms, x, (wg, wu, wd_t), squared)
    (m, k), n, capacity = x.shape, wg.shape[0], packed[1].shape[0]
    sparse, dense = _backward_plan(m, n, k, x.dtype, x.device, squared, capacity)
    given = [_plain(t) for t in (dy, dnorms, x, wg, wu, wd_t, *packed)]
    with torch.cuda.device_of(x):
        out = sparse(*given)
        dense(*given, *out)
    return tuple(out)  # type: ignore[return-value]  # four


gated_mlp = torch.library.custom_op("sparsebench::sparse_gated_mlp", _forward, mutates_args=())
gated_mlp_backward = torch.library.custom_op(
    "sparsebench::sparse_gated_mlp_backward", _backward, mutates_args=()
)


@gated_mlp.register_fake
def _(
    x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor, squared: bool, slots: int
) -> tuple[Tensor, ...]:
    y, norms = x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)
    return y, norms, *_packed_like(x, wg.shape[0], slots)


@gated_mlp_backward.register_fake
def _(
    dy: Tensor,
    dnorms: Tensor,
    x: Tensor,
    wg: Tensor,
    wu: Tensor,
    wd_t: Tensor,
    packed: list[Tensor],
    squared: bool,
) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (x, wg, wu, wd_t))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, ctx.squared, _ = inputs
    ctx.save_for_backward(*operands, *output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dnorms: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, wg, wu, wd_t, *packed = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(x)
    if dnorms is None:
        dnorms = x.new_zeros(x.shape[0], dtype=torch.float32)
    of = gated_mlp_backward(dy, dnorms, x, wg, wu, wd_t, packed, ctx.squared)
    return *of, None, None


gated_mlp.register_autograd(_gradients, setup_context=_save)


# ---- plans ----


@lru_cache(PLANS)
def _forward_plan(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, squared: bool, slots: int
) -> Template:
    """Return what makes the nine of _forward of X, Wu, Wd.T and G. Raises Unsupported."""
    _require_kernels(m, n, k, dtype, device)
    x, y, wu, wd_t, g = _shaped(dtype, (m, k), (m, k), (n, k), (n, k), (m, n))
    (norms,) = _shaped(torch.float32, (m,))
    listing, active = _active_index.listing(g, m * slots)
    up, u, h = _active_products.up(x, wu, active, squared=squared)
    lists = active.offsets, active.columns
    down = _active_products.summed("norms", lists, (h,), (wd_t,), (y, norms))
    dense = _active_dense.forward(x, wu, wd_t, g, y, norms, active, squared=squared, device=device)
    by_unit = active.unit_offsets, active.tokens, active.places
    results = y, norms, *lists, active.values, u, *by_unit
    return Template([*listing, up, down, *dense], (x, wu, wd_t, g), results)


@lru_cache(PLANS)
def _backward_plan(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, squared: bool, capacity: int
) -> tuple[Template, Template]:
    """Return what makes dX, dWg, dWu and dWd.T, and what makes them where too many units are on.

    The first is of dY, dnorms, X, Wg, Wu, Wd.T and Packed; the second is of these and of the four.
    By then the first one's memory is free: the second takes more. Raises Unsupported.
    """
    _require_kernels(m, n, k, dtype, device)
    dy, x, dx = _shaped(dtype, *[(m, k)] * 3)
    wg, wu, wd_t, dwg, dwu, dwd_t = _shaped(dtype, *[(n, k)] * 6)
    (dnorms,) = _shaped(torch.float32, (m,))
    packed = _packed_like(x, n, capacity // m)
    offsets, columns, values, u, unit_offsets, tokens, places = packed
    active = Active(offsets, columns, values, unit_offsets, tokens, places)
    slopes, by_token, (dg, du, h) = _active_products.slopes(
        dy, wd_t, active, u, dnorms, squared=squared
    )
    out, summed, by_unit = (dx, dwg, dwu, dwd_t), _active_products.summed, (unit_offsets, tokens)
    sums = [
        summed("matrices", (offsets, columns), by_token, (wg, wu), (dx,)),
        summed("sums", by_unit, (dg, du), (x,), (dwg, dwu)),
        summed("one", by_unit, (h,), (dy,), (dwd_t,)),
    ]
    dense = _active_dense.backward(
        x, dy, (wg, wu, wd_t), dnorms, out, active, squared=squared, device=device
    )
    given = dy, dnorms, x, wg, wu, wd_t, *packed
    return Template([slopes, *sums], given, out), Template(dense, (*given, *out), ())


def _shaped(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return tensors without data."""
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def _require_kernels(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise Unsupported where the kernels cannot compute the call."""
    if dtype not in NAMES:
        raise Unsupported(f"expected fp16, bf16 or fp32 on a GPU, found {dtype}")
    if reason := supports(Problem("ffn", {"dtype": NAMES[dtype]}), device):
        raise Unsupported(reason)
    if n % 8 or k % 8:
        raise Unsupported(f"expected sizes of multiples of 8, found {n} hidden and {k} in features")
    require_room(m, n, k)


# ---- operands ----


def _packed_like(x: Tensor, n: int, slots: int) -> Packed:
    """Return the seven tensors that forward keeps, without values."""
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


def _require_one_kind(*tensors: Tensor) -> None:
    """Raise Unsupported unless all have one dtype and one device."""
    first = tensors[0]
    if all(t.dtype == first.dtype and t.device == first.device for t in tensors):
        return
    for what in ("dtype", "device"):
        found = sorted({str(getattr(t, what)) for t in tensors})
        if len(found) > 1:
            raise Unsupported(f"expected operands of one {what}, found {' and '.join(found)}")


def _plain(t: Tensor) -> Tensor:
    """Return the tensor contiguous and aligned for the copy engine; no copy of one that is."""
    if t.is_contiguous() and not t.data_ptr() % TMA_ALIGNMENT:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _on_kernels(x: Tensor) -> bool:
    """Say whether Triton computes this call, or torch's reference."""
    return bool(len(x)) and (x.device.type != "cpu" or knobs.runtime.interpret)


# ---- dense layers, and the reference ----


def _dense(
    x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor, squared: bool, l1: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Y [m, k], a token's sum of |H| [m] if `l1`, and how many are on in all."""
    act = relu(x @ wg.t())
    on = act.detach().count_nonzero()
    h = (act.square() if squared else act) * (x @ wu.t())
    norms = h.abs().sum(1, dtype=torch.float32) if l1 else h.new_empty(0)
    return h @ wd_t, norms, on


def _act(g: Tensor, squared: bool) -> Tensor:
    return relu(g).square() if squared else relu(g)


def _dense_backward(
    dy: Tensor, dnorms: Tensor, x: Tensor, weights: tuple[Tensor, Tensor, Tensor], squared: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make the hidden units again, and return all gradients."""
    wg, wu, wd_t = weights
    g, u = x @ wg.t(), x @ wu.t()
    act, on = _act(g, squared), ~(g <= 0)
    h = act * u
    dh = dy @ wd_t.t() + (dnorms[:, None] * h.float().sign()).to(h.dtype)
    dg = (dh * u * (2 * g if squared else 1)).where(on, 0)
    du = (dh * act).where(on, 0)
    return dg @ wg + du @ wu, dg.t() @ x, du.t() @ x, h.t() @ dy
