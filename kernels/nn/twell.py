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

    CUDA, compute capability 8.0 and newer     Triton: kernels/_active_*.py; sizes of multiples of 8
    CPU                                        torch, dense products: a reference, not a kernel

Where X or dY is not finite, a unit that is off counts as zero; dense products may make it NaN.
The L1 term is that of Cetin et al., arXiv 2603.23198, as their code has it: without a division by
the number of units. Their published coefficient, 2e-5, belongs to a mean of it over layers.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from triton import knobs

from sparsebench.formats._format import require
from sparsebench.kernels import _active_dense, _active_products
from sparsebench.kernels._active_index import Active, index_of, require_room
from sparsebench.kernels._kernel import Unsupported
from sparsebench.kernels._triton import TMA_ALIGNMENT, supports
from sparsebench.results.record import Problem

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}  # on a GPU
SHARE = 64  # of the units, one is given a slot: more on would cost what dense products do

Packed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Offsets, columns, g, u, unit offsets, tokens, places: an Active, and u beside g."""


class SparseGatedMLP(nn.Module):
    """A gated MLP with relu or relu2 (its square), without bias, for training.

    gate, up, down  nn.Linear, with the state dict that three of them have
    slots           of a token, on average, for units that are on; a 64th of all if not given

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
        weights = [self.gate.weight, self.up.weight, self.down.weight.t()]
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, *weights = (t.to(dtype) for t in (x, *weights))
        flat = x.reshape(-1, k)
        y, norms, *_ = gated_mlp(flat, *weights, self.activation == "relu2", self.slots)
        y = y.view(x.shape)
        return (y, norms.sum() / max(1, len(flat))) if l1 else y

    def extra_repr(self) -> str:
        """Say the activation and the slots."""
        return f"activation={self.activation}, slots={self.slots} of {self.hidden_features}"


# ---- operators ----


def _forward(
    x: Tensor, wg: Tensor, wu: Tensor, wd_t: Tensor, squared: bool, slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return Y [m, k], a token's sum of |H| [m], and the seven of Packed. Raises Unsupported.

    X [m, k], Wg, Wu and Wd.T [n, k]; relu squared, or relu.
    """
    _require_one_kind(x, wg, wu, wd_t)
    sizes = [[*w.shape] for w in (wg, wu, wd_t)]
    if sizes != [[len(wg), x.shape[1]]] * 3:
        raise Unsupported(f"expected three weights [n, {x.shape[1]}], found {sizes}")
    x, wg, wu, wd_t = (_plain(t) for t in (x, wg, wu, wd_t))
    m, n = len(x), len(wg)
    y, norms = torch.empty_like(x), x.new_empty(m, dtype=torch.float32)
    if not _on_kernels(x, n):
        with torch.autocast(x.device.type, enabled=False):
            h = _act(x @ wg.t(), squared) * (x @ wu.t())
            y, norms = h @ wd_t, h.float().abs().sum(1)
        packed = (torch.zeros_like(t) for t in _packed_like(x, n, slots))
        return y, norms, *packed  # type: ignore[return-value]  # seven
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        g = x @ wg.t()
        active = index_of(g, m * slots)
        up, u, h = _active_products.up(x, wu, active, squared=squared)
        up()
        lists = active.offsets, active.columns
        _active_products.summed("norms", lists, (h,), (wd_t,), (y, norms))()
        for program in _active_dense.forward(x, wu, wd_t, g, y, norms, active, squared=squared):
            program()
    by_unit = active.unit_offsets, active.tokens, active.places
    return y, norms, *lists, active.values, u, *by_unit


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
    dy, x, wg, wu, wd_t = (_plain(t) for t in (dy, x, wg, wu, wd_t))
    if not _on_kernels(x, len(wg)):
        with torch.autocast(x.device.type, enabled=False):
            return _dense_backward(dy, dnorms, x, (wg, wu, wd_t), squared)
    offsets, columns, values, u, unit_offsets, tokens, places = packed
    active = Active(offsets, columns, values, unit_offsets, tokens, places)
    dnorms = dnorms.contiguous()
    dx, dwg, dwu, dwd_t = (torch.empty_like(t) for t in (x, wg, wu, wd_t))
    out = dx, dwg, dwu, dwd_t
    with torch.cuda.device_of(x):
        program, by_token, (dg, du, h) = _active_products.slopes(
            dy, wd_t, active, u, dnorms, squared=squared
        )
        program()
        summed = _active_products.summed
        summed("matrices", (offsets, columns), by_token, (wg, wu), (dx,))()
        summed("sums", (unit_offsets, tokens), (dg, du), (x,), (dwg, dwu))()
        summed("one", (unit_offsets, tokens), (h,), (dy,), (dwd_t,))()
        del by_token, dg, du, h, program
        weights = wg, wu, wd_t
        for program in _active_dense.backward(x, dy, weights, dnorms, out, active, squared=squared):
            program()
    return out


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
    for what in ("dtype", "device"):
        found = sorted({str(getattr(t, what)) for t in tensors})
        if len(found) > 1:
            raise Unsupported(f"expected operands of one {what}, found {' and '.join(found)}")


def _plain(t: Tensor) -> Tensor:
    """Return the tensor contiguous and aligned for the copy engine; no copy of one that is."""
    if t.is_contiguous() and not t.data_ptr() % TMA_ALIGNMENT:
        return t.view(-1).view(t.shape)  # a single row may come with any stride
    return t.clone(memory_format=torch.contiguous_format)


def _on_kernels(x: Tensor, n: int) -> bool:
    """Say whether Triton computes this call, or torch's reference. Raises Unsupported."""
    m, k = x.shape
    if not m or (x.device.type == "cpu" and not knobs.runtime.interpret):
        return False
    if x.dtype not in NAMES:
        raise Unsupported(f"expected fp16, bf16 or fp32 on a GPU, found {x.dtype}")
    if reason := supports(Problem("ffn", {"dtype": NAMES[x.dtype]}), x.device):
        raise Unsupported(reason)
    if n % 8 or k % 8:
        raise Unsupported(f"expected sizes of multiples of 8, found {n} hidden and {k} in features")
    require_room(m, n, k)
    return True


# ---- the reference ----


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
