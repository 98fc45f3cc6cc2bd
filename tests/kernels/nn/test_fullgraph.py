"""Every layer, and every recipe on a model, under torch.compile(fullgraph=True)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import Unsupported
from sparsebench.kernels.nn import (
    BitmapLinear,
    BlockSparseLinear,
    SparseGatedMLP,
    SpenseGatedMLP,
    SpenseLinear,
)
from sparsebench.nn import BlockSparse, SparseActivations, TwoFour, Unstructured, sparsify_
from tests.harness.tiny_models import tiny

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
K, N = 64, 128


def two_four(n: int, k: int) -> Tensor:
    return (torch.randn(n, k) * torch.tensor([1, 0, 0, 1]).repeat(k // 4)).to(BF16)


def mlp(**options: Any) -> SpenseGatedMLP:
    weights = two_four(N, K), two_four(N, K), two_four(K, N)
    return SpenseGatedMLP.from_dense(*weights, dense=0, **options)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "BlockSparseLinear": lambda: BlockSparseLinear(K, N, block=16, sparsity=0.5),
    "SparseGatedMLP": lambda: SparseGatedMLP(K, N, slots=16),
    "SpenseLinear": lambda: SpenseLinear.from_dense(two_four(N, K), bias=torch.ones(N)),
    "SpenseLinear fp8": lambda: SpenseLinear.from_dense(two_four(N, K), dtype=FP8),
    "SpenseGatedMLP": mlp,
    "SpenseGatedMLP fp8": lambda: mlp(dtype=FP8, largest=9.0),
    "BitmapLinear": lambda: BitmapLinear.from_dense(two_four(N, K), torch.ones(N)),
    "BitmapLinear fp32": lambda: BitmapLinear.from_dense(two_four(N, K).float()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_compiles_whole(name: str) -> None:
    layer = LAYERS[name]()
    in_fp32 = "fp32" in name or any(p.dtype == torch.float32 for p in layer.parameters())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (2, 3):  # the second is compiled for any number
        x = torch.randn(tokens, 3, K, dtype=torch.float32 if in_fp32 else BF16)
        x.requires_grad_("fp8" not in name)
        results = []
        for run in (layer, compiled):
            y = run(x)
            results.append([y.detach()])
            if x.requires_grad:
                results[-1] += torch.autograd.grad(y.float().square().sum(), x)
        torch.testing.assert_close(results[1], results[0])


RECIPES: list[tuple[Any, dict[str, Any]]] = [
    (BlockSparse(16, 0.5), {}),
    (TwoFour(), {"dtype": BF16}),
    (Unstructured(), {"dtype": BF16}),
    (SparseActivations(), {"hidden_act": "relu"}),
]


@pytest.mark.parametrize(("recipe", "fields"), RECIPES, ids=str)
def test_a_recipe_compiles_whole(recipe: Any, fields: dict[str, Any]) -> None:
    block = sparsify_(tiny(num_hidden_layers=1, **fields), recipe).model.layers[0]
    x = torch.randn(1, 8, 64, dtype=fields.get("dtype", torch.float32))
    angles = torch.randn(1, 8, 16, dtype=x.dtype)
    positions = angles.cos(), angles.sin()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = block(x, position_embeddings=positions)
        torch.testing.assert_close(compiled(x, position_embeddings=positions), expected)


# ---- the operators of BitmapLinear ----


def test_compiled_and_eager_calls_of_a_bitmap_share_one_dense_copy(monkeypatch) -> None:
    layer, x = BitmapLinear.from_dense(two_four(N, K)), torch.randn(3, K).to(BF16)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    bitmap = layer.bitmap
    monkeypatch.delattr(type(bitmap), "to_dense")
    layer(x)
    assert layer.bitmap is bitmap


def test_a_bitmap_is_read_again_after_its_buffers_were_replaced() -> None:
    layer, x = BitmapLinear.from_dense(two_four(N, K)), torch.randn(3, K).to(BF16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x)
    with torch.no_grad():
        layer.records.copy_(BitmapLinear.from_dense(2 * layer.to_dense().weight).records)
    torch.testing.assert_close(compiled(x), layer.to_dense()(x))
    other = BitmapLinear.from_dense(two_four(N, K))
    layer.records, layer.offsets = other.records, other.offsets
    torch.testing.assert_close(compiled(x), other(x))


def test_bad_inputs_of_a_traced_bitmap_are_refused() -> None:
    layer = BitmapLinear.from_dense(two_four(N, K))
    for x in (torch.ones(2, K), torch.ones(2, K + 1, dtype=BF16)):
        with FlopCounterMode(display=False), pytest.raises(Unsupported, match="expected"):
            layer(x)


def test_a_bitmap_is_exported_and_counted() -> None:
    layer, x = BitmapLinear.from_dense(two_four(N, K)), torch.randn(3, K).to(BF16)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("m")},))
    torch.testing.assert_close(program.module()(x[:2]), layer(x[:2]))
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 3 * N * K
