"""Layers with torch's tools: torch.func, export, FLOP counts, modes, meta, safetensors."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vmap
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import FormatError, Unsupported
from sparsebench.kernels.nn import BlockSparseLinear, SparseGatedMLP, SpenseGatedMLP, SpenseLinear

N, K, HIDDEN = 64, 48, 40
BF16 = torch.bfloat16


def block_sparse(**options: Any) -> BlockSparseLinear:
    return BlockSparseLinear(K, N, block=16, sparsity=0.5, **options)


def gated(**options: Any) -> SparseGatedMLP:
    return SparseGatedMLP(K, HIDDEN, slots=8, **options)


def spense(**options: Any) -> SpenseLinear:
    return SpenseLinear(K, N, dense_fraction=0.25, **options)


def spense_gated(**options: Any) -> SpenseGatedMLP:
    return SpenseGatedMLP(K, HIDDEN, dense=8, **options)


TRAINABLE = {"BlockSparseLinear": block_sparse, "SparseGatedMLP": gated}
ALL: dict[str, Callable[..., Any]] = {
    **TRAINABLE, "SpenseLinear": spense, "SpenseGatedMLP": spense_gated
}  # fmt: skip
trainable = pytest.mark.parametrize("make", TRAINABLE.values(), ids=TRAINABLE)
every = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def x_for(layer: nn.Module, *tokens: int) -> Tensor:
    trains = isinstance(layer, BlockSparseLinear | SparseGatedMLP)
    return torch.randn(*(tokens or (5,)), K, dtype=torch.float32 if trains else BF16)


def filled(layer: nn.Module) -> nn.Module:
    """Fill layers that start as zeros with values."""
    for name, buffer in layer.named_buffers():
        if name.endswith("dense") and buffer.dtype == torch.uint8:
            buffer.copy_(torch.randint(0, 60, buffer.shape))
    return layer


# ---- torch.func ----


def loss(layer: nn.Module) -> Callable[..., Tensor]:
    return lambda weights, x: functional_call(layer, weights, (x,)).square().sum()


def weights_of(layer: nn.Module) -> dict[str, Tensor]:
    return {name: w.detach() for name, w in layer.named_parameters()}


@trainable
def test_torch_func_computes_the_gradients_of_backward(make):
    layer = make()
    x = x_for(layer).requires_grad_()
    layer(x).square().sum().backward()
    weights, dx = grad(loss(layer), (0, 1))(weights_of(layer), x.detach())
    torch.testing.assert_close(dx, x.grad)
    for name, w in layer.named_parameters():
        torch.testing.assert_close(weights[name], w.grad)


@trainable
def test_gradients_per_sample_sum_to_the_gradient(make):
    layer = make()
    x = x_for(layer, 4, 3)
    per_sample = vmap(grad(loss(layer)), (None, 0))(weights_of(layer), x)
    for name, whole in grad(loss(layer))(weights_of(layer), x).items():
        torch.testing.assert_close(per_sample[name].sum(0), whole)


@trainable
@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_equals_a_loop(make, dim):
    layer = make()
    x = x_for(layer, 4, 3)
    expected = torch.stack([layer(element) for element in x.unbind(dim)])
    torch.testing.assert_close(vmap(layer, dim)(x), expected)


@trainable
def test_an_ensemble_of_layers_equals_a_loop(make):
    layers = [make() for _ in range(3)]
    parameters, buffers = stack_module_state(layers)
    x = x_for(layers[0])
    y = vmap(lambda p, b: functional_call(layers[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(y, torch.stack([layer(x) for layer in layers]))


def test_torch_func_computes_the_second_derivatives_of_the_dense_layer():
    layer = block_sparse()
    x, dense = x_for(layer), layer.to_dense()

    def second(module: nn.Module) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return grad(lambda x: module(x).pow(3).sum())(x).square().sum()

        return grad(inner)(x)

    torch.testing.assert_close(second(layer), second(dense))
    torch.testing.assert_close(jacrev(layer)(x), jacrev(dense)(x))


@trainable
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # by torch itself, at the first use
def test_forward_mode_derivatives_are_refused(make):
    layer = make()
    x = x_for(layer)
    with pytest.raises(NotImplementedError, match="jvp"):
        jvp(layer, (x,), (x,))


@pytest.mark.filterwarnings("default")  # warnings of dynamo itself
def test_torch_func_works_under_torch_compile():
    layer = block_sparse()
    x = x_for(layer)
    gradient = grad(lambda x: layer(x).square().sum())
    dx = torch.compile(gradient, backend="aot_eager")(x)  # with a graph break
    torch.testing.assert_close(dx, gradient(x))
    with pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported)):
        torch.compile(lambda x: jvp(layer, (x,), (x,)), backend="aot_eager")(x)


def test_second_derivatives_of_a_sparse_gated_mlp_are_refused():
    layer = gated()
    x = x_for(layer).requires_grad_()

    def second() -> Tensor:
        (dx,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    with pytest.raises(Unsupported, match="second"):
        second()
    with pytest.raises(Unsupported, match="second"):
        grad(lambda x: grad(lambda x: layer(x).pow(3).sum())(x).sum())(x.detach())
    layer.sparse = False
    assert second().isfinite().all()


@trainable
def test_a_checkpointed_step_gives_the_same_gradients(make):
    layer = make()
    x = x_for(layer).requires_grad_()
    results = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        with torch.autograd.graph.save_on_cpu():
            results.append(torch.autograd.grad(run(x).square().sum(), [x, *layer.parameters()]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# ---- torch.export, and modes ----


@every
@pytest.mark.parametrize("strict", [True, False])
def test_a_layer_is_exported_for_any_number_of_tokens(make, strict):
    layer = filled(make()).eval()
    batch = torch.export.Dim("batch", max=1000)
    x = x_for(layer)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},), strict=strict)
    if make is block_sparse:
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    for tokens in (2, 9):
        x = x_for(layer, tokens)
        with torch.no_grad():
            torch.testing.assert_close(program.module()(x), layer(x))


def test_flops_count_stored_blocks_and_slots():
    counter = FlopCounterMode(display=False)
    layer = block_sparse()
    with counter:
        layer(x_for(layer).requires_grad_()).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * layer.values.numel()
    mlp = gated()
    with counter:
        mlp(x_for(mlp).requires_grad_()).sum().backward()
    assert counter.get_total_flops() == 2 * 5 * K * (HIDDEN + 2 * 8) + 6 * 2 * 5 * 8 * K
    one, two = filled(spense()), SpenseLinear(256, 256, dense_fraction=0.5)
    with counter, torch.no_grad():
        one(x_for(one))
    assert counter.get_total_flops() == 2 * 5 * N * K  # a part smaller than a tile is stored dense
    with counter, torch.no_grad():
        two(torch.randn(5, 256, dtype=BF16))
    assert counter.get_total_flops() == 2 * 5 * 256 * 256 * 3 // 4
    with counter:
        two(torch.randn(5, 256, dtype=BF16).requires_grad_()).sum().backward()
    assert counter.get_total_flops() == 2 * 5 * 256 * 256 * 7 // 4


def test_a_tensor_without_an_address_is_refused():
    layer = block_sparse()
    x = x_for(layer)
    with pytest.raises(Unsupported, match="TwoTensor"):
        layer(TwoTensor(x, x))


@every
def test_an_output_is_not_a_view_and_keeps_hooks(make):
    layer = filled(make())
    for tokens in ((5,), (2, 5), ()):
        assert not layer(x_for(layer, *tokens))._is_view()


# ---- meta, and files ----


def on_meta(make: Callable[..., nn.Module], how: str) -> nn.Module:
    if how == "device":
        return make(device="meta")
    if how == "to":
        return make().to("meta")
    with torch.device("meta"):
        return make()


@every
@pytest.mark.parametrize("how", ["device", "context", "to"])
@pytest.mark.parametrize("assign", [True, False])
def test_a_layer_made_on_meta_is_filled_by_a_state_dict(make, how, assign):
    source, layer = filled(make()), on_meta(make, how)
    assert all(t.is_meta for t in layer.state_dict(keep_vars=True).values() if t.dim() > 1)
    if not assign:
        layer.to_empty(device="cpu")
    layer.load_state_dict(source.state_dict(), assign=assign)
    if assign and make is gated:
        layer.active = torch.zeros((), dtype=torch.int32)  # not part of the state dict
    x = x_for(source)
    assert torch.equal(layer(x), source(x))


@pytest.mark.parametrize("how", ["device", "context"])
def test_a_layer_on_meta_keeps_its_pattern_until_to_empty(how):
    layer = on_meta(block_sparse, how)
    twin = copy.deepcopy(layer)
    for module in (layer, twin):
        module.to_empty(device="cpu")
        module.reset_parameters()
        bound = module.values.detach().abs().max()
        assert 0 < bound <= 1
        x = x_for(module)
        torch.testing.assert_close(module(x), module.to_dense()(x))
    assert torch.equal(layer.columns, twin.columns)


def test_a_pattern_can_be_set_on_meta():
    layer, other = block_sparse(device="meta"), BlockSparseLinear(K, N, block=16, sparsity=0.25)
    assert layer.set_pattern(other.offsets, other.columns).shape == (9,)
    assert (layer.values.shape, layer.values.is_meta) == ((9, 16, 16), True)
    layer.to_empty(device="cpu")
    assert torch.equal(layer.columns, other.columns)
    with pytest.raises(FormatError, match="columns"):
        other.set_pattern(layer.offsets.to("meta"), layer.columns.to("meta"))
    with pytest.raises(FormatError, match="pattern"):
        BlockSparseLinear(K, N, block=16, pattern=torch.ones(4, 3, device="meta").bool())


STORED: dict[Any, list[str]] = {
    block_sparse: ["values", "bias", "offsets", "columns"],
    gated: ["gate.weight", "up.weight", "down.weight_t"],
    spense: ["bias", "sparse", "dense", "_extra_state"],
    spense_gated: [
        f"{part}.{name}"
        for part in ("gate_up", "down")
        for name in ("sparse", "dense", "_extra_state")
    ],
}


@every
def test_safetensors_store_a_layer(make, tmp_path: Path):
    layer, other = filled(make()), make()
    layer(x_for(layer))
    assert [*layer.state_dict()] == STORED[make]
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    x = x_for(layer)
    assert torch.equal(other(x), layer(x))
