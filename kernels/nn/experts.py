"""The experts of a mixture with sparse weights, to run a pruned model. They are frozen.

    hidden_states [m, h], top_k_index [m, k], top_k_weights [m, k]
      route       rows sorted by expert                         _common/routing.py
      gate_up     G | U = rows @ W_e.T      [experts 2 i, h]    one matrix for all experts
      act         H = act(G) * U
      down        rows of Y = H @ W_e.T     [experts h, i]
      combine     the sum of a token's rows, times its weights

    2:4       SpenseLinear, split by columns or not at all. 8 rows of an expert's gate and 8 of its
              up alternate (spense_ffn.py), and the launch of gate_up writes H
    blocks    BlockSparseLinear. Gate is above up in each expert, and act is a launch

    GPU of compute capability 9.0    both, in fp16 and bf16
    8.0 and newer                    blocks
    other GPUs, and the rest         Unsupported; `to_dense` returns weights that run there
    CPU                              torch, expert by expert, as a reference

The interface is that of the experts in transformers' models. An index below 0 or from `experts` on
names an expert of another device: it adds nothing. A token may name an expert twice. No launch
waits for the host, so a CUDA graph replays with other routings. An adapter on gate_up or down
raises Unsupported at the first call, because no kernel would read it.
"""

from collections.abc import Iterable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require, require_whole
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.spense import ROWS, Spense
from sparsebench.kernels._common.routing import combine, route
from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import aligned, device_guard, is_traced
from sparsebench.kernels.nn._experts_engines import (
    Weight,
    expert_of,
    multiply,
    tensors_of,
    weight_of,
)
from sparsebench.kernels.nn._packed import loaded, plan_each
from sparsebench.kernels.nn._spense_engines import ACTIVATIONS
from sparsebench.kernels.nn._spense_weights import pack_weight
from sparsebench.kernels.nn.block_sparse_mlp import hidden, layer_of
from sparsebench.kernels.nn.linear import BlockSparseLinear
from sparsebench.kernels.nn.spense import SpenseLinear
from sparsebench.kernels.spense.spense_ffn import interleaved, parted

LAYERS = SpenseLinear, BlockSparseLinear


