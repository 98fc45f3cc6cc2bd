"""Layers of 2:4 hybrid weights, to run a pruned model with, in place of dense ones.

    SpenseLinear      Y = X @ W.T + bias                           W in formats/spense.py
    SpenseGatedMLP    Y = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T      gate and up in spense_ffn.py

    CUDA, compute capability 9.0    spense_wgmma: gate, up and act are one launch, down another
    other GPUs                      Unsupported; `to_dense` gives what they can run
    CPU                             torch, a product of `to_dense` a call: a reference, not a kernel

Weights and inputs are fp16 or bf16, and there are no gradients: an input that requires one is
refused. Sizes are multiples of 8 on a GPU. torch.compile sees operators; a CUDA graph holds the
kernels alone, and is captured after a first call with as many tokens, which compiles them and
assigns the work. Work is assigned once for equal layers and tiles of tokens, and kept.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from sparsebench.formats._format import FormatError, require, require_size
from sparsebench.formats.spense import (
    DENSE_BYTES,
    ROWS,
    SPAN_BYTES,
    VALUE_BYTES,
    Spense,
    sparse_shape_of,
)
from sparsebench.kernels import spense_wgmma
from sparsebench.kernels._kernel import Unsupported
from sparsebench.kernels._tuned import Sizes, lookup
from sparsebench.kernels.nn._ops import readable
from sparsebench.kernels.spense_ffn import TURN, joined, parted
from sparsebench.results.record import Problem

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
ITEMSIZE = 2  # bytes of both
SPARSE_BYTES = VALUE_BYTES * 9 // 8  # a code of 4 bits with two values of 16
FIRST_TWO = 0x44  # metadata of two groups that store their elements 0 and 1
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


class SpenseLinear(nn.Module):
    """nn.Linear with W [out_features, in_features] in formats/spense.py: the same call and bias.

    dense_fraction  of the rows or columns (`split`), the last ones, may have any elements
    sparse, dense   buffers, the tiles of both parts; zeros until they are loaded

    The bias is added to the rounded product. The dtype is that of W for good. A state dict has the
    layout, too, and loads into no other one. Raises FormatError.
    """

    sparse: Tensor
    dense: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dense_fraction: float = 0.0,
        split: str = "rows",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Make a layer of zeros, for a state dict to fill."""
        super().__init__()
        require(dtype in NAMES, f"expected fp16 or bf16, found {dtype}")
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        n, k = out_features, in_features
        rows, columns = sparse_shape_of(n, k, ITEMSIZE, dense_fraction, split)
        self.sparse_shape = rows, columns
        rest = (n, k - columns) if columns < k else (n - rows, k)
        zeros = partial(torch.zeros, dtype=torch.uint8, device=device)
        self.register_buffer("sparse", zeros(*_grid(rows, columns), SPARSE_BYTES))
        self.register_buffer("dense", zeros(*_grid(*rest), DENSE_BYTES))
        self.sparse[..., VALUE_BYTES:] = FIRST_TWO
        self.bias = _frozen(torch.zeros(n, device=device, dtype=dtype)) if bias else None

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        *,
        dense_fraction: float = 0.0,
        split: str = "rows",
        bias: Tensor | None = None,
    ) -> Self:
        """Pack a weight [n, k] that is 2:4 outside of its dense part; -0.0 counts as +0.0.

        Raises FormatError, which names the first group that is not.
        """
        return cls.from_spense(_packed("weight", weight, dense_fraction, split), bias)

    @classmethod
    def from_spense(cls, w: Spense, bias: Tensor | None = None) -> Self:
        """Take packed weights as they are, in their memory, and a copy of the bias [n]."""
        (n, k), (rows, columns) = w.shape, w.sparse_shape
        layer = cls(
            *(k, n),
            dense_fraction=1 - rows * columns / (n * k),
            split=w.split,
            bias=bias is not None,
            device="meta",
            dtype=w.dtype,
        )
        layer.sparse, layer.dense = w.sparse, w.dense
        if bias is not None:
            require(bias.shape == (n,), f"bias: expected [{n}], found {list(bias.shape)}")
            layer.bias = _frozen(bias.detach().to(w.sparse.device, w.dtype, copy=True))
        return layer

    @property
    def spense(self) -> Spense:
        """Return W in the buffers' own memory."""
        shape = self.out_features, self.in_features
        return Spense(shape, self.dtype, self.sparse_shape, self.sparse, self.dense)

    def to_dense(self) -> nn.Linear:
        """Return the layer as nn.Linear."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = _frozen(self.spense.to_dense())
        linear.bias = None if self.bias is None else _frozen(self.bias.detach().clone())  # type: ignore[assignment]
        return linear

    def get_extra_state(self) -> Tensor:
        """Return n, k, rows and columns of the sparse part, and which dtype, int64 [5]."""
        kind = [*NAMES].index(self.dtype)
        return torch.tensor([self.out_features, self.in_features, *self.sparse_shape, kind])

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse another layout: fp16's bytes would be taken for bf16's. Raises FormatError."""
        expected, found = self.get_extra_state().tolist(), state.tolist()
        what = "n, k, sparse rows, sparse columns, bf16"
        require(found == expected, f"{what}: expected {expected}, found {found}")

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., n] of X [..., k]. Raises Unsupported."""
        y = self._product(x)
        return y if self.bias is None else y.add_(self.bias)

    def _product(self, x: Tensor, activation: str | None = None) -> Tensor:
        """Return X @ W.T; where W is gate and up, act(G) * U."""
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise Unsupported(f"expected [..., {self.in_features}], found {list(x.shape)}")
        if x.requires_grad and torch.is_grad_enabled():
            raise Unsupported("expected inference (torch.no_grad), found an input with a gradient")
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if x.dtype != self.dtype:
            raise Unsupported(f"expected {self.dtype} as the weights have, found {x.dtype}")
        flat = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        sizes = self.out_features, self.in_features, *self.sparse_shape
        op = linear if torch.compiler.is_compiling() else _linear
        y: Tensor = op(flat, self.sparse, self.dense, *sizes, activation)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])

    def extra_repr(self) -> str:
        """Say sizes, the sparse part and the dtype."""
        (rows, columns), n, k = self.sparse_shape, self.out_features, self.in_features
        bias = self.bias is not None
        return f"in_features={k}, out_features={n}, sparse={rows}x{columns}, {bias=}, {self.dtype}"


class SpenseGatedMLP(nn.Module):
    """A gated MLP of which the last `dense` hidden units are dense and the others 2:4.

    gate_up, down  SpenseLinear, without bias: gate and up are one matrix, as spense_ffn.py has it
    activation     silu, gelu_tanh or relu

    Of the other units, whole tiles of 128 are stored as sparse, and the rest as dense. There is a
    multiple of 8 of all units. Raises FormatError.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dense: int,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Make a layer of zeros, for a state dict to fill."""
        super().__init__()
        k, h = in_features, hidden_features
        require(h % TURN == 0, f"hidden_features: expected a multiple of {TURN}, found {h}")
        require(0 <= dense <= h, f"dense: expected 0 to {h} hidden units, found {dense}")
        known = activation in ACTIVATIONS
        names = ", ".join(ACTIVATIONS)
        require(known, f"activation: expected one of {names}; found {activation!r}")
        self.hidden_features, self.activation = h, activation
        rows, _ = sparse_shape_of(h, k, ITEMSIZE, dense / h, "rows")
        made: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.gate_up = SpenseLinear(k, 2 * h, dense_fraction=1 - rows / h, split="rows", **made)
        self.down = SpenseLinear(h, k, dense_fraction=dense / h, split="columns", **made)

    @classmethod
    def from_dense(
        cls, gate: Tensor, up: Tensor, down: Tensor, *, dense: int, activation: str = "silu"
    ) -> Self:
        """Pack gate and up [h, k] and down [k, h], as pruning left them; -0.0 counts as +0.0.

        Raises FormatError, which names the weight and the first group that is not 2:4.
        """
        require(gate.dim() == 2, f"gate: expected a matrix [h, k], found {list(gate.shape)}")
        (h, k), made = gate.shape, {"dtype": gate.dtype, "device": "meta"}
        mlp = cls(k, h, dense=dense, activation=activation, **made)  # type: ignore[arg-type]
        for name, weight, shape in (("up", up, (h, k)), ("down", down, (k, h))):
            of = f"{name}: expected {gate.dtype} as gate has, found {weight.dtype}"
            require(weight.dtype == gate.dtype, of)
            _named(name, require_size, weight, shape)
        both = (_packed(n, w, dense / h, "rows") for n, w in (("gate", gate), ("up", up)))
        mlp.gate_up = SpenseLinear.from_spense(joined(*both))
        mlp.down = SpenseLinear.from_spense(_packed("down", down, dense / h, "columns"))
        return mlp

    def to_dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate and up [h, k] and down [k, h]."""
        return *parted(self.gate_up.spense.to_dense()), self.down.spense.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., k] of X [..., k]. Raises Unsupported."""
        y: Tensor = self.down(self.gate_up._product(x, self.activation))
        return y

    def extra_repr(self) -> str:
        """Say the hidden units and the activation."""
        return f"hidden_features={self.hidden_features}, activation={self.activation}"


# ---- operators ----


def _linear(
    x: Tensor,
    sparse: Tensor,
    dense: Tensor,
    n: int,
    k: int,
    rows: int,
    columns: int,
    activation: str | None = None,
) -> Tensor:
    """Return Y [m, n] of X [m, k]; `rows` and `columns` of W are sparse. Raises Unsupported.

    With an activation W is gate and up, as spense_ffn.py orders them, and Y is H [m, n / 2].
    """
    w = Spense((n, k), x.dtype, (rows, columns), sparse, dense)
    if not x.device == sparse.device == dense.device:
        raise Unsupported(f"expected inputs on {sparse.device}, found {x.device}")
    if x.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            y = x @ w.to_dense().T
        if activation is None:
            return y
        gate, up = parted(y.T)
        return (ACTIVATIONS[activation](gate) * up).T.contiguous()
    if not len(x):
        return x.new_empty(0, n // 2 if activation else n)
    with torch.cuda.device_of(x):
        x = readable(x)
        return spense_wgmma.bind(_planned(x, w, activation), x, w)()


linear = torch.library.custom_op("sparsebench::spense_linear", _linear, mutates_args=())


@linear.register_fake
def _(
    x: Tensor,
    sparse: Tensor,
    dense: Tensor,
    n: int,
    k: int,
    rows: int,
    columns: int,
    activation: str | None = None,
) -> Tensor:
    return x.new_empty(x.shape[0], n // 2 if activation else n)


# ---- plans ----


class Call(NamedTuple):
    """All that a configuration depends on, and, with m of whole tiles of tokens, a plan."""

    m: int
    shape: tuple[int, int]
    sparse_shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    activation: str | None


def _planned(x: Tensor, w: Spense, activation: str | None = None) -> spense_wgmma.Plan:
    """Return the plan of X and W, made if it is the first of its tiles. Raises Unsupported."""
    m, (n, k) = len(x), w.shape
    call = Call(m, w.shape, w.sparse_shape, w.dtype, x.device, activation)
    config = _configured(call)
    tiles = -(-m // config.tokens)
    key = call._replace(m=tiles * config.tokens), config
    if key not in _PLANS:
        reason = spense_wgmma.supports(Problem("linear", {"dtype": NAMES[x.dtype]}), x.device)
        if reason := reason or spense_wgmma.refusal(x, w, activation):
            raise Unsupported(reason)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            what = f"{m} tokens of {n} x {k} are not planned"
            raise RuntimeError(f"{what}: call the layer once before capturing a CUDA graph")
        _PLANS[key] = spense_wgmma.plan(w, key[0].m, config, activation=activation)
    return replace(_PLANS[key], x=(m, k), y=(m, n // 2 if activation else n))


@lru_cache(4096)
def _configured(call: Call) -> spense_wgmma.Config:
    """Return a table's configuration of these sizes, else the default: nothing is timed."""
    (n, k), (rows, columns) = call.shape, call.sparse_shape
    density = 1 - rows * columns / (2 * n * k)
    sizes = Sizes(call.m, n, k, NAMES[call.dtype], None, density)
    found = lookup("spense_wgmma", sizes, call.device)
    return spense_wgmma.Config(**found) if found else spense_wgmma.configurations(call.m)[0]


_PLANS: dict[tuple[Call, spense_wgmma.Config], spense_wgmma.Plan] = {}


# ---- weights ----


def _packed(name: str, weight: Tensor, dense_fraction: float, split: str) -> Spense:
    """Convert a weight, -0.0 as +0.0; a FormatError names it."""
    require(weight.dtype in NAMES, f"{name}: expected fp16 or bf16, found {weight.dtype}")
    positive = (weight.detach() + 0.0).contiguous()
    pack = partial(Spense.from_dense, dense_fraction=dense_fraction, split=split)
    packed: Spense = _named(name, pack, positive)
    return packed


def _named(name: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from error


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _grid(rows: int, columns: int) -> tuple[int, int]:
    """Return how many rows and columns of tiles hold a part of W."""
    return -(-rows // ROWS), -(-columns * ITEMSIZE // SPAN_BYTES)
