"""The experts of a mixture with sparse weights, to run a pruned model, or to train one.

    hidden_states [m, h], top_k_index [m, k], top_k_weights [m, k]
      route       rows sorted by expert                         _common/routing.py
      gate_up     G | U = rows @ W_e.T      [experts 2 i, h]    one matrix for all experts
      act         H = act(G) * U                                _experts_gate.py
      down        rows of Y = H @ W_e.T     [experts h, i]
      combine     the sum of a token's rows, times its weights

    2:4       SpenseLinear, split by columns or not at all. 8 rows of an expert's gate and 8 of its
              up alternate (spense_ffn.py), and the launch of gate_up writes H. Frozen
    blocks    BlockSparseLinear. Gate is above up in each expert, and gate_up writes H too. i and h
              are padded with zeros to multiples of a block, as 2,880 to 2,944 for blocks of 128
    both      clamped_swiglu, a bias of gate_up, and the backward pass have a launch of act

    GPU of compute capability 9.0    both, in fp16 and bf16
    8.0 and newer                    blocks
    other GPUs, and the rest         Unsupported; `to_dense` returns weights that run there
    CPU                              torch, expert by expert, as a reference

X and the weights of the router have gradients, so that adapters elsewhere in a model train, and so
have blocks (_experts_op.py). For dX, backward writes 2:4 weights out as dense matrices; on a GPU
this takes bf16. Biases are frozen. An adapter on gate_up or down raises Unsupported at the first
call, because no kernel would read it.

The interface is that of the experts in transformers' models. An index below 0 or from `experts` on
names an expert of another device: it adds nothing. A token may name an expert twice. No launch
waits for the host, so a CUDA graph replays with other routings.
"""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require, require_whole
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.spense import ROWS, Spense
from sparsebench.kernels._common.transforms import is_traced
from sparsebench.kernels.bsr import experts_triton
from sparsebench.kernels.nn._experts_engines import Weight, expert_of
from sparsebench.kernels.nn._experts_gate import GATES
from sparsebench.kernels.nn._experts_op import compute, sparse_experts
from sparsebench.kernels.nn._packed import frozen, loaded, plan_each
from sparsebench.kernels.nn._spense_weights import pack_weight
from sparsebench.kernels.nn.block_sparse_mlp import layer_of
from sparsebench.kernels.nn.linear import BlockSparseLinear
from sparsebench.kernels.nn.spense import SpenseLinear
from sparsebench.kernels.spense import experts_wgmma
from sparsebench.kernels.spense.spense_ffn import interleaved, parted

LAYERS = SpenseLinear, BlockSparseLinear


