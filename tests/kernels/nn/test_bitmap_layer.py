"""BitmapLinear: the product, its state, moves, refusals, and whole calls on a GPU."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from sparsebench.errors import FormatError, Unsupported
from sparsebench.nn import BitmapLinear
from tests.compiling.nvcc import hopper

BF16 = torch.bfloat16


def weight(n: int = 40, k: int = 300, device: str = "cpu") -> Tensor:
    draw = torch.Generator(device).manual_seed(0)
    whole = torch.randint(-3, 4, (n, k), generator=draw, device=device)
    return (whole * (torch.rand(n, k, generator=draw, device=device) < 0.5)).to(BF16)


def test_it_is_the_dense_layer_of_the_same_weight_and_bias() -> None:
    w, bias = weight(), torch.arange(40).to(BF16)
    layer, x = BitmapLinear.from_dense(w, bias), torch.ones(2, 3, 300, dtype=BF16)
    dense = nn.Linear(300, 40, dtype=BF16)
    dense.weight.data, dense.bias.data = w, bias
    torch.testing.assert_close(layer(x), dense(x))
    torch.testing.assert_close(torch.compile(layer, backend="eager")(x), dense(x))
    back = layer.to_dense()
    assert torch.equal(back.weight, w)
    assert torch.equal(back.bias, bias)
    assert not any(p.requires_grad for p in layer.parameters())
    x.requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(2, 3, -1))


def test_its_state_loads_into_a_layer_of_as_many_bytes() -> None:
    layer = BitmapLinear.from_dense(weight())
    other = BitmapLinear(300, 40, stored=len(layer.records), bias=False)
    with pytest.raises(FormatError, match="expected to rise from 0 to"):
        other.require_index()
    other.load_state_dict(layer.state_dict())
    other.require_index()
    assert torch.equal(other.to_dense().weight, weight())
    copied = deepcopy(other)
    copied.records.zero_()
    assert torch.equal(other.to_dense().weight, weight())
    half = BitmapLinear(300, 40, stored=len(layer.records), bias=False, dtype=torch.float16)
    with pytest.raises(FormatError, match=r"expected \[40, 300, \d\], found"):
        half.load_state_dict(layer.state_dict())
    assert not half.records.any()


def test_another_dtype_is_refused_and_nothing_changes() -> None:
    layer = BitmapLinear.from_dense(weight(), torch.zeros(40))
    with pytest.raises(Unsupported, match=r"expected torch.bfloat16 as W has"):
        layer.half()
    assert layer.bias is not None
    assert layer.bias.dtype == BF16
    with pytest.raises(Unsupported, match="expected X in the dtype of W"):
        layer(torch.ones(1, 300))
    with pytest.raises(FormatError, match="expected a multiple of 16 bytes, found 8"):
        BitmapLinear(300, 40, stored=8)


@pytest.mark.gpu
@hopper
def test_few_tokens_and_many_are_right_on_a_gpu_and_in_a_graph() -> None:
    w = weight(14336, 4096, "cuda")
    layer = BitmapLinear.from_dense(w)
    for m in (1, 16, 64):
        x = torch.randint(-2, 3, (m, 4096), device="cuda").to(BF16)
        right = (x.double() @ w.double().T).to(BF16)
        torch.testing.assert_close(layer(x), right, rtol=0, atol=0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        torch.testing.assert_close(y, right, rtol=0, atol=0)
