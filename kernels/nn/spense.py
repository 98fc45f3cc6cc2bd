"""Layers with 2:4 hybrid weights (formats/spense.py), to run a pruned model. W is frozen.

    SpenseLinear      Y = X @ W.T + bias
    SpenseGatedMLP    Y = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T      gate and up as in spense_ffn.py

    GPU of compute capability 9.0    spense_wgmma: one launch for gate, up and act, one for down
    8.0 and newer                    spense_mma: SpenseLinear in 16 bits
    other GPUs, and the rest         Unsupported; `to_dense` returns layers that run there
    CPU                              torch, with `to_dense` in each call, as a reference

Weights and inputs are fp16 or bf16. X has a gradient, so that adapters such as LoRA can train
beside W; backward writes W out as a dense matrix for it, and frees it (_spense_op.py). On a GPU all
sizes are multiples of 8; in fp8 of 16, except out_features. In fp8 there is no gradient, and

    W    is e4m3 with a scale for each row
    X    is bf16, which each call rounds so that each token's largest element is 448, or e4m3
    H    is e4m3 with one scale, which is part of the scales of up and down
    Y    is bf16

torch.compile sees operators. A CUDA graph holds only the kernels. Before a capture, call the layer
once with as many tokens: that call compiles the kernels and schedules the work. The schedule is
kept, and equal layers with as many tiles of tokens share it.
"""

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require, require_size
from sparsebench.formats.spense import VALUE_BYTES, Spense, sparse_shape_of, tile_shapes
from sparsebench.kernels._common.front import Guard, Recordings
from sparsebench.kernels._common.transforms import is_traced, rows_of, unflatten
from sparsebench.kernels.nn._packed import (
    FusedPart,
    PackedLinear,
    dense_linear,
    frozen,
    frozen_bias,
    loaded,
    plan_each,
    unwrapped,
)
from sparsebench.kernels.nn._spense_engines import ACTIVATIONS
from sparsebench.kernels.nn._spense_op import (
    BF16,
    E4M3,
    LARGEST,
    multiply,
    multiply_recorded,
    select,
    signature_of,
)
from sparsebench.kernels.nn._spense_weights import DTYPES, pack_weight, round_weight, with_name
from sparsebench.kernels.spense._call import NAMES
from sparsebench.kernels.spense.spense_ffn import TURN, interleaved, joined, parted

BUFFERS = "sparse", "dense", "scale"
ADAPT = (
    "adapt gate_up and down, or keep separate layers with "
    "sparsify_(model, recipe, lambda module, name: isinstance(module, nn.Linear))"
)
FIRST_TWO = 0x44  # metadata of two groups of 4 that both store elements 0 and 1


