"""Find the experts of a mixture that share tensors, check what they compute, and prune them.

    Mixtral, Qwen2- and Qwen3-MoE,     gate_up_proj [experts, 2 i, h]    gate above up
    OLMoE, DeepSeek and many others    down_proj [experts, h, i]
    gpt-oss                            [experts, h, 2 i], gate and up in turn, and [experts, i, h];
                                       gate_up_proj_bias and down_proj_bias
    Llama-4                            [experts, h, 2 i], gate before up, and [experts, i, h]

Attributes of a module of transformers describe its layout. Those of Llama-4 have none. Their
module takes the rows of all experts instead of a routing, which SparseExperts does as well. Every
module is run on two tokens, and it is refused if it computes anything but gated experts. Each
expert is pruned as if its three weights were layers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from sparsebench.errors import FormatError
from sparsebench.formats._format import require, sides_of
from sparsebench.formats.spense import sparse_shape_of
from sparsebench.harness.models.pruning.gated import activation_of, require_sound
from sparsebench.harness.models.pruning.methods import PruningPattern, keep
from sparsebench.kernels._common.experts_gate import ALPHA, CLAMPED, LIMIT
from sparsebench.kernels.nn import BlockSparseLinear, SparseExperts, SpenseLinear
from sparsebench.kernels.nn._bsr_pattern import grid_of
from sparsebench.kernels.nn._experts_gate import GATES, gated_of

BIASES = "gate_up_proj_bias", "down_proj_bias"


@dataclass(frozen=True)
class Experts:
    """The experts of a module, as it stores them.

    transposed   the last axis of a weight is that of its outputs
    interleaved  rows of gate and of up alternate
    has_bias     the module has BIASES
    is_routed    the module takes tokens and the experts of each, not the rows of all experts
    """

    module: Any
    transposed: bool
    interleaved: bool
    has_bias: bool
    is_routed: bool

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """Return the experts of a module, or None if it has none in one of these layouts."""
        weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
        if not all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in weights):
            return None
        about: Any = module
        is_routed = hasattr(module, "is_transposed")
        if not is_routed and len(signature(module.forward).parameters) != 1:
            return None
        gated = getattr(module, "has_gate", True)
        if not gated or getattr(module, "has_post_expert_norm", False):
            return None
        experts = cls(
            module,
            transposed=about.is_transposed if is_routed else True,
            interleaved=is_routed and not about.is_concatenated,
            has_bias=is_routed and about.has_bias,
            is_routed=is_routed,
        )
        count, h, i = experts.sizes
        rows = (h, 2 * i) if experts.transposed else (2 * i, h)
        return experts if module.gate_up_proj.shape == (count, *rows) else None

    @property
    def sizes(self) -> list[int]:
        """Return the number of experts, and the features h and hidden units i of each."""
        count, h, i = self.module.down_proj.shape
        return [count, i, h] if self.transposed else [count, h, i]

    @property
    def top_k(self) -> int:
        """Return how many rows of experts a token has: as many as it takes, or one for each."""
        if not self.is_routed:
            return self.sizes[0]
        top_k: int = getattr(getattr(self.module, "config", None), "num_experts_per_tok", 1)
        return top_k

    @property
    def activation(self) -> str | None:
        """Return the name of the activation (_experts_gate.py); None if it is unknown."""
        numbers = [getattr(self.module, name, None) for name in ("alpha", "limit")]
        if numbers != [None, None]:
            return CLAMPED if numbers == [ALPHA, LIMIT] else None
        act = getattr(self.module, "act_fn", None)
        return activation_of(act, self.module.down_proj.device) if callable(act) else None

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        """Return the biases [experts, 2 i], gate first, and [experts, h]; None without."""
        if not self.has_bias:
            return None
        of_gate_up, of_down = (getattr(self.module, name).detach() for name in BIASES)
        return self._parted(of_gate_up.T).T.contiguous(), of_down

    def weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield gate_up [2 i, h], gate first, and down [h, i] of each expert."""
        yield from (self.of_expert(number) for number in range(self.sizes[0]))

    def of_expert(self, number: int) -> tuple[Tensor, Tensor]:
        """Return gate_up [2 i, h], gate first, and down [h, i] of an expert."""
        both = self.module.gate_up_proj, self.module.down_proj
        gate_up, down = (
            w.detach()[number].T if self.transposed else w.detach()[number] for w in both
        )
        return self._parted(gate_up), down

    def _parted(self, rows: Tensor) -> Tensor:
        return torch.cat((rows[::2], rows[1::2])) if self.interleaved else rows

    @torch.no_grad()
    def write(self, gate_up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor] | None) -> None:
        """Store weights [experts, 2 i, h], gate first, and [experts, h, i], and biases."""
        self._store("gate_up_proj", self._joined(gate_up))
        self._store("down_proj", down)
        if biases is not None:
            of_gate_up, of_down = biases
            self.module.gate_up_proj_bias.copy_(self._joined(of_gate_up))
            self.module.down_proj_bias.copy_(of_down)

    def _joined(self, rows: Tensor) -> Tensor:
        """Return rows [experts, 2 i, ...] of gate and up in the order of the module."""
        return torch.stack(rows.chunk(2, 1), 2).flatten(1, 2) if self.interleaved else rows

    def _store(self, name: str, weight: Tensor) -> None:
        getattr(self.module, name).copy_(weight.transpose(1, 2) if self.transposed else weight)

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return what the module computes of token x[j] by expert ids[j]."""
        if self.is_routed:
            y: Tensor = self.module(x, ids[:, None], torch.ones_like(x[:, :1]))
            return y
        experts, tokens = self.sizes[0], torch.arange(len(x), device=x.device)
        rows = x.new_zeros(experts, *x.shape).index_put((ids, tokens), x)
        y = self.module(rows.flatten(0, 1)).view(rows.shape)
        return y[ids, tokens]

    def packed(self, prune: Callable[[Tensor, int], Tensor], **options: Any) -> SparseExperts:
        """Return sparse experts, each weight of which is pruned.

        prune    (weight [n, k], 2 for gate above up, else 1) -> the pruned weight
        options  of SparseExperts.from_dense
        """
        pairs = [(prune(gate_up, 2), prune(down, 1)) for gate_up, down in self.weights()]
        gate_up, down = (torch.stack(weights) for weights in zip(*pairs, strict=True))
        about: dict[str, Any] = {"activation": str(self.activation), "biases": self.biases}
        return SparseExperts.from_dense(gate_up, down, top_k=self.top_k, **about, **options)


def experts_of(module: nn.Module) -> Experts:
    """Return the experts of a module that has some."""
    experts = Experts.of(module)
    assert experts is not None
    return experts


def require_experts(module: nn.Module) -> Experts:
    """Return the experts of a module.

    Raises FormatError unless it computes gated experts of finite weights, in a way that
    SparseExperts does too.
    """
    experts = experts_of(module)
    require_sound(module, *module.parameters(recurse=False))
    parallel = getattr(module, "_is_expert_parallel", False)
    require(not parallel, "expected all experts on one device, found expert parallelism")
    activation = experts.activation
    actual = activation or type(getattr(module, "act_fn", module)).__name__
    require(activation in GATES, f"expected an activation {' or '.join(GATES)}, found {actual}")
    assert activation is not None
    count, h, _ = experts.sizes
    draw = torch.Generator("cpu").manual_seed(0)
    like = experts.module.down_proj
    x = torch.randn(2, h, generator=draw, device="cpu").to(like)
    ids = torch.tensor([0, count - 1], device=x.device)
    expected = torch.stack([_row(experts, activation, *pair) for pair in zip(x, ids, strict=True)])
    kind = type(module).__name__
    try:
        with torch.no_grad():
            y = experts(x, ids).float()
    except RuntimeError as failure:  # such as a grouped product in torch with rows of 120 bytes
        reason = str(failure).splitlines()[0]
        raise FormatError(f"expected {kind} to run on two tokens, found: {reason}") from failure
    error = float((y - expected).norm() / expected.norm().clamp_min(1e-30))
    message = f"expected {kind} to compute gated experts, found a relative error of {error:.2g}"
    require(error <= max(4 * torch.finfo(x.dtype).eps, 1e-5), message)
    return experts


def _row(experts: Experts, activation: str, x: Tensor, number: Tensor) -> Tensor:
    """Return what an expert should compute of a token [h], in 32 bits."""
    gate_up, down = (w.float() for w in experts.of_expert(int(number)))
    biases = experts.biases
    of_gate_up, of_down = (None, None) if biases is None else (b[number].float() for b in biases)
    gated = gated_of(linear(x.float()[None], gate_up, of_gate_up), activation, in_turn=False)
    return linear(gated.hidden(), down, of_down)[0]


def require_two_four(module: nn.Module, dense: float) -> None:
    """Raise FormatError unless experts can be 2:4 beside this fraction of dense columns."""
    experts = require_experts(module)
    count, h, i = experts.sizes
    options: dict[str, Any] = {"bias": False, "device": "meta", "dtype": module.down_proj.dtype}
    options |= {"dense_fraction": dense, "split": "columns"}
    layers = SpenseLinear(h, count * 2 * i, **options), SpenseLinear(i, count * h, **options)
    SparseExperts(*layers, experts=count, top_k=experts.top_k)
    sparse = min(layer.sparse_shape[1] for layer in layers)
    require(sparse > 0, f"expected at least one sparse tile of 128, found none at dense {dense:g}")


def in_two_four(module: nn.Module, dense: float) -> SparseExperts:
    """Return experts with the 2 largest of every 4 weights; the last columns are dense."""

    def prune(w: Tensor, parts: int) -> Tensor:
        _, columns = sparse_shape_of(w.shape[0], w.shape[1], w.itemsize, dense, "columns")
        return keep(w, w.abs(), columns)

    return experts_of(module).packed(prune, dense_fraction=dense)


def require_blocks(module: nn.Module, block: int | tuple[int, int], sparsity: float) -> None:
    """Raise FormatError unless experts can keep blocks at this sparsity."""
    experts = require_experts(module)
    r, c = sides_of(block)
    require(r == c > 1, f"block: expected square blocks for experts, found {r}x{c}")
    count, h, i = experts.sizes
    h, i = h + -h % r, i + -i % r
    layers = []
    for k, n in ((h, count * 2 * i), (i, count * h)):
        pattern = torch.ones(grid_of((n, k), (r, c)), dtype=torch.bool, device="cpu")
        options: dict[str, Any] = {"bias": False, "device": "meta", "dtype": module.down_proj.dtype}
        layers.append(BlockSparseLinear(k, n, block=(r, c), pattern=pattern, **options))
    SparseExperts(*layers, experts=count, top_k=experts.top_k)
    blocks = h // r * (i // r)
    message = f"expected a block to remain at sparsity {sparsity:g}, found {blocks} in a weight"
    require(blocks - round(sparsity * blocks) > 0, message)


def in_blocks(module: nn.Module, block: int | tuple[int, int], sparsity: float) -> SparseExperts:
    """Return experts with the blocks of largest norm of gate, of up and of down of each.

    Blocks at the edges may extend beyond a weight, and count its elements alone.
    """
    side, _ = sides_of(block)
    pattern = PruningPattern(f"{side}x{side}", sparsity, block=side)

    def prune(w: Tensor, parts: int) -> Tensor:
        return torch.cat([_in_blocks(part, pattern) for part in w.chunk(parts)])

    experts = experts_of(module)
    layer = experts.packed(prune, block=side)
    for part in (layer.gate_up, layer.down):
        part.requires_grad_(experts.module.down_proj.requires_grad)
    return layer


def _in_blocks(w: Tensor, pattern: PruningPattern) -> Tensor:
    (n, k), side = w.shape, pattern.block
    padded = pad(w, (0, -k % side, 0, -n % side))
    return keep(padded, padded.abs().float(), padded.shape[1], pattern)[:n, :k]


def in_dense(layer: SparseExperts, module: nn.Module) -> nn.Module:
    """Write the weights of sparse experts into a dense module on the meta device; return it."""
    gate_up, down = layer.to_dense()
    module = module.to(gate_up.dtype).to_empty(device=gate_up.device)
    experts_of(module).write(gate_up, down, layer.biases())
    return module