class SparseExperts(nn.Module):
    """Gated experts whose weights are 2:4 or in blocks.

    gate_up, down  SpenseLinear or BlockSparseLinear without bias, both of one kind, of
                   experts 2 i x h and experts h x i
    top_k          experts of a token for which `plan` plans; a call may have any number
    activation     silu, gelu_tanh or relu

    In 2:4, 2 i and h are multiples of 64. In blocks, i and h are multiples of a block's rows.
    Raises FormatError.
    """

    def __init__(
        self,
        gate_up: SpenseLinear | BlockSparseLinear,
        down: SpenseLinear | BlockSparseLinear,
        *,
        experts: int,
        top_k: int,
        activation: str = "silu",
    ) -> None:
        """Take the layers, and freeze them."""
        super().__init__()
        names = ", ".join(ACTIVATIONS)
        valid = activation in ACTIVATIONS
        require(valid, f"activation: expected one of {names}; found {activation!r}")
        require_whole("top_k", top_k)
        kinds = {type(layer) for layer in (gate_up, down)}
        actual = " and ".join(kind.__name__ for kind in (type(gate_up), type(down)))
        alike = len(kinds) == 1 and kinds <= {*LAYERS}
        require(alike, f"expected two SpenseLinear or two BlockSparseLinear, found {actual}")
        h, i = gate_up.in_features, down.in_features
        sizes = gate_up.out_features, down.out_features
        expected = experts * 2 * i, experts * h
        require(
            sizes == expected, f"expected {expected} features of {experts} experts, found {sizes}"
        )
        dtypes = [layer.weight.dtype for layer in (gate_up, down)]
        require(dtypes[0] == dtypes[1], f"expected weights of one dtype, found {dtypes}")
        for name, layer, n in (("gate_up", gate_up, i), ("down", down, h)):
            require(layer.bias is None, f"{name}: expected no bias, found one")
            if isinstance(layer, SpenseLinear):
                step, whole = ROWS // (2 if layer is gate_up else 1), layer.sparse_shape[0]
                by_rows = whole < layer.out_features
                require(not by_rows, f"{name}: expected a split by columns, found {whole} rows")
                require(layer.scale is None, f"{name}: expected 16 bits, found fp8")
            else:
                step = layer.block[0]
            require(n % step == 0, f"{name}: expected a multiple of {step} features, found {n}")
        self.gate_up, self.down = gate_up.requires_grad_(False), down.requires_grad_(False)
        self.experts, self.top_k, self.activation = experts, top_k, activation
        self.in_features, self.hidden_features = h, i

    @classmethod
    def from_dense(
        cls,
        gate_up: Tensor,
        down: Tensor,
        *,
        top_k: int,
        activation: str = "silu",
        dense_fraction: float = 0.0,
        block: int | None = None,
    ) -> Self:
        """Pack pruned weights: gate_up [experts, 2 i, h], gate first, and down [experts, h, i].

        dense_fraction  of the columns of each matrix, the last ones, that are dense beside 2:4
        block           rows and columns of a block; None for 2:4

        Raises FormatError, which names the weight.
        """
        for name, w in (("gate_up", gate_up), ("down", down)):
            fits = w.dim() == 3 and 0 not in w.shape
            require(fits, f"{name}: expected [experts, rows, columns], found {[*w.shape]}")
        (experts, _, h), i = gate_up.shape, down.shape[2]
        shapes = (experts, 2 * i, h), (experts, h, i)
        actual = tuple(gate_up.shape), tuple(down.shape)
        require(actual == shapes, f"expected gate_up and down of {shapes}, found {actual}")
        gate_up, down = gate_up.detach(), down.detach()
        layers: list[Any]
        if block is not None:
            of_rows = (w.flatten(0, 1).contiguous() for w in (gate_up, down))
            layers = [layer_of(Bsr.from_dense(w, block=block)) for w in of_rows]
        else:
            fits = not i % (ROWS // 2) and not h % ROWS
            sizes = f"{ROWS // 2} hidden units and of {ROWS} features"
            require(fits, f"expected a multiple of {sizes}, found {i} and {h}")
            turns = [interleaved(*w.chunk(2)) for w in gate_up]
            layers = [
                SpenseLinear.from_spense(_stack(name, each, dense_fraction))
                for name, each in (("gate_up", turns), ("down", [*down]))
            ]
        return cls(*layers, experts=experts, top_k=top_k, activation=activation)

    def to_dense(self) -> tuple[Tensor, Tensor]:
        """Return gate_up [experts, 2 i, h], gate first, and down [experts, h, i]."""
        gate_up, down = (
            torch.stack([expert_of(w, number, self.experts) for number in range(self.experts)])
            for w in self._weights()
        )
        if isinstance(self.gate_up, SpenseLinear):
            gate_up = torch.stack([torch.cat(parted(w)) for w in gate_up])
        return gate_up, down

    def _weights(self) -> list[Weight]:
        """Return gate_up and down. Raises Unsupported if an adapter wraps one."""
        weights: list[Weight] = []
        for name, layer in (("gate_up", self.gate_up), ("down", self.down)):
            if type(layer) not in LAYERS:
                actual = f"{type(layer).__module__}.{type(layer).__name__}"
                raise Unsupported(f"{name}: expected no adapter in experts, found {actual}")
            weights.append(layer.spense if isinstance(layer, SpenseLinear) else layer.bsr)
        return weights

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums [m, h] of the experts that tokens [m, h] are routed to.

        top_k_index    int64 or int32 [m, k]
        top_k_weights  float [m, k]; NaN makes the token's sum NaN

        Raises Unsupported, and so does a backward pass.
        """
        x, ids, weights = hidden_states, top_k_index, top_k_weights
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        with loaded(self.gate_up, self.down):
            gate_up, down = self._weights()
            self._require(x, ids, weights, tensors_of(gate_up)[0].device)
            sizes = self.experts, self.hidden_features
            if is_traced() or (
                torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
            ):
                columns = [w.sparse_shape[1] for w in (gate_up, down) if isinstance(w, Spense)]
                parts = [[*tensors_of(w)] for w in (gate_up, down)]
                y: Tensor = sparse_experts(
                    x, ids, weights, *parts, *sizes, columns, self.activation
                )
                return y
            return _compute(x, ids, weights, gate_up, down, self.experts, self.activation)

    def _require(self, x: Tensor, ids: Tensor, weights: Tensor, device: torch.device) -> None:
        """Raise Unsupported unless these are inputs of the layer."""
        h, gate_up = self.in_features, self.gate_up
        dtype = gate_up.dtype if isinstance(gate_up, SpenseLinear) else gate_up.values.dtype
        if x.dim() != 2 or x.shape[1] != h or x.dtype != dtype:
            actual = f"{list(x.shape)} in {x.dtype}"
            raise Unsupported(f"hidden_states: expected [m, {h}] in {dtype}, found {actual}")
        m, integers = x.shape[0], (torch.int64, torch.int32)  # len(x) would be a constant if traced
        if ids.dim() != 2 or ids.shape[0] != m or ids.dtype not in integers:
            actual = f"{list(ids.shape)} in {ids.dtype}"
            raise Unsupported(f"top_k_index: expected integers [{m}, k], found {actual}")
        if weights.shape != ids.shape or not weights.is_floating_point():
            expected = f"expected floats {list(ids.shape)}"
            actual = f"{list(weights.shape)} in {weights.dtype}"
            raise Unsupported(f"top_k_weights: {expected}, found {actual}")
        if devices := {str(t.device) for t in (x, ids, weights)} - {str(device)}:
            raise Unsupported(f"expected inputs on {device}, found {', '.join(sorted(devices))}")

    def freeze(self) -> Self:
        """Return the layer, whose weights are always frozen, as BlockSparseLinear.freeze does."""
        return self

    def plan(self, tokens: Iterable[int], *, search: bool = True) -> Self:
        """Plan these numbers of tokens now instead of at a first call (PackedLinear.plan).

        The experts of the tokens take turns, so that all have about as many.
        """
        plan_each(tokens, self._run, search=search)
        return self

    def _run(self, m: int) -> None:
        """Call the layer with m tokens of zeros."""
        first = tensors_of(self._weights()[0])[0]
        dtype = self.down.dtype if isinstance(self.down, SpenseLinear) else first.dtype
        turns = torch.arange(m * self.top_k, device=first.device) % self.experts
        ids = turns.view(m, self.top_k)
        self(
            first.new_zeros(m, self.in_features, dtype=dtype),
            ids,
            torch.ones_like(ids, dtype=dtype),
        )

    def extra_repr(self) -> str:
        """Return the numbers of experts, and the activation."""
        return f"experts={self.experts}, top_k={self.top_k}, activation={self.activation}"


def _stack(name: str, weights: list[Tensor], dense_fraction: float) -> Spense:
    """Pack the weights [n, k] of experts one below the other. Raises FormatError."""
    parts = [
        pack_weight(f"{name} of expert {number}", w, dense_fraction, "columns")
        for number, w in enumerate(weights)
    ]
    (n, k), count = parts[0].shape, len(parts)
    tiles = (torch.cat([getattr(part, side) for part in parts]) for side in ("sparse", "dense"))
    layout = parts[0].dtype, (count * n, parts[0].sparse_shape[1])
    return Spense((count * n, k), *layout, *tiles)


# ---- the operator ----


def _compute(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    experts: int,
    activation: str,
) -> Tensor:
    """Return the sums [m, h]. Raises Unsupported."""
    if not ids.numel():
        return x.new_zeros(x.shape)
    with device_guard(x.device):
        source, place, ends = route(aligned(ids), experts)
        rows = x.index_select(0, source)
        if isinstance(gate_up, Spense):
            h = multiply(gate_up, experts, rows, ends, activation)
        else:
            h = hidden(multiply(gate_up, experts, rows, ends), activation)
        return combine(multiply(down, experts, h, ends), place, aligned(weights))


def _eager(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: list[Tensor],
    down: list[Tensor],
    experts: int,
    units: int,
    columns: list[int],
    activation: str,
) -> Tensor:
    """Return the sums [m, h] of tokens X [m, h].

    gate_up, down  tensors of the weights (`tensors_of`)
    units          hidden units of an expert
    columns        sparse columns of both weights in 2:4; none for blocks
    """
    h = x.shape[1]
    of_gate_up, of_down = columns or (None, None)
    both = (
        weight_of(gate_up, (experts * 2 * units, h), x.dtype, of_gate_up),
        weight_of(down, (experts * h, units), x.dtype, of_down),
    )
    return _compute(x, ids, weights, *both, experts, activation)


def _no_gradient(*_: Any) -> NoReturn:
    raise Unsupported("SparseExperts: expected no gradient, found a backward pass")


sparse_experts = torch_operator(
    "sparse_experts",
    _eager,
    lambda x, *_: x.new_empty(x.shape),
    save=lambda *_, **__: None,
    backward=_no_gradient,
)