class SpenseLinear(PackedLinear):
    """nn.Linear with W [out_features, in_features] as in formats/spense.py: the same call and bias.

    dense_fraction  fraction of the rows or columns (`split`) that is dense: the last ones
    sparse, dense   buffers with the tiles of both parts, zeros until they are loaded
    scale           fp32 buffer [out_features], the factor of each row's fp8 values; None in 16 bits

    The bias is added to the rounded product. The dtype of W cannot change. A state dict includes
    the layout, and loads only into a layer with the same one. Raises FormatError.
    """

    LAYOUT = f"n, k, sparse rows, sparse columns, position in {', '.join(NAMES.values())}"
    sparse: Tensor
    dense: Tensor
    scale: Tensor | None
    _recordings: dict[str | None, Recordings]  # by activation: calls without Python (front.py)

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
        """Allocate zeros for a state dict to fill."""
        nn.Module.__init__(self)
        self._recordings = {}
        require(dtype in NAMES, f"expected {DTYPES}, found {dtype}")
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        n, k = out_features, in_features
        self.sparse_shape = sparse_shape_of(n, k, dtype.itemsize, dense_fraction, split)
        shapes = tile_shapes((n, k), self.sparse_shape, dtype.itemsize)
        for name, shape in zip(("sparse", "dense"), shapes, strict=True):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.uint8, device=device))
        self.sparse[..., VALUE_BYTES:] = FIRST_TWO
        scale = torch.ones(n, device=device, dtype=torch.float32) if dtype == E4M3 else None
        self.register_buffer("scale", scale)
        self.bias = frozen(torch.zeros(n, device=device, dtype=self.outside)) if bias else None

    @property
    def packed(self) -> Tensor:
        return self.sparse

    @property
    def outside(self) -> torch.dtype:
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
        """Pack a weight [n, k] that is 2:4 outside of its dense part; -0.0 counts as zero.

        dtype  float8_e4m3fn rounds a weight of 16 or 32 bits, each row's largest element to 448
        scale  of a weight that is already e4m3: [n] or [n, 1] for the rows, or one; by default 1

        Raises FormatError, which names the first group that is not 2:4.
        """
        values, row_scale = round_weight("weight", weight, dtype, scale)
        w = pack_weight("weight", values, dense_fraction, split)
        return cls.from_spense(w, bias, row_scale)

    @classmethod
    def from_spense(
        cls, w: Spense, bias: Tensor | None = None, scale: Tensor | None = None
    ) -> Self:
        """Take packed weights without a copy, a copy of the bias [n], and fp32 scales [n]."""
        (n, k), (rows, columns) = w.shape, w.sparse_shape
        fraction = 1 - rows * columns / (n * k)
        options: dict[str, Any] = {"bias": False, "device": "meta", "dtype": w.dtype}
        layer = cls(k, n, dense_fraction=fraction, split=w.split, **options)
        layer.sparse, layer.dense = w.sparse, w.dense
        if bias is not None:
            layer.bias = frozen_bias(bias, n, w.sparse, layer.outside)
        if layer.scale is not None:
            ones = torch.ones(n, device=w.sparse.device, dtype=torch.float32)
            layer.scale = ones if scale is None else scale
        return layer

    @property
    def spense(self) -> Spense:
        """Return W in the memory of the buffers."""
        shape = self.out_features, self.in_features
        return Spense(shape, self.dtype, self.sparse_shape, self.sparse, self.dense)

    def to_dense(self) -> nn.Linear:
        """Return the layer as nn.Linear; fp8 weights are multiplied by their scale, in bf16."""
        return dense_linear(self._weight(), self.bias)

    def _weight(self) -> Tensor:
        w = self.spense.to_dense()
        return w if self.scale is None else (w.float() * self.scale[:, None]).to(self.outside)

    def get_extra_state(self) -> Tensor:
        """Return int64 [5]: n, k, rows and columns of the sparse part, position in NAMES."""
        kind = [*NAMES].index(self.dtype)
        return torch.tensor([self.out_features, self.in_features, *self.sparse_shape, kind])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer. Raises Unsupported for another dtype, and then leaves it as it was."""
        scale = self.scale
        super()._apply(fn, recurse)
        if scale is not None and self.scale is not None and self.scale.dtype != scale.dtype:
            self.scale = scale.to(self.scale.device)  # `fn` may set bf16, but scales stay fp32
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., n] of X [..., k]. Raises Unsupported."""
        return self._product(x)

    def _product(self, x: Tensor, activation: str | None = None) -> Tensor:
        """Return X @ W.T and the bias; with an activation, if W is gate and up, act(G) * U."""
        if not torch.compiler.is_compiling() and activation in self._recordings:
            fast: Tensor | None = self._recordings[activation].replay(x)
            if fast is not None:
                return fast
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise Unsupported(f"expected [..., {self.in_features}], found {list(x.shape)}")
        training = x.requires_grad and torch.is_grad_enabled()
        if training and self.scale is not None:
            raise Unsupported("expected 16 bits for a gradient, found an fp8 layer")
        cast = torch.is_autocast_enabled(x.device.type)
        if cast:
            x = x if x.dtype == E4M3 else x.to(torch.get_autocast_dtype(x.device.type))
        if x.dtype not in (self.outside, self.dtype):
            raise Unsupported(f"expected X in the layer's {self.outside}, found {x.dtype}")
        bias = self.bias if activation is None else None
        w = self.spense
        training |= torch.is_grad_enabled() and bias is not None and bias.requires_grad
        if is_traced() or cast or not x.is_cuda:
            y = multiply(rows_of(x), w, activation, self.scale, training=training)
            return unflatten(y if bias is None else y.add_(bias), x)
        if activation not in self._recordings:
            self._recordings[activation] = Recordings(signature_of(activation))
        guards = [Guard(self._buffers, name, self._buffers[name]) for name in BUFFERS]
        guards.append(Guard(self._parameters, "bias", self._parameters.get("bias"), content=False))
        return multiply_recorded(
            self._recordings[activation],
            x,
            w,
            activation,
            self.scale,
            guards,
            bias=bias,
            training=training,
        )

    def _select(self, m: int, activation: str | None = None) -> None:
        """Plan m tokens without a search."""
        select(m, self.spense, activation)

    def extra_repr(self) -> str:
        """Return the sizes, the sparse part and the dtype."""
        (rows, columns), n, k = self.sparse_shape, self.out_features, self.in_features
        bias = self.bias is not None
        return f"in_features={k}, out_features={n}, sparse={rows}x{columns}, {bias=}, {self.dtype}"