class SparseExperts(nn.Module):
    """Gated experts whose weights are 2:4 or in blocks.

    gate_up, down    SpenseLinear or BlockSparseLinear without bias, both of one kind, of
                     experts 2 i x h and experts h x i
    top_k            experts of a token for which `plan` plans; a call may have any number
    activation       silu, gelu_tanh, relu or clamped_swiglu (_experts_gate.py)
    in_features      h, if it is less than the layers have: then X is padded with zeros
    hidden_features  i, likewise
    bias             allocate zeros for a bias of each expert's gate and up, and of its down

    In 2:4, 2 i and h of the layers are multiples of 64. In blocks, they are multiples of a block's
    rows. Raises FormatError.
    """

    gate_up_bias: nn.Parameter | None  # [experts, 2 i], gate first
    down_bias: nn.Parameter | None  # [experts, h]

    def __init__(
        self,
        gate_up: SpenseLinear | BlockSparseLinear,
        down: SpenseLinear | BlockSparseLinear,
        *,
        experts: int,
        top_k: int,
        activation: str = "silu",
        in_features: int | None = None,
        hidden_features: int | None = None,
        bias: bool = False,
    ) -> None:
        """Take the layers."""
        super().__init__()
        valid = activation in GATES
        require(valid, f"activation: expected one of {', '.join(GATES)}; found {activation!r}")
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
        kernel = experts_wgmma if isinstance(gate_up, SpenseLinear) else experts_triton
        most = kernel.MOST_EXPERTS
        require(experts <= most, f"experts: expected at most {most}, found {experts}")
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
        self.gate_up, self.down = gate_up, down
        self.experts, self.top_k, self.activation = experts, top_k, activation
        self.in_features = h if in_features is None else in_features
        self.hidden_features = i if hidden_features is None else hidden_features
        for name, size, most in (("in", self.in_features, h), ("hidden", self.hidden_features, i)):
            fits = 0 < size <= most
            require(fits, f"{name}_features: expected 1 to {most}, found {size}")
        options: dict[str, Any] = {"dtype": dtypes[0], "device": gate_up.weight.device}
        for name, n in (("gate_up_bias", 2 * i), ("down_bias", h)):
            zeros = frozen(torch.zeros(experts, n, **options)) if bias else None
            self.register_parameter(name, zeros)

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
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> Self:
        """Pack pruned weights: gate_up [experts, 2 i, h], gate first, and down [experts, h, i].

        dense_fraction  of the columns of each matrix, the last ones, that are dense beside 2:4
        block           rows and columns of a block; None for 2:4
        biases          of gate_up [experts, 2 i] and of down [experts, h]

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
            require_whole("block", block)
            more = -h % block, -i % block
            both = _in_halves(gate_up, more[1], more[0]), pad(down, (0, more[1], 0, more[0]))
            of_rows = (w.flatten(0, 1).contiguous() for w in both)
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
        options: dict[str, Any] = {"experts": experts, "top_k": top_k, "activation": activation}
        options |= {"in_features": h, "hidden_features": i, "bias": biases is not None}
        module = cls(*layers, **options)
        if biases is not None:
            module._write_biases(*biases)
        return module

    @torch.no_grad()
    def _write_biases(self, gate_up: Tensor, down: Tensor) -> None:
        """Copy biases [experts, 2 i] and [experts, h]. Raises FormatError."""
        h, i = self.in_features, self.hidden_features
        for name, bias, n in (("gate_up", gate_up, 2 * i), ("down", down, h)):
            expected, actual = [self.experts, n], [*bias.shape]
            require(actual == expected, f"bias of {name}: expected {expected}, found {actual}")
        assert self.gate_up_bias is not None
        assert self.down_bias is not None
        more = self.down.in_features - i
        self.gate_up_bias.copy_(_in_halves(gate_up[..., None], more, 0)[..., 0])
        self.down_bias[:, :h] = down

    def to_dense(self) -> tuple[Tensor, Tensor]:
        """Return gate_up [experts, 2 i, h], gate first, and down [experts, h, i]."""
        h, i = self.in_features, self.hidden_features
        gate_up, down = (
            torch.stack([expert_of(w, number, self.experts) for number in range(self.experts)])
            for w in self._weights()
        )
        if isinstance(self.gate_up, SpenseLinear):
            gate_up = torch.stack([torch.cat(parted(w)) for w in gate_up])
        halves = (half[:, :i, :h] for half in gate_up.chunk(2, 1))
        return torch.cat([*halves], 1), down[:, :h, :i].contiguous()

    def biases(self) -> tuple[Tensor, Tensor] | None:
        """Return the biases of gate_up [experts, 2 i], gate first, and of down [experts, h]."""
        if self.gate_up_bias is None or self.down_bias is None:
            return None
        halves = (half[:, : self.hidden_features] for half in self.gate_up_bias.chunk(2, 1))
        return torch.cat([*halves], 1), self.down_bias[:, : self.in_features].contiguous()

    def _weights(self) -> list[Weight]:
        """Return gate_up and down. Raises Unsupported if an adapter wraps one."""
        return [
            layer.spense if isinstance(layer, SpenseLinear) else layer.bsr
            for layer in self._layers()
        ]

    def _layers(self) -> list[SpenseLinear | BlockSparseLinear]:
        """Return gate_up and down. Raises Unsupported if an adapter wraps one."""
        for name, layer in (("gate_up", self.gate_up), ("down", self.down)):
            if type(layer) not in LAYERS:
                actual = f"{type(layer).__module__}.{type(layer).__name__}"
                expected = f"{name}: expected no adapter in experts, found {actual}"
                raise Unsupported(f"{expected}: exclude_modules of peft leaves them out")
        return [self.gate_up, self.down]

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sums [m, h] of the experts that tokens [m, h] are routed to.

        top_k_index    int64 or int32 [m, k]
        top_k_weights  float [m, k]; NaN makes the token's sum NaN

        Without them, as in Llama-4, hidden_states are the rows [experts m, h] of all experts, one
        expert after the other, and those of a token are zero but at its experts. The result has the
        same rows, and no product is made for rows of zeros.

        Raises Unsupported.
        """
        x, ids, weights = hidden_states, top_k_index, top_k_weights
        if ids is None and weights is None:
            return self._of_all_rows(x)
        if ids is None or weights is None:
            absent = "top_k_index" if ids is None else "top_k_weights"
            raise Unsupported(f"{absent}: expected it beside the other one, found None")
        cast = torch.is_autocast_enabled(x.device.type)
        if cast:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        with loaded(self.gate_up, self.down):
            layers = self._layers()
            columns = [w.sparse_shape[1] for w in layers if isinstance(w, SpenseLinear)] or None
            biases = self.gate_up_bias, self.down_bias
            gate_up, down = (
                [*_read_of(layer, x.dtype if cast else None), *([] if bias is None else [bias])]
                for layer, bias in zip(layers, biases, strict=True)
            )
            self._require(x, ids, weights, gate_up[0])
            sizes = self.experts, self.down.in_features, self.gate_up.in_features
            operands = x, ids, weights, gate_up, down, *sizes, columns, self.activation
            needs = any(t.requires_grad for t in (x, weights, *gate_up, *down))
            if is_traced() or (torch.is_grad_enabled() and needs):
                y: Tensor = sparse_experts(*operands)
                return y
            return compute(*operands)

    def _of_all_rows(self, x: Tensor) -> Tensor:
        """Return what each expert computes of its rows of X [experts m, h]."""
        if x.dim() != 2 or x.shape[0] % self.experts:
            expected = f"expected rows of {self.experts} experts"
            raise Unsupported(f"hidden_states: {expected}, found {[*x.shape]}")
        m = x.shape[0] // self.experts
        there = x.detach().reshape(self.experts, m, x.shape[1]).any(-1)
        numbers = torch.arange(self.experts, device=x.device)[:, None]
        ids = numbers.where(there, self.experts).view(-1, 1)  # zeros go to no expert
        y: Tensor = self(x, ids, x.new_ones(ids.shape))
        return y

    def _require(self, x: Tensor, ids: Tensor, weights: Tensor, first: Tensor) -> None:
        """Raise Unsupported unless these are inputs of the layer, whose first tensor is `first`."""
        h, layer = self.in_features, self.gate_up
        dtype = layer.dtype if isinstance(layer, SpenseLinear) else first.dtype
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
        if devices := {str(t.device) for t in (x, ids, weights)} - {str(first.device)}:
            actual = ", ".join(sorted(devices))
            raise Unsupported(f"expected inputs on {first.device}, found {actual}")

    def freeze(self) -> Self:
        """Stop training the blocks (BlockSparseLinear.freeze); 2:4 weights are always frozen."""
        for layer in self._layers():
            layer.freeze()
        return self

    def plan(self, tokens: Iterable[int], *, search: bool = True) -> Self:
        """Plan these numbers of tokens now instead of at a first call (PackedLinear.plan).

        The experts of the tokens take turns, so that all have about as many.
        """
        plan_each(tokens, self._run, search=search)
        return self

    def _run(self, m: int) -> None:
        """Call the layer with m tokens of zeros."""
        like = self.gate_up.weight
        turns = torch.arange(m * self.top_k, device=like.device) % self.experts
        options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        ids = turns.view(m, self.top_k)
        self(torch.zeros(m, self.in_features, **options), ids, torch.ones(ids.shape, **options))

    def extra_repr(self) -> str:
        """Return the numbers of experts, the activation, and the padding."""
        padded = self.gate_up.in_features, self.down.in_features
        sizes = self.in_features, self.hidden_features
        about = f"experts={self.experts}, top_k={self.top_k}, activation={self.activation}"
        return about if padded == sizes else f"{about}, features={sizes} of {padded}"


def _in_halves(w: Tensor, rows: int, columns: int) -> Tensor:
    """Return gate above up [experts, 2 i, h] with more rows of zeros in each, and columns."""
    return torch.cat([pad(half, (0, columns, 0, rows)) for half in w.chunk(2, 1)], 1)


def _read_of(layer: SpenseLinear | BlockSparseLinear, dtype: torch.dtype | None) -> list[Tensor]:
    """Return what products read of a weight (`tensors_of`), its blocks in `dtype` if it is set."""
    if isinstance(layer, SpenseLinear):
        return [layer.sparse, layer.dense]
    values = layer.values if dtype is None else layer.values.to(dtype)
    return [values, layer.columns, layer.offsets]


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
