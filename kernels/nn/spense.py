"""Layers with 2:4 hybrid weights (formats/spense.py), to run a pruned model. W is frozen.

    SpenseLinear      Y = X @ W.T + bias
    SpenseGatedMLP    Y = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T      gate and up as in spense_ffn.py

    CUDA, compute capability 9.0    spense_wgmma: gate, up and act are one launch, down another
    other GPUs                      Unsupported; `to_dense` returns layers that run there
    CPU                             torch, with `to_dense` in each call: a reference, not a kernel

Weights and inputs are fp16 or bf16. X has a gradient, so that adapters such as LoRA train beside W;
backward writes W out as a dense matrix for it, and frees it (_spense_op.py). On a GPU all sizes are
multiples of 8; in fp8 of 16, except out_features. In fp8 there is no gradient, and

    W    e4m3, with a scale for each row
    X    bf16, rounded in each call so that each token's largest element is 448; or e4m3 as given
    H    e4m3, with one scale, which is part of the scales of up and down
    Y    bf16

torch.compile sees operators. A CUDA graph holds only the kernels. Before it is captured, call the
layer once with as many tokens: this compiles the kernels and schedules the work. The schedule is
kept, and shared by equal layers with as many tiles of tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats._format import require, require_matrix, require_size
from sparsebench.formats.spense import (
    DENSE_BYTES,
    ROWS,
    SPAN_BYTES,
    VALUE_BYTES,
    Spense,
    sparse_shape_of,
)
from sparsebench.kernels._common.transforms import batched, watched
from sparsebench.kernels.nn._spense_op import (
    ACTIVATIONS,
    BF16,
    E4M3,
    LARGEST,
    NAMES,
    eager,
    linear,
    rounded_by_row,
)
from sparsebench.kernels.nn.bitmap import load_layout_first, require_layout
from sparsebench.kernels.spense.spense_ffn import TURN, interleaved, joined, parted

KNOWN = "expected fp16, bf16 or fp8 (float8_e4m3fn)"
CODE_BYTES = 2048  # metadata of a sparse tile: so many bytes divided by the bytes of an element
FIRST_TWO = 0x44  # metadata of two groups of 4 that store their elements 0 and 1


class SpenseLinear(nn.Module):
    """nn.Linear with W [out_features, in_features] as formats/spense.py: the same call and bias.

    dense_fraction  fraction of rows or columns (`split`), the last ones, that are dense
    sparse, dense   buffers: the tiles of both parts; zeros until they are loaded
    scale           buffer, fp32 [out_features]: W is its fp8 values times this; None for 16 bits

    The bias is added to the rounded product. The dtype of W cannot change. A state dict includes
    the layout, and loads only into a layer with the same one. Raises FormatError.
    """

    sparse: Tensor
    dense: Tensor
    scale: Tensor | None
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
        dtype: torch.dtype = BF16,
    ) -> None:
        """Make a layer of zeros, for a state dict to fill."""
        super().__init__()
        require(dtype in NAMES, f"{KNOWN}, found {dtype}")
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        n, k = out_features, in_features
        size = dtype.itemsize
        rows, columns = sparse_shape_of(n, k, size, dense_fraction, split)
        self.sparse_shape = rows, columns
        rest = (n, k - columns) if columns < k else (n - rows, k)
        zeros = partial(torch.zeros, dtype=torch.uint8, device=device)
        sparse_bytes = VALUE_BYTES + CODE_BYTES // size
        self.register_buffer("sparse", zeros(*_grid(rows, columns, size), sparse_bytes))
        self.register_buffer("dense", zeros(*_grid(*rest, size), DENSE_BYTES))
        self.sparse[..., VALUE_BYTES:] = FIRST_TWO
        self.register_buffer("scale", torch.ones(n, device=device) if dtype == E4M3 else None)
        self.bias = _frozen(torch.zeros(n, device=device, dtype=self.outside)) if bias else None

    def __getattr__(self, name: str) -> Any:
        """Say what there is in place of a weight, which many tools ask an nn.Linear for."""
        if name == "weight":
            has = "its tiles are sparse and dense, to_dense().weight is a copy"
            raise AttributeError(f"SpenseLinear: expected no use of .weight: {has}")
        return super().__getattr__(name)

    @property
    def qweight(self) -> Tensor:
        """Return a buffer: tools such as peft ask packed layers where a weight is."""
        return self.sparse

    @property
    def outside(self) -> torch.dtype:
        """Return the dtype of X, Y and the bias."""
        return BF16 if self.dtype == E4M3 else self.dtype

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        *,
        dense_fraction: float = 0.0,
        split: str = "rows",
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        scale: Tensor | None = None,
    ) -> Self:
        """Pack a weight [n, k] that is 2:4 outside of its dense part; -0.0 is zero.

        dtype  float8_e4m3fn rounds a weight of 16 or 32 bits, each row's largest element to 448
        scale  of a weight that is e4m3 already: [n] or [n, 1] for rows, or one; by default 1

        Raises FormatError, which names the first group that is not 2:4.
        """
        kind = dtype or weight.dtype
        w, of_rows = _packed("weight", weight, dense_fraction, split, kind, scale)
        return cls.from_spense(w, bias, of_rows)

    @classmethod
    def from_spense(
        cls, w: Spense, bias: Tensor | None = None, scale: Tensor | None = None
    ) -> Self:
        """Take packed weights without a copy, a copy of the bias [n], and fp32 scales [n]."""
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
            layer.bias = _frozen(bias.detach().to(w.sparse.device, layer.outside, copy=True))
        if layer.scale is not None:
            layer.scale = torch.ones(n, device=w.sparse.device) if scale is None else scale
        return layer

    @property
    def spense(self) -> Spense:
        """Return W, in the memory of the buffers."""
        shape = self.out_features, self.in_features
        return Spense(shape, self.dtype, self.sparse_shape, self.sparse, self.dense)

    def to_dense(self) -> nn.Linear:
        """Return the layer as nn.Linear; fp8 weights times their scale, rounded to bf16."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = _frozen(self._weight())
        linear.bias = None if self.bias is None else _frozen(self.bias.detach().clone())  # type: ignore[assignment]
        return linear

    def _weight(self) -> Tensor:
        w = self.spense.to_dense()
        return w if self.scale is None else (w.float() * self.scale[:, None]).to(self.outside)

    def get_extra_state(self) -> Tensor:
        """Return int64 [5]: n, k, rows and columns of the sparse part, position in NAMES."""
        kind = [*NAMES].index(self.dtype)
        return torch.tensor([self.out_features, self.in_features, *self.sparse_shape, kind])

    def set_extra_state(self, state: Tensor) -> None:
        """Raise FormatError for another layout: fp16 bytes would be read as bf16."""
        what = f"n, k, sparse rows, sparse columns, which of {', '.join(NAMES.values())}"
        require_layout(self, what, state)

    _load_from_state_dict = load_layout_first

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer. Raises Unsupported for another dtype; then nothing has changed."""
        for expected in (torch.uint8, self.outside):
            found = fn(self.sparse.new_empty(1, dtype=expected)).dtype
            if found != expected:
                raise Unsupported(f"expected {expected} as W has, which is packed, found {found}")
        scale = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if scale is not None and self.scale is not None and self.scale.dtype != scale.dtype:
            self.scale = scale.to(self.scale.device)  # bf16 outside, and fp32 for its scales
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., n] of X [..., k]. Raises Unsupported."""
        y = self._product(x)
        return y if self.bias is None else y.add_(self.bias)

    def _product(self, x: Tensor, activation: str | None = None) -> Tensor:
        """Return X @ W.T, or with an activation, where W is gate and up, act(G) * U."""
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise Unsupported(f"expected [..., {self.in_features}], found {list(x.shape)}")
        training = x.requires_grad and torch.is_grad_enabled()
        if training and self.scale is not None:
            raise Unsupported("expected 16 bits for a gradient, found an fp8 layer: torch.no_grad")
        if torch.is_autocast_enabled(x.device.type):
            x = x if x.dtype == E4M3 else x.to(torch.get_autocast_dtype(x.device.type))
        if x.dtype not in (self.outside, self.dtype):
            raise Unsupported(f"expected {self.outside} as the layer has, found {x.dtype}")
        flat = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        sizes = self.out_features, self.in_features, *self.sparse_shape
        op = linear if training or watched() else eager
        y: Tensor = op(flat, self.sparse, self.dense, *sizes, activation, self.scale)
        return batched(y, x)

    def extra_repr(self) -> str:
        """Return sizes, the sparse part and the dtype."""
        (rows, columns), n, k = self.sparse_shape, self.out_features, self.in_features
        bias = self.bias is not None
        return f"in_features={k}, out_features={n}, sparse={rows}x{columns}, {bias=}, {self.dtype}"


