"""Dense weights become sparse layers, and packed layers dense weights, without vLLM."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sparsebench.errors import FormatError
from sparsebench.harness.models.pruning import checkpoint
from sparsebench.kernels.nn import BitmapLinear, BlockSparseLinear, SpenseLinear
from sparsebench.nn import BlockSparse, SparseActivations, TwoFour, Unstructured, sparsify_
from sparsebench.vllm import plugin
from sparsebench.vllm.packing import (
    ANYWHERE,
    DENSE,
    TWO_FOUR,
    Storage,
    pack,
    prune,
    require_whole_blocks,
    storage_of_layer,
    storage_of_recipe,
)
from sparsebench.vllm.unpacking import dense_weights
from tests.vllm.models import qwen3

BLOCKS = Storage(BlockSparseLinear, (32, 32))
RECIPES = TwoFour(), TwoFour(0.5), BlockSparse(32, 0.5), Unstructured()
CPU = torch.device("cpu")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def require_product(layer: nn.Module, weight: Tensor) -> None:
    x = drawn(5, weight.shape[1])
    torch.testing.assert_close(layer(x), linear(x, weight))


def two_four(weight: Tensor, rows: int | None = None, columns: int | None = None) -> Tensor:
    """Prune the first rows or columns to 2:4."""
    pruned = weight.clone()
    pruned[:rows, :columns] = prune(weight, TwoFour())[:rows, :columns]
    return pruned


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("sizes", [[512], [256, 256], [384, 256, 256]], ids=str)
def test_a_weight_is_pruned_and_packed_by_a_recipe(recipe: Any, sizes: list[int]) -> None:
    storage = storage_of_recipe(recipe)
    weight = torch.cat([prune(part, recipe) for part in drawn(sum(sizes), 128).split(sizes)])
    layer = pack(weight, sizes, [storage] * len(sizes))
    require_product(layer, weight)
    assert type(getattr(layer, "layer", layer)) is storage.layer


@pytest.mark.parametrize(
    ("storages", "kinds"),
    [
        ([TWO_FOUR] * 2, [SpenseLinear]),
        ([BLOCKS] * 2, [BlockSparseLinear]),
        ([ANYWHERE] * 2, [BitmapLinear]),
        ([TWO_FOUR, DENSE], [SpenseLinear, nn.Linear]),
        ([BLOCKS, Storage(BlockSparseLinear, (64, 64))], [BlockSparseLinear] * 2),
    ],
)
def test_parts_that_are_stored_alike_are_one_layer(
    storages: Sequence[Storage], kinds: list[type[nn.Module]]
) -> None:
    weight = two_four(drawn(256, 128))
    layer = pack(weight, [128, 128], storages)
    layers = [*layer] if isinstance(layer, nn.ModuleList) else [layer]
    assert [type(each) for each in layers] == kinds
    require_product(layer, weight)


@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [
        (256, None, (256, 256)),
        (300, None, (256, 256)),  # whole tiles of 128
        (None, 128, (512, 128)),
        (512, None, (512, 256)),
    ],
)
def test_the_dense_region_of_a_shard_is_found_in_it(
    rows: int | None, columns: int | None, shape: tuple[int, int]
) -> None:
    weight = two_four(drawn(512, 256), rows, columns)
    layer = pack(weight, [512], [TWO_FOUR])
    assert isinstance(layer, SpenseLinear)
    assert layer.sparse_shape == shape
    require_product(layer, weight)


@pytest.mark.parametrize(
    ("sparse_rows", "stored"), [((128, 256), 384), ((256, 0), 256), ((0, 130), 128), ((0, 0), 0)]
)
def test_parts_with_a_dense_region_are_one_product(
    sparse_rows: tuple[int, int], stored: int
) -> None:
    sizes = 320, 256
    parts = zip(drawn(sum(sizes), 128).split(sizes), sparse_rows, strict=True)
    weight = torch.cat([two_four(part, rows) for part, rows in parts])
    layer: Any = pack(weight, sizes, [TWO_FOUR] * 2)
    require_product(layer, weight)
    assert layer.layer.sparse_shape == (stored, 128) if stored else type(layer) is nn.Linear


def test_a_shard_of_the_dense_region_is_dense() -> None:
    weight = drawn(256, 128)
    assert type(pack(weight, [256], [TWO_FOUR])) is nn.Linear


def test_blocks_that_cross_two_parts_are_two_layers() -> None:
    weight = drawn(96, 64)
    layer = pack(weight, [48, 48], [BLOCKS] * 2)
    assert isinstance(layer, nn.ModuleList)
    require_product(layer, weight)


@pytest.mark.parametrize(
    ("storage", "shard", "whole", "message"),
    [
        (TWO_FOUR, ([64], 6), (64, 24), "multiple of 4 columns"),
        (BLOCKS, ([48], 64), (96, 64), "multiple of 32 rows"),
        (Storage(BlockSparseLinear, (64, 64)), ([2880], 1440), (2880, 2880), "found 1440 of 2880"),
    ],
)
def test_ranks_that_divide_a_block_are_refused(
    storage: Storage, shard: tuple[list[int], int], whole: tuple[int, int], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        require_whole_blocks([storage], shard, whole)


def test_a_weight_that_ends_within_a_block_is_taken_by_one_rank() -> None:
    require_whole_blocks([BLOCKS], ([48], 40), (48, 40))
    require_whole_blocks([TWO_FOUR], ([64], 1440), (64, 2880))


def test_layers_without_a_place_in_an_engine_are_refused() -> None:
    with pytest.raises(FormatError, match="found SpenseLinear in float8_e4m3fn"):
        storage_of_layer({"layer": "SpenseLinear", "dtype": "float8_e4m3fn"})
    for kind in ("SparseGatedMLP", "SparseExperts"):
        with pytest.raises(FormatError, match=f"found {kind}"):
            storage_of_layer({"layer": kind, "dtype": "bfloat16"})
    with pytest.raises(FormatError, match="found SparseActivations"):
        storage_of_recipe(SparseActivations())


# ---- checkpoints ----


def sparse(recipe: Any) -> tuple[Any, dict[str, Any]]:
    """Return a sparse model, and the description of its layers."""
    wholes = {TwoFour(): "layers", TwoFour(0.5): "mlp"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken = wholes.get(recipe, "proj")
        model = sparsify_(qwen3(), recipe, lambda module, name: taken in name, tokens=())
    return model, checkpoint.parse(checkpoint.VERSION, checkpoint.describe(model))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_packed_layers_of_a_checkpoint_are_read_as_dense_weights(recipe: Any) -> None:
    model, layers = sparse(recipe)
    state = {name: tensor.clone() for name, tensor in reversed(model.state_dict().items())}
    weights = dict(dense_weights(state.items(), layers, CPU))
    checkpoint.to_dense(model)
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_tensor_that_is_missing_or_does_not_fit_is_named() -> None:
    model, layers = sparse(TwoFour(0.5))
    state = model.state_dict()
    name = "model.layers.1.mlp.down.sparse"
    rest = {key: tensor for key, tensor in state.items() if key != name}
    with pytest.raises(FormatError, match=r"layers\.1\.mlp: expected down\.sparse in the check"):
        [*dense_weights(rest.items(), layers, CPU)]
    with pytest.raises(FormatError, match=r"layers\.1\.mlp: down\.sparse: expected \["):
        [*dense_weights((state | {name: state[name][:1]}).items(), layers, CPU)]


def test_a_vllm_that_lacks_what_the_plug_in_needs_is_one_line(caplog, monkeypatch) -> None:
    def lacking(name: str) -> None:
        raise ImportError("cannot import name 'LinearBase'")

    monkeypatch.setattr(plugin, "import_module", lacking)
    with caplog.at_level("WARNING", logger="vllm.sparsebench"):
        plugin.register()
    assert caplog.messages == ["sparsebench is not registered: cannot import name 'LinearBase'"]
