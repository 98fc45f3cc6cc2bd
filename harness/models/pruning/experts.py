"""Find the experts of a mixture that share tensors, check what they compute, and prune them.

    gate_up_proj [experts, 2 i, h], gate above up     down_proj [experts, h, i]     act_fn

Transformers stores the experts of Mixtral, Qwen2- and Qwen3-MoE, OLMoE, DeepSeek and many others in
this layout, and attributes of the module say so. Experts with biases or transposed weights, such as
those of gpt-oss and Llama-4, stay dense. A module with this layout is run on two tokens, and it is
refused if it computes anything else. Each expert is pruned as if its three weights were layers.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sparsebench.formats._format import require, sides_of
from sparsebench.formats.spense import sparse_shape_of
from sparsebench.harness.models.pruning.gated import (
    ACTIVATIONS,
    Activation,
    activation_of,
    require_sound,
)
from sparsebench.harness.models.pruning.methods import PruningPattern, keep
from sparsebench.kernels.nn import BlockSparseLinear, SparseExperts, SpenseLinear
from sparsebench.kernels.nn._bsr_pattern import grid_of

NAMES = "silu", "gelu_tanh", "relu"
LAYOUT = {"is_concatenated": True, "is_transposed": False, "has_gate": True, "has_bias": False}


@dataclass(frozen=True)
class Experts:
    """The weights of experts, their activation, and how many of them a token takes."""

    gate_up: nn.Parameter
    down: nn.Parameter
    act: Activation
    top_k: int

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """Return the weights of a module, or None if it has no experts in this layout."""
        weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
        act = getattr(module, "act_fn", None)
        plain = all(getattr(module, name, None) is value for name, value in LAYOUT.items())
        if not plain or getattr(module, "has_post_expert_norm", False) or not callable(act):
            return None
        gate_up, down = weights
        if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter):
            return None
        if gate_up.dim() != 3 or down.dim() != 3:
            return None
        experts, h, i = down.shape
        top_k = getattr(getattr(module, "config", None), "num_experts_per_tok", 1)
        return cls(gate_up, down, act, top_k) if gate_up.shape == (experts, 2 * i, h) else None

    @property
    def sizes(self) -> list[int]:
        """Return input and output features of gate and up of all experts, and of down."""
        (experts, h, i) = self.down.shape
        return [h, experts * 2 * i, i, experts * h]

    @property
    def options(self) -> dict[str, Any]:
        """Return what SparseExperts takes beside the weights."""
        return {"top_k": self.top_k, "activation": str(activation_of(self.act, self.down.device))}

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return what expert ids[j] computes of token x[j]."""
        gate_up, down = self.gate_up[ids], self.down[ids]
        gate, up = (gate_up @ x[:, :, None]).chunk(2, 1)
        return (down @ (self.act(gate) * up))[..., 0]


def experts_of(module: nn.Module) -> Experts:
    """Return the experts of a module that has some."""
    experts = Experts.of(module)
    assert experts is not None
    return experts


def require_experts(module: nn.Module) -> tuple[Experts, str]:
    """Return the weights, and the name of the activation, one of SparseExperts'.

    Raises FormatError unless the module computes gated experts of finite weights.
    """
    experts = experts_of(module)
    require_sound(module, experts.gate_up, experts.down)
    parallel = getattr(module, "_is_expert_parallel", False)
    require(not parallel, "expected all experts on one device, found expert parallelism")
    activation = activation_of(experts.act, experts.down.device)
    actual = activation or type(experts.act).__name__
    require(actual in NAMES, f"expected an activation {' or '.join(NAMES)}, found {actual}")
    draw = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, experts.down.shape[1], generator=draw, device="cpu").to(experts.down)
    ids = torch.tensor([0, len(experts.down) - 1], device=x.device)
    with torch.no_grad():
        expected = experts(x, ids).float()
        y = module(x, ids[:, None], torch.ones_like(x[:, :1])).float()
    error = float((y - expected).norm() / expected.norm().clamp_min(1e-30))
    kind = type(module).__name__
    message = f"expected {kind} to compute gated experts, found a relative error of {error:.2g}"
    require(error <= max(4 * torch.finfo(x.dtype).eps, 1e-5), message)
    return experts, actual