class SpenseGatedMLP(nn.Module):
    """A gated MLP whose last `dense` hidden units are dense, and whose other units are 2:4.

    gate_up, down  SpenseLinear without bias; gate and up are one matrix (spense_ffn.py)
    activation     silu, gelu_tanh or relu

    2:4 units are stored sparse in whole tiles of 128, and the remainder is stored dense.
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
        """Allocate zeros for a state dict to fill."""
        super().__init__()
        k, h = in_features, hidden_features
        require(h % TURN == 0, f"hidden_features: expected a multiple of {TURN}, found {h}")
        require(0 <= dense <= h, f"dense: expected 0 to {h} hidden units, found {dense}")
        names = ", ".join(ACTIVATIONS)
        valid = activation in ACTIVATIONS
        require(valid, f"activation: expected one of {names}; found {activation!r}")
        self.hidden_features, self.activation = h, activation
        rows, _ = sparse_shape_of(h, k, dtype.itemsize, dense / h, "rows")
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.gate_up = SpenseLinear(k, 2 * h, dense_fraction=1 - rows / h, split="rows", **options)
        self.down = SpenseLinear(h, k, dense_fraction=dense / h, split="columns", **options)
        for name in ("gate_proj", "up_proj", "down_proj"):
            self.add_module(name, FusedPart("SpenseGatedMLP", ADAPT))

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
        """Pack pruned weights: gate and up [h, k] and down [k, h]; -0.0 counts as zero.

        dtype, scales  as in SpenseLinear.from_dense, for all three
        largest        fp8 only: the largest |act(G) * U| in calibration; larger ones are clamped

        Raises FormatError, which names the weight and the first group that is not 2:4.
        """
        require(gate.dim() == 2, f"gate: expected a matrix [h, k], found {list(gate.shape)}")
        (h, k), kind = gate.shape, dtype or gate.dtype
        mlp = cls(k, h, dense=dense, activation=activation, dtype=kind, device="meta")
        for name, weight, shape in (("up", up, (h, k)), ("down", down, (k, h))):
            same = weight.dtype == gate.dtype
            require(same, f"{name}: expected {gate.dtype} like gate, found {weight.dtype}")
            with_name(name, require_size, weight, shape)
        expected = "more than 0" if kind == E4M3 else f"none with {kind}"
        fits = largest is None if kind != E4M3 else largest is not None and largest > 0
        require(fits, f"largest: expected {expected}, found {largest}")
        weights = {"gate": gate, "up": up, "down": down}
        (g, gate_scale), (u, up_scale), (d, down_scale) = (
            round_weight(name, weight, kind, scale)
            for (name, weight), scale in zip(weights.items(), scales or (None,) * 3, strict=True)
        )
        joint_scale = None
        if gate_scale is not None and up_scale is not None and down_scale is not None and largest:
            h_scale = largest / LARGEST  # H is linear in U, so up's and down's scales include H's
            joint_scale = interleaved(gate_scale, up_scale / h_scale)
            down_scale = down_scale * h_scale
        gate_up = joined(
            *(pack_weight(n, w, dense / h, "rows") for n, w in (("gate", g), ("up", u)))
        )
        mlp.gate_up = SpenseLinear.from_spense(gate_up, scale=joint_scale)
        mlp.down = SpenseLinear.from_spense(
            pack_weight("down", d, dense / h, "columns"), scale=down_scale
        )
        return mlp

    @classmethod
    def from_spense(
        cls,
        gate_up: Spense,
        down: Spense,
        activation: str = "silu",
        scales: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Self:
        """Take packed weights without a copy, and fp32 scales of their rows. Raises FormatError."""
        k, h = down.shape
        mlp = cls(k, h, dense=0, activation=activation, dtype=down.dtype, device="meta")
        mlp.gate_up = SpenseLinear.from_spense(gate_up, scale=scales[0])
        mlp.down = SpenseLinear.from_spense(down, scale=scales[1])
        return mlp

    def to_dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate and up [h, k] and down [k, h].

        In fp8, up is divided by the scale of H, and down multiplied by it. Adapters are left out.
        """
        gate_up, down = unwrapped(self.gate_up), unwrapped(self.down)
        return *parted(gate_up._weight()), down._weight()

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., k] of X [..., k]. Raises Unsupported."""
        if isinstance(self.gate_up, SpenseLinear):
            with loaded(self.gate_up):
                h = self.gate_up._product(x, self.activation)
        else:  # an adapter such as LoRA wraps it, so the activation cannot be in the same launch
            gate, up = self.gate_up(x).unflatten(-1, (-1, 2, TURN)).unbind(-2)
            h = (ACTIVATIONS[self.activation](gate) * up).flatten(-2)
        y: Tensor = self.down(h)
        return y

    def plan(self, tokens: Iterable[int], *, search: bool = True) -> Self:
        """Plan these numbers of tokens now instead of at a first call (PackedLinear.plan)."""
        for layer in (self.gate_up, self.down):
            unwrapped(layer)._recordings.clear()
        plan_each(tokens, self._search if search else self._select, search=search)
        return self

    def _search(self, m: int) -> None:
        first = unwrapped(self.gate_up)
        self(first.sparse.new_zeros(m, first.in_features, dtype=first.outside))

    def _select(self, m: int) -> None:
        first = unwrapped(self.gate_up)
        first._select(m, self.activation if first is self.gate_up else None)
        unwrapped(self.down)._select(m)

    def extra_repr(self) -> str:
        """Return the hidden units and the activation."""
        return f"hidden_features={self.hidden_features}, activation={self.activation}"
