"""Writes into layers by torch's own tools: the next call is correct, or raises."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from sparsebench.errors import FormatError
from sparsebench.kernels.nn import BlockSparseLinear, _bsr_pattern
from sparsebench.kernels.nn._bsr_pattern import index_of, pattern_of

N, K = 64, 48


def layer_of(sparsity: float = 0.5, **options: Any) -> BlockSparseLinear:
    return BlockSparseLinear(K, N, block=16, sparsity=sparsity, **options)


def planned_layer(x: Tensor, **options: Any) -> BlockSparseLinear:
    """Return a layer that was called, and so has plans."""
    layer = layer_of(**options)
    layer(x).sum().backward()
    return layer


def assert_correct(layer: BlockSparseLinear, x: Tensor) -> None:
    """Compare Y and dW with the dense layer that the index and values now describe."""
    dense = layer.to_dense()
    layer.values.grad = None
    for module in (layer, dense):
        module(x).square().sum().backward()
    torch.testing.assert_close(layer(x), dense(x))
    torch.testing.assert_close(layer.values.grad, layer.bsr.sample(dense.weight.grad).values)


def rewritten(layer: BlockSparseLinear) -> BlockSparseLinear:
    """Return a copy with another pattern of as many blocks, and other values."""
    source = copy.deepcopy(layer)
    pattern = layer.bsr.to_dense()[::16, ::16] == 0
    offsets, columns = index_of(pattern)
    assert len(columns) == len(layer.columns)
    source.set_pattern(offsets, columns)
    source.values.data.normal_()
    return source


def swapped(layer: BlockSparseLinear, source: BlockSparseLinear) -> None:
    for name in ("offsets", "columns", "values"):
        torch.utils.swap_tensors(getattr(layer, name), copy.deepcopy(getattr(source, name)))


def loaded_by_swapping(layer: BlockSparseLinear, source: BlockSparseLinear) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.load_state_dict(source.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def copied_in_place(layer: BlockSparseLinear, source: BlockSparseLinear) -> None:
    with torch.no_grad():
        for name, tensor in source.state_dict().items():
            layer.state_dict()[name].copy_(tensor)


def in_inference_mode(write: Callable[..., None]) -> Callable[..., None]:
    def wrapped(layer: BlockSparseLinear, source: BlockSparseLinear) -> None:
        with torch.inference_mode():
            write(layer, source)

    return wrapped


def data_replaced(layer: BlockSparseLinear, source: BlockSparseLinear) -> None:
    for name in ("offsets", "columns", "values"):  # as fully_shard does
        getattr(layer, name).data = getattr(source, name).detach().clone()


WRITES: dict[str, Callable[[BlockSparseLinear, BlockSparseLinear], Any]] = {
    "load_state_dict": lambda layer, source: layer.load_state_dict(source.state_dict()),
    "assign": lambda layer, source: layer.load_state_dict(source.state_dict(), assign=True),
    "load by swap_tensors": loaded_by_swapping,
    "swap_tensors": swapped,
    "copy_ into the state dict": copied_in_place,
    "copy_ in inference mode": in_inference_mode(copied_in_place),
    "load in inference mode": in_inference_mode(
        lambda layer, source: layer.load_state_dict(source.state_dict())
    ),
    ".data = another tensor": data_replaced,
}


@pytest.mark.parametrize("name", WRITES)
def test_the_next_call_uses_what_a_tool_wrote(name):
    x = torch.randn(5, K)
    layer = planned_layer(x)
    source = rewritten(layer)
    WRITES[name](layer, source)
    assert torch.equal(layer.columns, source.columns)
    torch.testing.assert_close(layer(x), source(x))
    assert_correct(layer, x)


def test_an_equal_index_keeps_its_plans():
    x = torch.randn(5, K)
    layer = planned_layer(x)
    plans = pattern_of(layer.offsets, layer.columns).operator.plans
    with torch.no_grad():
        layer.columns.copy_(layer.columns.clone())  # as DDP does before every forward
    layer(x).sum().backward()
    assert pattern_of(layer.offsets, layer.columns).operator.plans is plans


def test_backward_uses_the_pattern_of_its_forward():
    x = torch.randn(5, K)
    layer = layer_of()
    expected = copy.deepcopy(layer)
    y = layer(x)
    source = rewritten(layer)
    with torch.no_grad():
        layer.columns.copy_(source.columns)
        layer.offsets.copy_(source.offsets)
    y.sum().backward()
    expected(x).sum().backward()
    assert torch.equal(layer.values.grad, expected.values.grad)


@pytest.mark.parametrize("mode", ["built", "moved", "copied", "assigned"])
def test_an_index_made_in_inference_mode_is_correct(mode):
    x, layer = torch.randn(5, K), layer_of()
    state = layer.state_dict()
    with torch.inference_mode():
        if mode == "built":
            layer = layer_of(bias=False)
        elif mode == "copied":
            layer = copy.deepcopy(layer)
        elif mode == "moved":
            layer = layer_of().to(torch.float64).to(torch.float32)
        else:
            layer.load_state_dict(copy.deepcopy(state), assign=True)
        assert layer.columns.is_inference() == (mode == "copied")
        for _ in range(2):
            torch.testing.assert_close(layer(x), layer.to_dense()(x))
            source = rewritten(layer_of())
            for name in ("offsets", "columns"):
                getattr(layer, name).copy_(getattr(source, name))


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_a_write_that_torch_does_not_count_raises_within_a_few_calls(write, monkeypatch):
    monkeypatch.setattr(_bsr_pattern, "COMPARE_EVERY", 8)
    x = torch.randn(5, K)
    layer = planned_layer(x)
    source = rewritten(layer)
    if write == "data":
        layer.columns.data.copy_(source.columns)
    else:
        layer.columns.numpy()[:] = source.columns.numpy()
    with pytest.raises(RuntimeError, match="6 blocks"):
        [layer(x) for _ in range(8)]
    layer.load_state_dict(source.state_dict())
    assert_correct(layer, x)


def test_an_invalid_index_is_refused_after_a_write():
    x = torch.randn(5, K)
    layer = planned_layer(x)
    layer.columns.fill_(7)
    with pytest.raises(FormatError, match="expected"):
        layer(x)


def test_buffers_of_a_planned_layer_load_with_weights_only():
    x, file = torch.randn(5, K), io.BytesIO()
    layer = planned_layer(x)
    torch.save(dict(layer.named_buffers()), file)
    file.seek(0)
    buffers = torch.load(file, weights_only=True)
    assert torch.equal(buffers["columns"], layer.columns)
    layer.columns = buffers["columns"]
    assert_correct(layer, x)


@pytest.mark.parametrize("values", [torch.zeros(6, 8, 16), torch.zeros(5, 16, 16)])
def test_an_inconsistent_state_dict_changes_nothing(values):
    x, layer = torch.randn(5, K), layer_of()
    before = layer(x)
    state = {**rewritten(layer).state_dict(), "values": values}
    with pytest.raises(FormatError, match=r"^values"):
        layer.load_state_dict(state)
    state = {**layer.state_dict(), "columns": torch.full_like(layer.columns, 9)}
    with pytest.raises(FormatError, match="expected"):
        layer.load_state_dict(state)
    assert torch.equal(layer(x), before)


def test_the_number_of_blocks_changes_while_the_last_loss_is_alive():
    x, layer = torch.randn(5, K), layer_of()
    for sparsity in (0.25, 1.0, 0.5):
        loss = layer(x).square().sum()
        loss.backward()
        other = layer_of(sparsity)
        layer.set_pattern(other.offsets, other.columns)
        assert_correct(layer, x)


def test_an_average_that_includes_buffers_keeps_a_constant_pattern():
    x, layer = torch.randn(5, K), layer_of()
    average = AveragedModel(layer, use_buffers=True)
    for _ in range(3):
        average(x)
        average.update_parameters(layer)
    assert torch.equal(average.module.columns, layer.columns)
    assert_correct(average.module, x)