def require_two_four(module: nn.Module, dense: float) -> None:
    """Raise FormatError unless experts can be 2:4 beside this fraction of dense columns."""
    experts, activation = require_experts(module)
    h, rows, i, of_down = experts.sizes
    options: dict[str, Any] = {"bias": False, "device": "meta", "dtype": experts.down.dtype}
    options |= {"dense_fraction": dense, "split": "columns"}
    layers = SpenseLinear(h, rows, **options), SpenseLinear(i, of_down, **options)
    SparseExperts(*layers, experts=len(experts.down), top_k=experts.top_k, activation=activation)
    sparse = min(layer.sparse_shape[1] for layer in layers)
    require(sparse > 0, f"expected at least one sparse tile of 128, found none at dense {dense:g}")


def in_two_four(module: nn.Module, dense: float) -> SparseExperts:
    """Return experts with the 2 largest of every 4 weights; the last columns are dense."""
    experts = experts_of(module)
    weights = []
    for w in (experts.gate_up.detach(), experts.down.detach()):
        _, columns = sparse_shape_of(w.shape[1], w.shape[2], w.itemsize, dense, "columns")
        weights.append(torch.stack([keep(each, each.abs(), columns) for each in w]))
    return SparseExperts.from_dense(*weights, dense_fraction=dense, **experts.options)


def require_blocks(module: nn.Module, block: int | tuple[int, int], sparsity: float) -> None:
    """Raise FormatError unless experts can keep blocks at this sparsity."""
    experts, activation = require_experts(module)
    r, c = sides_of(block)
    require(r == c > 1, f"block: expected square blocks for experts, found {r}x{c}")
    h, rows, i, of_down = experts.sizes
    layers = []
    for k, n in ((h, rows), (i, of_down)):
        pattern = torch.ones(grid_of((n, k), (r, c)), dtype=torch.bool, device="cpu")
        options: dict[str, Any] = {"bias": False, "device": "meta", "dtype": experts.down.dtype}
        layers.append(BlockSparseLinear(k, n, block=(r, c), pattern=pattern, **options))
    SparseExperts(*layers, experts=len(experts.down), top_k=experts.top_k, activation=activation)
    blocks = h // r * (i // r)
    message = f"expected a block to remain at sparsity {sparsity:g}, found {blocks} in a weight"
    require(blocks - round(sparsity * blocks) > 0, message)


def in_blocks(module: nn.Module, block: int | tuple[int, int], sparsity: float) -> SparseExperts:
    """Return experts with the blocks of largest norm of gate, of up and of down of each."""
    experts, (side, _) = experts_of(module), sides_of(block)
    pattern = PruningPattern(f"{side}x{side}", sparsity, block=side)
    weights = []
    for w, parts in ((experts.gate_up.detach(), 2), (experts.down.detach(), 1)):
        matrices = w.unflatten(1, (parts, -1)).flatten(0, 1)
        sparse = [keep(each, each.abs().float(), each.shape[1], pattern) for each in matrices]
        weights.append(torch.stack(sparse).view(w.shape))
    return SparseExperts.from_dense(*weights, block=side, **experts.options)


class DenseExperts(nn.Module):
    """Dense experts with the names of transformers, made from sparse ones."""

    def __init__(self, layer: SparseExperts):
        super().__init__()
        gate_up, down = layer.to_dense()
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)
        self.activation = layer.activation

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        act, y = ACTIVATIONS[self.activation], torch.zeros_like(x)
        for number in ids.unique().tolist():
            if 0 <= number < len(self.down_proj):
                tokens, choices = (ids == number).nonzero(as_tuple=True)
                gate, up = linear(x[tokens], self.gate_up_proj[number]).chunk(2, -1)
                part = linear(act(gate) * up, self.down_proj[number])
                y.index_add_(0, tokens, (part * weights[tokens, choices, None]).to(y.dtype))
        return y
