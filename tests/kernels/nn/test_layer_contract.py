"""The contract of all layers: results, state dicts, copies, dtypes, and the tools of torch.

Tests of a layer have what only this layer does.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import grad, vmap
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import FormatError, Unsupported
from sparsebench.nn import (
    BlockSparse,
    BlockSparseLinear,
    SparseActivations,
    SparseGatedMLP,
    SpenseLinear,
    TwoFour,
    Unstructured,
    sparsify_,
)
from tests.harness.tiny_models import tiny
from tests.kernels.nn.examples import BF16, KINDS, TRAINED, K, N, bitmap, blocks, dense_of
from tests.tools.marks import crossed

every = pytest.mark.parametrize("name", KINDS)
trained = pytest.mark.parametrize("name", TRAINED)
PACKED = [name for name in KINDS if name not in TRAINED]


# ---- results ----


@every
def test_a_result_is_that_of_dense_layers_for_any_shape_and_layout_of_x(name: str) -> None:
    layer, x = KINDS[name].drawn(), KINDS[name].x(2, 3)
    flat = layer(x.view(6, K))
    if "fp8" not in name:
        torch.testing.assert_close(flat, dense_of(layer)(x.view(6, K)))
    for rows, expected in (
        (x, flat.view(2, 3, -1)),
        (x[0, 0], flat[0]),
        (x[:, :0], flat.view(2, 3, -1)[:, :0]),
        (x.view(6, K).T.contiguous().T, flat),
    ):
        y = layer(rows)
        torch.testing.assert_close(y, expected)
        assert not y._is_view()  # so that hooks can write into it


@every
def test_an_input_of_another_size_dtype_or_type_is_refused(name: str) -> None:
    layer, x = KINDS[name].drawn(), KINDS[name].x()
    with pytest.raises(Unsupported, match="63"):
        layer(x[:, 1:])
    with pytest.raises(Unsupported, match="float64"):
        layer(x.double())


@every
def test_a_layer_compiles_whole(name: str) -> None:
    layer = KINDS[name].drawn()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (2, 3):  # the second is compiled for any number
        x = KINDS[name].x(tokens, 3).requires_grad_("fp8" not in name)
        results = []
        for run in (layer, compiled):
            y = run(x)
            results.append([y.detach()])
            if x.requires_grad:
                results[-1] += torch.autograd.grad(y.float().square().sum(), x)
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(("name", "strict"), crossed([*KINDS], [True, False]))
def test_a_layer_is_exported_for_any_number_of_tokens(name: str, strict: bool) -> None:
    layer, x = KINDS[name].drawn().eval(), KINDS[name].x()
    batch = torch.export.Dim("batch", max=1000)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},), strict=strict)
    if name == "BlockSparseLinear":
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    for tokens in (2, 9):
        x = KINDS[name].x(tokens)
        with torch.no_grad():
            torch.testing.assert_close(program.module()(x), layer(x))


# ---- state dicts, copies and writes ----


def on_meta(make: Callable[..., nn.Module], how: str) -> nn.Module:
    if how == "device":
        return make(device="meta")
    if how == "to":
        return make().to("meta")
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize(
    ("name", "how", "assign"), crossed([*KINDS], ["device", "context", "to"], [True, False])
)
def test_a_layer_made_on_meta_is_filled_by_a_state_dict(name, how, assign) -> None:
    source, layer = KINDS[name].drawn(), on_meta(KINDS[name].empty, how)
    assert all(t.is_meta for t in layer.state_dict(keep_vars=True).values() if t.dim() > 1)
    if not assign:
        layer.to_empty(device="cpu")
    layer.load_state_dict(source.state_dict(), assign=assign)
    if assign and isinstance(layer, SparseGatedMLP):
        layer.active = torch.zeros((), dtype=torch.int32)  # not part of the state dict
    x = KINDS[name].x()
    assert torch.equal(layer(x), source(x))


@every
def test_safetensors_store_a_layer(name: str, tmp_path: Path) -> None:
    layer, other, x = KINDS[name].drawn(), KINDS[name].empty(), KINDS[name].x()
    layer(x)
    assert [*layer.state_dict()] == KINDS[name].stored.split()
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(other(x), layer(x))


def copies(layer: nn.Module) -> Iterator[nn.Module]:
    yield copy.deepcopy(layer)
    yield pickle.loads(pickle.dumps(layer))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)
    average = AveragedModel(layer)
    average.update_parameters(layer)
    yield average.module


@every
def test_a_copy_of_a_planned_layer_is_a_layer_of_its_own(name: str) -> None:
    layer, other, x = KINDS[name].drawn(), KINDS[name].drawn(), KINDS[name].x()
    expected = layer(x)
    for twin in copies(layer):
        assert torch.equal(twin(x), expected)
        twin.load_state_dict(other.state_dict())
        assert torch.equal(twin(x), other(x))
        assert torch.equal(layer(x), expected)


@every
@pytest.mark.parametrize("moved", [False, True], ids=["written", "moved"])
def test_what_is_written_or_moved_after_a_call_is_read_by_the_next(name: str, moved: bool) -> None:
    layer, other, x = KINDS[name].drawn(), KINDS[name].drawn(), KINDS[name].x()
    tensors = dict((*other.named_parameters(), *other.named_buffers()))
    with torch.no_grad():
        layer(x)
        for name_of, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            new = tensors[name_of].clone()
            if moved:
                tensor.data = new  # torch counts no write
            else:
                tensor.copy_(new)
        assert torch.equal(layer(x), other(x))


@trained
def test_a_layer_that_is_trained_changes_its_dtype_and_keeps_its_index(name: str) -> None:
    layer, x = KINDS[name].drawn(), KINDS[name].x()
    layer(x).sum().backward()
    for dtype in (torch.float16, BF16, torch.float64):
        layer = layer.to(dtype)
        assert layer(x.to(dtype)).dtype == dtype
        assert all(not b.is_floating_point() for b in layer.buffers())
    if name != "SparseGatedMLP":
        with pytest.raises(FormatError, match="int32"):
            layer.type(torch.float32)


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_layer_refuses_another_dtype_and_does_not_change(name: str) -> None:
    layer, dtype = KINDS[name].drawn(), KINDS[name].dtype
    before = {key: t.clone() for key, t in layer.state_dict().items()}
    for other in {torch.float16, torch.float32, torch.float64} - {dtype}:
        with pytest.raises(Unsupported, match="packed"):
            layer.to(other)
    with pytest.raises(Unsupported, match="uint8"):
        layer.type(dtype)
    layer.to(dtype)
    for key, t in layer.state_dict().items():
        assert torch.equal(t, before[key])
        assert t.dtype == before[key].dtype
    assert not any(p.requires_grad for p in layer.parameters())


# ---- derivatives, checkpoints and modes ----


@trained
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # by torch itself, at the first use
def test_second_derivatives_forward_mode_and_torch_func_are_refused(name: str) -> None:
    layer, x = KINDS[name].drawn(), KINDS[name].x().requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(Unsupported, match="second"):
        dx.square().sum().backward()
    for transformed in (grad(lambda x: layer(x).sum()), vmap(layer)):
        with pytest.raises(Unsupported, match="transform"):
            transformed(x.detach())
    with torch.autograd.forward_ad.dual_level(), pytest.raises((NotImplementedError, Unsupported)):
        layer(torch.autograd.forward_ad.make_dual(x.detach(), x.detach()))


@pytest.mark.filterwarnings("ignore")  # of the tracer
@pytest.mark.parametrize("name", [*KINDS])
def test_a_trace_of_torchscript_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=r"torch\.jit\.trace"):
        torch.jit.trace(KINDS[name].drawn().requires_grad_(False), KINDS[name].x())


@trained
def test_a_checkpointed_step_gives_the_same_gradients(name: str) -> None:
    layer, x = KINDS[name].drawn(), KINDS[name].x().requires_grad_()
    results = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        with torch.autograd.graph.save_on_cpu():
            results.append(torch.autograd.grad(run(x).square().sum(), [x, *layer.parameters()]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_flops_count_stored_blocks_and_slots() -> None:
    def count(layer: Any, *, backward: bool, dtype: torch.dtype = torch.float32) -> int:
        x = torch.randn(5, layer.in_features, dtype=dtype, requires_grad=backward)
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
            y = layer(x)
            if backward:
                y.sum().backward()
        return counter.get_total_flops()

    layer, mlp = blocks(), SparseGatedMLP(48, 40, slots=8)
    assert count(layer, backward=True) == 3 * 2 * 5 * layer.values.numel()
    assert count(mlp, backward=True) == 2 * 5 * 48 * (40 + 2 * 8) + 6 * 2 * 5 * 8 * 48
    small, large = (
        SpenseLinear(48, 64, dense_fraction=0.25),
        SpenseLinear(256, 256, dense_fraction=0.5),
    )
    # A part smaller than a tile is stored dense.
    assert count(small, backward=False, dtype=BF16) == 2 * 5 * 64 * 48
    assert count(large, backward=False, dtype=BF16) == 2 * 5 * 256 * 256 * 3 // 4
    assert count(large, backward=True, dtype=BF16) == 2 * 5 * 256 * 256 * 7 // 4
    assert count(bitmap(BF16).drawn(), backward=False, dtype=BF16) == 2 * 5 * N * K


def test_a_tensor_without_an_address_is_refused() -> None:
    x = torch.randn(5, K)
    with pytest.raises(Unsupported, match="TwoTensor"):
        blocks()(TwoTensor(x, x))


# ---- a pattern on meta ----


@pytest.mark.parametrize("how", ["device", "context"])
def test_a_layer_on_meta_keeps_its_pattern_until_to_empty(how: str) -> None:
    layer = on_meta(blocks, how)
    twin = copy.deepcopy(layer)
    for module in (layer, twin):
        module.to_empty(device="cpu")
        module.reset_parameters()
        assert 0 < module.values.detach().abs().max() <= 1
        x = torch.randn(5, K)
        torch.testing.assert_close(module(x), module.to_dense()(x))
    assert torch.equal(layer.columns, twin.columns)


def test_a_pattern_can_be_set_on_meta() -> None:
    layer, other = blocks(device="meta"), BlockSparseLinear(K, N, block=16, sparsity=0.25)
    assert layer.set_pattern(other.offsets, other.columns).shape == (24,)
    assert (layer.values.shape, layer.values.is_meta) == ((24, 16, 16), True)
    layer.to_empty(device="cpu")
    assert torch.equal(layer.columns, other.columns)
    with pytest.raises(FormatError, match="columns"):
        other.set_pattern(layer.offsets.to("meta"), layer.columns.to("meta"))
    with pytest.raises(FormatError, match="pattern"):
        BlockSparseLinear(K, N, block=16, pattern=torch.ones(8, 4, device="meta").bool())


# ---- recipes ----


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
