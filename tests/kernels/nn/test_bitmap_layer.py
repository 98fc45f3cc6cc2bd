"""BitmapLinear: the product, state dicts, dtypes, errors, and calls on a GPU."""

import json
from dataclasses import asdict
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats.bitmap import Bitmap
from sparsebench.kernels._common.front import Conditions, Recordings
from sparsebench.kernels._common.unstructured import UnstructuredCall
from sparsebench.kernels.dense import _cublaslt
from sparsebench.kernels.dense._cublaslt import Algorithm
from sparsebench.kernels.nn import _dense_copy, _frozen_op
from sparsebench.nn import BitmapLinear
from tests.compiling.nvcc import hopper

BF16 = torch.bfloat16


def weight(n: int = 40, k: int = 300, device: str = "cpu") -> Tensor:
    draw = torch.Generator(device).manual_seed(0)
    whole = torch.randint(-3, 4, (n, k), generator=draw, device=device)
    return (whole * (torch.rand(n, k, generator=draw, device=device) < 0.5)).to(BF16)


def test_a_layer_is_converted_back_and_x_has_a_gradient() -> None:
    w, bias = weight(), torch.arange(40).to(BF16)
    layer, x = BitmapLinear.from_dense(w, bias), torch.ones(2, 3, 300, dtype=BF16)
    back = layer.to_dense()
    assert torch.equal(back.weight, w)
    assert torch.equal(back.bias, bias)
    layer(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(2, 3, -1))


def test_a_state_dict_fills_a_layer_with_as_many_bytes() -> None:
    layer = BitmapLinear.from_dense(weight())
    other = BitmapLinear(300, 40, stored=len(layer.records), bias=False)
    with pytest.raises(FormatError, match="offsets"):
        other.require_index()
    other.load_state_dict(layer.state_dict())
    other.require_index()
    assert torch.equal(other.to_dense().weight, weight())
    half = BitmapLinear(300, 40, stored=len(layer.records), bias=False, dtype=torch.float16)
    with pytest.raises(FormatError, match=r"40, 300"):
        half.load_state_dict(layer.state_dict())
    assert not half.records.any()


def test_wrong_weights_and_sizes_are_refused() -> None:
    with pytest.raises(FormatError, match="stored"):
        BitmapLinear(300, 40, stored=8)
    with pytest.raises(FormatError, match="found Linear"):
        BitmapLinear.from_dense(torch.nn.Linear(40, 300))


# ---- the operator that torch.compile sees ----


def test_compiled_and_eager_calls_share_one_dense_copy(monkeypatch) -> None:
    layer, x = BitmapLinear.from_dense(weight()), torch.ones(3, 300, dtype=BF16)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    bitmap = layer.bitmap
    monkeypatch.delattr(type(bitmap), "to_dense")
    layer(x)
    assert layer.bitmap is bitmap


def test_a_compiled_layer_is_read_again_after_its_buffers_were_written_or_replaced() -> None:
    layer, other = BitmapLinear.from_dense(weight()), BitmapLinear.from_dense(2 * weight())
    compiled, x = (
        torch.compile(layer, fullgraph=True, backend="aot_eager"),
        torch.ones(3, 300, dtype=BF16),
    )
    compiled(x)
    layer.records.copy_(other.records)
    torch.testing.assert_close(compiled(x), other(x))
    another = BitmapLinear.from_dense(weight() + 1)
    layer.records, layer.offsets = another.records, another.offsets
    torch.testing.assert_close(compiled(x), another(x))


def test_bad_inputs_of_a_traced_layer_are_refused() -> None:
    layer = BitmapLinear.from_dense(weight())
    for x in (torch.ones(2, 300), torch.ones(2, 301, dtype=BF16)):
        with FlopCounterMode(display=False), pytest.raises(Unsupported, match="expected"):
            layer(x)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dense_rows", [0, 32])
def test_few_and_many_tokens_are_correct_on_a_gpu_and_in_a_graph(dense_rows: int) -> None:
    whole = torch.randint(1, 4, (14336, 4096), device="cuda")
    w = (whole * (torch.rand(whole.shape, device="cuda") < 0.5)).to(BF16)  # these have a choice
    w[100 : 100 + dense_rows] = 1  # larger records than the listed choices were made for
    layer = BitmapLinear.from_dense(w)
    for m in (1, 16, 64):
        x = torch.randint(-2, 3, (m, 4096), device="cuda").to(BF16)
        expected = (x.double() @ w.double().T).to(BF16)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        torch.testing.assert_close(y, expected, rtol=0, atol=0)


def test_a_dense_choice_is_read_from_a_list_and_a_cpu_has_those_of_torch() -> None:
    algorithm = Algorithm(66, tile=35, cluster_shape=7)
    config = _dense_copy.DenseConfig(algorithm=algorithm)
    written = json.loads(json.dumps(asdict(config)))
    assert {_dense_copy.DenseConfig(**written)} == {config}
    w = Bitmap.from_dense(torch.ones(16, 16, dtype=BF16))
    configs = [*_dense_copy.dense_choices(w, UnstructuredCall("linear", 144))]
    assert configs == [_dense_copy.DenseConfig(), _dense_copy.DenseConfig(256)]


@pytest.mark.gpu
@hopper
def test_direct_calls_of_cublaslt_are_right_eager_recorded_and_in_a_graph() -> None:
    w = torch.randint(-3, 4, (1536, 1024), device="cuda").to(BF16)
    bitmap = Bitmap.from_dense(w)
    call = UnstructuredCall("linear", 64)
    if _cublaslt.unavailable():
        pytest.skip("needs nvmath")
    direct = [c for c in _dense_copy.dense_choices(bitmap, call) if c.algorithm]
    assert direct
    for config in direct:
        run = _dense_copy.plan_dense(bitmap, call, config).run
        recordings = Recordings(_frozen_op.SIGNATURE)
        for m in (64, 1, 33, 64, 64, 64):
            x = torch.randint(-2, 3, (m, 1032), device="cuda").to(BF16)[:, 8:]  # not aligned to 256
            right = (x.double() @ w.double().T).to(BF16)
            y = torch.full((m, 1536), float("nan"), device="cuda", dtype=BF16)
            assert torch.equal(run(x, out=y), right)
            for _ in range(3):
                planned = recordings.replay(x)
                y = recordings.product(x, Conditions([]), run, partial(run, x))
                assert torch.equal(y if planned is None else planned, right)
        static = torch.zeros(64, 1024, device="cuda", dtype=BF16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(static)
        static.copy_(torch.randint(-2, 3, static.shape, device="cuda"))
        graph.replay()
        assert torch.equal(y, (static.double() @ w.double().T).to(BF16))