class SpenseGatedMLP(nn.Module):
    """A gated MLP of which the last `dense` hidden units are dense and the others 2:4.

    gate_up, down  SpenseLinear, without bias; gate and up are one matrix (spense_ffn.py)
    activation     silu, gelu_tanh or relu

    The 2:4 units are stored as sparse in whole tiles of 128; a rest is stored as dense.
    hidden_features is a multiple of 8. Raises FormatError.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dense: int,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype = BF16,
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
        rows, _ = sparse_shape_of(h, k, dtype.itemsize, dense / h, "rows")
        made: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.gate_up = SpenseLinear(k, 2 * h, dense_fraction=1 - rows / h, split="rows", **made)
        self.down = SpenseLinear(h, k, dense_fraction=dense / h, split="columns", **made)

    @classmethod
    def from_dense(
        cls,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        *,
        dense: int,
        activation: str = "silu",
        dtype: torch.dtype | None = None,
        scales: tuple[Tensor, Tensor, Tensor] | None = None,
        largest: float | None = None,
    ) -> Self:
        """Pack pruned weights: gate and up [h, k] and down [k, h]; -0.0 is zero.

        dtype, scales  as in SpenseLinear.from_dense, for the three
        largest        fp8 only: the largest |act(G) * U| in calibration; larger ones are clamped

        Raises FormatError, which names the weight and the first group that is not 2:4.
        """
        require(gate.dim() == 2, f"gate: expected a matrix [h, k], found {list(gate.shape)}")
        (h, k), kind = gate.shape, dtype or gate.dtype
        mlp = cls(k, h, dense=dense, activation=activation, dtype=kind, device="meta")
        for name, weight, shape in (("up", up, (h, k)), ("down", down, (k, h))):
            of = f"{name}: expected {gate.dtype} as gate has, found {weight.dtype}"
            require(weight.dtype == gate.dtype, of)
            _named(name, require_size, weight, shape)
        wanted = "more than 0" if kind == E4M3 else f"none with {kind}"
        fits = largest is None if kind != E4M3 else largest is not None and largest > 0
        require(fits, f"largest: expected {wanted}, found {largest}")
        named = zip(("gate", "up", "down"), (gate, up, down), scales or (None,) * 3, strict=True)
        (g, of_gate), (u, of_up), (d, of_down) = (
            _packed(name, w, dense / h, "columns" if name == "down" else "rows", kind, scale)
            for name, w, scale in named
        )
        of_both = None
        if of_gate is not None and of_up is not None and of_down is not None and largest:
            of_h = largest / LARGEST  # H is linear in U: scales of up and down contain H's own
            of_both, of_down = interleaved(of_gate, of_up / of_h), of_down * of_h
        mlp.gate_up = SpenseLinear.from_spense(joined(g, u), scale=of_both)
        mlp.down = SpenseLinear.from_spense(d, scale=of_down)
        return mlp

    def to_dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate and up [h, k] and down [k, h].

        In fp8, up is divided by the scale of H, and down multiplied by it.
        """
        return *parted(self.gate_up._weight()), self.down._weight()

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., k] of X [..., k]. Raises Unsupported."""
        y: Tensor = self.down(self.gate_up._product(x, self.activation))
        return y

    def extra_repr(self) -> str:
        """Return the hidden units and the activation."""
        return f"hidden_features={self.hidden_features}, activation={self.activation}"


# ---- weights ----


def _packed(
    name: str,
    weight: Tensor,
    dense_fraction: float,
    split: str,
    dtype: torch.dtype,
    scale: Tensor | None,
) -> tuple[Spense, Tensor | None]:
    """Return a packed weight and its scales; FormatError names the weight."""
    rounded, of_rows = _rounded(name, weight.detach(), dtype, scale)
    pack = partial(Spense.from_dense, dense_fraction=dense_fraction, split=split)
    return _named(name, pack, rounded.contiguous()), of_rows


def _rounded(
    name: str, weight: Tensor, dtype: torch.dtype, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return a weight [n, k] in this dtype, and in fp8 the fp32 scales [n] of its rows."""
    require(dtype in NAMES, f"{name}: {KNOWN}, found {dtype}")
    found, n = weight.dtype, len(weight)
    require(dtype in (E4M3, found), f"{name}: expected {dtype}, found {found}")
    scaled = scale is None or found == E4M3
    require(scaled, f"{name}: expected no scale with {found}, found one")
    if dtype != E4M3:
        return weight, None
    _named(name, require_matrix, weight)
    if found != E4M3:
        return rounded_by_row(weight)
    of_rows = weight.new_ones(n, dtype=torch.float32) if scale is None else scale.detach().float()
    fits = of_rows.numel() == 1 or of_rows.shape in ((n,), (n, 1))
    require(fits, f"{name}: expected a scale of [{n}] or one, found {list(of_rows.shape)}")
    return weight, of_rows.flatten().expand(n).to(weight.device).contiguous()


def _named(name: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from error


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _grid(rows: int, columns: int, itemsize: int) -> tuple[int, int]:
    """Return how many rows and columns of tiles hold a part of W."""
    return -(-rows // ROWS), -(-columns * itemsize // SPAN_BYTES)
