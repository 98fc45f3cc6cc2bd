"""The layers that users get, by name, and the dense function of each."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from sparsebench.harness.models.pruning.layer import GatedMLP
from sparsebench.kernels.nn.block_sparse_mlp import hidden
from sparsebench.nn import (
    BitmapLinear,
    BlockSparseGatedMLP,
    BlockSparseLinear,
    SparseGatedMLP,
    SpenseGatedMLP,
    SpenseLinear,
)

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
K, N, SLOTS = 64, 128, 16


class Kind(NamedTuple):
    """How to make a layer of K features, and hidden or output features N.

    empty   (**options) -> one that a state dict fills; `options` has a device, if any
    drawn   () -> one with weights
    dtype   of X
    stored  the names of its state dict
    """

    empty: Callable[..., Any]
    drawn: Callable[[], Any]
    dtype: torch.dtype
    stored: str

    def x(self, *tokens: int) -> Tensor:
        return torch.randn(*(tokens or (5,)), K).to(self.dtype)


def two_four(n: int, k: int, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(n, k) * torch.tensor([1, 0, 0, 1]).repeat(k // 4)).to(dtype)


def blocks(**options: Any) -> BlockSparseLinear:
    return BlockSparseLinear(K, N, block=16, sparsity=0.5, **options)


def mlp_in_blocks(h: int = N, k: int = K, **options: Any) -> BlockSparseGatedMLP:
    options |= {"block": 16, "sparsity": 0.5, "bias": False}
    return BlockSparseGatedMLP(
        BlockSparseLinear(k, 2 * h, **options), BlockSparseLinear(h, k, **options)
    )


def mlp_in_two_four(h: int = N, k: int = K, **options: Any) -> SpenseGatedMLP:
    weights = two_four(h, k), two_four(h, k), two_four(k, h)
    return SpenseGatedMLP.from_dense(*weights, dense=0, **options)


def few_active(**options: Any) -> SparseGatedMLP:
    return SparseGatedMLP(K, N, slots=SLOTS, **options)


def bitmap(dtype: torch.dtype) -> Kind:
    def drawn() -> BitmapLinear:
        return BitmapLinear.from_dense(two_four(N, K, dtype), torch.ones(N))

    empty = partial(BitmapLinear, K, N, stored=len(drawn().records), dtype=dtype)
    return Kind(empty, drawn, dtype, "bias records offsets _extra_state")


def in_two_four(**options: Any) -> SpenseLinear:
    return SpenseLinear.from_dense(two_four(N, K), bias=torch.ones(N), **options)


def of_mlp(stored: str) -> str:
    return " ".join(f"{part}.{name}" for part in ("gate_up", "down") for name in stored.split())


TILES, IN_FP8 = "sparse dense _extra_state", "sparse dense scale _extra_state"
WEIGHTS = "gate.weight up.weight down.weight_t"
OF_2_4, OF_MLP = partial(SpenseLinear, K, N), partial(SpenseGatedMLP, K, N, dense=0)
MLP_IN_FP8 = partial(mlp_in_two_four, dtype=FP8, largest=9.0)
KINDS = {
    "BlockSparseLinear": Kind(blocks, blocks, FP32, "values bias offsets columns"),
    "SparseGatedMLP": Kind(few_active, few_active, FP32, WEIGHTS),
    "BlockSparseGatedMLP": Kind(
        mlp_in_blocks, mlp_in_blocks, FP32, of_mlp("values offsets columns")
    ),
    "SpenseLinear": Kind(OF_2_4, in_two_four, BF16, f"bias {TILES}"),
    "SpenseLinear fp8": Kind(
        partial(OF_2_4, dtype=FP8), partial(in_two_four, dtype=FP8), BF16, f"bias {IN_FP8}"
    ),
    "SpenseGatedMLP": Kind(OF_MLP, mlp_in_two_four, BF16, of_mlp(TILES)),
    "SpenseGatedMLP fp8": Kind(partial(OF_MLP, dtype=FP8), MLP_IN_FP8, BF16, of_mlp(IN_FP8)),
    "BitmapLinear": bitmap(BF16),
    "BitmapLinear fp32": bitmap(FP32),
}
TRAINED = "BlockSparseLinear", "SparseGatedMLP", "BlockSparseGatedMLP"


def dense_of(layer: Any) -> Callable[[Tensor], Tensor]:
    """Return what a layer computes, by dense products."""
    if isinstance(layer, SpenseGatedMLP):
        return GatedMLP(*layer.to_dense(), layer.activation)
    if isinstance(layer, BlockSparseGatedMLP):
        gate_up, down = layer.gate_up.to_dense(), layer.down.to_dense()
        return lambda x: down(hidden(gate_up(x), layer.activation))
    if isinstance(layer, SparseGatedMLP):
        return lambda x: layer.down(relu(layer.gate(x)) * layer.up(x))
    dense: nn.Linear = layer.to_dense()
    if isinstance(layer, BlockSparseLinear) or dense.bias is None:
        return dense
    return lambda x: linear(x, dense.weight) + dense.bias  # added to the rounded product
