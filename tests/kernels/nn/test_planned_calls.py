"""plan, freeze and packed values of layers; recorded calls equal those in Python, on a GPU."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsebench
from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats._format import rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import front_extension
from sparsebench.kernels._common.front import Recordings
from sparsebench.kernels.nn._bsr_pattern import index_of, pattern_of, share_plans
from sparsebench.nn import BitmapLinear, BlockSparseLinear, SpenseLinear
from tests.compiling.nvcc import hopper
from tests.kernels.nn.examples import dense_of, mlp_in_blocks, mlp_in_two_four, two_four


def test_a_layer_plans_ahead_and_keeps_its_gradients() -> None:
    layer = BlockSparseLinear(64, 48, block=16, sparsity=0.5)
    layer(torch.randn(3, 64)).sum().backward()
    before = layer.values.grad.clone()
    layer.plan(tokens=[1, 20])
    plans = pattern_of(layer.offsets, layer.columns).operator.plans
    assert {(call.op, call.m) for call in plans} >= {
        (op, m) for op in ("linear", "wgrad") for m in (1, 32)
    }
    assert torch.equal(layer.values.grad, before)


def test_a_plan_has_the_products_of_a_step_without_autograd(monkeypatch) -> None:
    layer, x = BlockSparseLinear(64, 48, block=16, sparsity=0.5), torch.randn(3, 64)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", None)  # its threads for a GPU do not search
        layer.plan(tokens=[3])
    plans = pattern_of(layer.offsets, layer.columns).operator.plans
    planned = {*plans}
    layer(x.requires_grad_()).sum().backward()
    assert planned == {*plans}


def test_a_frozen_layer_has_no_gradient_and_stays_right_when_it_is_written() -> None:
    layer, x = BlockSparseLinear(64, 48, block=16, sparsity=0.5).freeze(), torch.randn(3, 64)
    assert not any(p.requires_grad for p in layer.parameters())
    layer(x)
    with torch.no_grad():
        layer.values.mul_(2)
    torch.testing.assert_close(layer(x), layer.to_dense()(x))


def two_alike(device: str = "cpu") -> list[BlockSparseLinear]:
    """Return two frozen layers of one pattern, with values of their own and the plans of both."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "bias": False}
    first = BlockSparseLinear(128, 96, block=16, sparsity=0.5, **options)
    there = torch.zeros(6, 8, dtype=torch.bool)
    there[rows_of(first.offsets).cpu(), first.columns.long().cpu()] = True
    second = BlockSparseLinear(128, 96, block=16, pattern=there, **options)
    share_plans((second.offsets, second.columns), (first.offsets, first.columns))
    return [first.freeze(), second.freeze()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layers_that_share_plans_keep_their_own_packed_values(device: str) -> None:
    layers = two_alike(device)
    x = torch.randn(16, 128, device=device, dtype=torch.bfloat16)
    layers[0].plan([16], search=False)
    first, second = (pattern_of(layer.offsets, layer.columns) for layer in layers)
    assert second.operator is first.operator
    packs = []
    for layer in (*layers, *layers):
        torch.testing.assert_close(layer(x), layer.to_dense()(x), rtol=0.02, atol=0.02)
        packs.append([*pattern_of(layer.offsets, layer.columns).packs.by_order.values()])
    for earlier, later in zip(packs[:2], packs[2:], strict=True):
        assert [*map(id, earlier)] == [*map(id, later)]


def test_plans_of_another_index_are_refused() -> None:
    with pytest.raises(FormatError, match="found different ones"):
        share_plans(*[index_of(torch.eye(4, dtype=torch.bool).roll(turn, 1)) for turn in (0, 1)])


@pytest.mark.parametrize("reason", ["no compiler", "unwritable", "damaged"])
def test_an_extension_that_cannot_be_made_leaves_the_path_in_python(reason, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    cache = tmp_path / ("file" if reason == "unwritable" else "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("CXX", "/no/compiler" if reason == "no compiler" else "c++")
    if reason == "damaged":
        monkeypatch.setattr(front_extension.subprocess, "run", compile_nothing)
    with pytest.warns(UserWarning, match="in Python"):
        assert front_extension.compiled_type.__wrapped__() is None


def compile_nothing(command: list[str], **options: Any) -> None:
    """Write an empty file where the compiler would write the extension."""
    Path(command[command.index("-o") + 1]).touch()


def layers() -> dict[str, Any]:
    """Layers in bf16 on a GPU, with a bias where they have one."""
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    dense = two_four(256, 512).cuda()
    return {
        "blocks of 64": BlockSparseLinear(512, 256, block=64, sparsity=0.5, **bf16),
        "blocks of 16": BlockSparseLinear(512, 256, block=16, sparsity=0.5, bias=False, **bf16),
        "frozen": BlockSparseLinear(512, 256, block=32, sparsity=0.5, **bf16).freeze(),
        "2:4": SpenseLinear.from_dense(dense, bias=torch.randn(256, **bf16)),
        "half 2:4": SpenseLinear.from_dense(dense, dense_fraction=0.5),
        "half 2:4 by columns": SpenseLinear.from_dense(dense, dense_fraction=0.5, split="columns"),
        "2:4 in fp8": SpenseLinear.from_dense(dense, dtype=torch.float8_e4m3fn),
        "bitmap": BitmapLinear.from_dense(dense, torch.randn(256, **bf16)),
        "MLP of blocks": mlp_in_blocks(256, 512, **bf16),
        "MLP of 2:4": mlp_in_two_four(256, 512).cuda(),
    }


@pytest.fixture(params=["1", "0"], ids=["extension", "Python"])
def extension(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Repeat calls by front.cpp, and then without it."""
    monkeypatch.setenv("SPARSEBENCH_FRONT", request.param)
    return str(request.param)


def assert_near(y: torch.Tensor, right: torch.Tensor, part: float = 0.02) -> None:
    torch.testing.assert_close(y, right, rtol=part, atol=part * float(right.abs().max()))


LAYERS = *("blocks of 64", "blocks of 16", "frozen"), *("2:4", "half 2:4", "half 2:4 by columns")
MLPS = "MLP of blocks", "MLP of 2:4"


@hopper
@pytest.mark.parametrize("name", [*LAYERS, "bitmap", "2:4 in fp8", *MLPS])
def test_repeated_calls_equal_first_ones_on_a_gpu(name, extension, monkeypatch) -> None:
    layer = layers()[name]
    for shape in ((1,), (40,), (2, 3), (300,)):
        x = torch.randn(*shape, 512, device="cuda").bfloat16()
        with torch.no_grad(), monkeypatch.context() as patch:
            patch.setenv("SPARSEBENCH_FRONT", "0")
            right = copy.deepcopy(layer)(x)
            assert_near(right, dense_of(layer)(x), 0.1 if "fp8" in name else 0.02)
        for _ in range(4):
            with torch.no_grad():
                assert torch.equal(layer(x), right)
            x = x.clone()  # at another address
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            for _ in range(3):
                assert torch.equal(layer(x), right)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = layer(x)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, right)


@hopper
@pytest.mark.filterwarnings("ignore")  # of inductor
@pytest.mark.parametrize("name", ["blocks of 16", "frozen", "half 2:4", "bitmap", *MLPS])
def test_a_first_call_by_reduce_overhead_leaves_nothing_in_the_pool_of_its_graph_on_a_gpu(name):
    layer = layers()[name]
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(5, 512, device="cuda").bfloat16()
            y = compiled(x).clone()
            assert_near(y, dense_of(layer)(x))
    torch._dynamo.reset()


@hopper
@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("name", [*LAYERS, "bitmap"])
def test_a_planned_layer_that_is_moved_cast_written_or_shared_is_right_on_a_gpu(name: str) -> None:
    layer, other = layers()[name], layers()[name]
    x = torch.randn(5, 512, device="cuda").bfloat16()

    def check(called: Any = layer) -> None:
        for _ in range(4):
            torch.testing.assert_close(called(x), called.to_dense()(x), rtol=0.02, atol=0.5)

    with torch.no_grad():
        check()
        layer.cpu().cuda()
        check()
        first = copy.deepcopy(layer)
        layer.load_state_dict(other.state_dict())
        check()
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            tensor.data = copy.deepcopy(first.state_dict()[name])  # torch counts no write
        check()
        twin = copy.copy(layer)  # the same tensors
        twin._parameters, twin._buffers = layer._parameters.copy(), layer._buffers.copy()
        check(twin)
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.copy_(tensor.clone())  # a write that torch counts
        check()
        check(twin)
        if isinstance(layer, BlockSparseLinear):
            layer.half()
            x = x.half()
        else:
            with pytest.raises(Unsupported):
                layer.half()
        check()


@hopper
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("name", [*LAYERS, "bitmap", *MLPS])
def test_a_capture_may_be_the_first_call_on_a_gpu(name: str, mode: str) -> None:
    layer, graph = layers()[name], torch.cuda.CUDAGraph()
    x = torch.randn(100, 512, device="cuda").bfloat16()
    with torch.no_grad():
        with torch.cuda.graph(graph, capture_error_mode=mode):
            y = layer(x)
        graph.replay()
        assert_near(y, dense_of(layer)(x))
        assert torch.equal(layer(x), y)


@hopper
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["frozen", "2:4", "half 2:4", "bitmap", "MLP of 2:4"])
def test_a_call_waits_for_nothing_if_there_is_a_plan_for_more_tokens_on_a_gpu(name: str) -> None:
    layer = layers()[name].plan([256], search=False)
    large, x = (torch.randn(m, 512, device="cuda").bfloat16() for m in (256, 200))
    right = dense_of(layer)(x)
    with torch.no_grad():
        layer(large)  # makes the counters of the device
        torch.cuda.set_sync_debug_mode("error")
        try:
            first = layer(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for y in (first, layer(x), layer(x)):  # the second call has its own plan
            assert_near(y, right)


@hopper
@pytest.mark.usefixtures("extension")
def test_a_written_weight_is_packed_again_by_matmul_on_a_gpu() -> None:
    dense = torch.randn(256, 512, device="cuda").bfloat16()
    w, x = Bsr.from_dense(dense, block=16), torch.randn(8, 512, device="cuda").bfloat16()
    for factor in (1, 2):
        for _ in range(4):
            expected = x @ w.to_dense().T
            torch.testing.assert_close(sparsebench.matmul(x, w), expected, rtol=0.02, atol=0.5)
        w.values.mul_(factor + 1)


# ---- training ----


def times(w: Bsr, x: torch.Tensor) -> torch.Tensor:
    return sparsebench.matmul(x, w)


def trained(name: str) -> Any:
    """Return a function of X whose gradients are recorded."""
    if name == "matmul":
        w = Bsr.from_dense(torch.randn(256, 512, device="cuda").bfloat16(), block=32)
        w.values.requires_grad_()
        return partial(times, w)
    layer = layers()[name]
    if name == "frozen":
        layer.bias.requires_grad_()
    return layer


def parameters_of(function: Any) -> list[torch.Tensor]:
    every = [function.args[0].values] if isinstance(function, partial) else function.parameters()
    return [p for p in every if p.requires_grad]


def gradients(function: Any, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters_of(function)], dy)]


@hopper
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # first in autograd's thread
@pytest.mark.parametrize("name", [*LAYERS, "bitmap", "matmul", *MLPS])
def test_repeated_gradients_equal_those_of_first_calls_on_a_gpu(
    name, extension, monkeypatch
) -> None:
    function = trained(name)
    for shape in ((40,), (2, 3), (300,)):
        x = torch.randn(*shape, 512, device="cuda").bfloat16().requires_grad_()
        y = function(x)
        dy = torch.randn_like(y)
        for _ in range(5):  # plans, records forward, records backward, and repeats
            with torch.no_grad():
                for p in parameters_of(function):
                    p.mul_(1.5)  # a step of an optimizer
            results = gradients(function, x, dy)
            with monkeypatch.context() as patch:
                patch.setattr(Recordings, "call", in_python)
                right = gradients(copy.deepcopy(function), x, dy)
            if name == "bitmap":  # the path in Python multiplies by the dense copy
                torch.testing.assert_close(results, right, rtol=0.02, atol=0.5)
            else:
                assert all(map(torch.equal, results, right))
        if name != "matmul":
            assert_near(results[1], torch.autograd.grad(dense_of(function)(x), x, dy)[0])
        node: Any = function(x).grad_fn
        by_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        in_cpp = not by_python and "CppNode" in node.name()
        assert in_cpp == (extension == "1") or name in MLPS


def in_python(self: Any, arguments: Any, conditions: Any, run: Any, call: Any) -> Any:
    """Take the place of Recordings.call: make the call in Python."""
    return call()


@hopper
@pytest.mark.usefixtures("extension")
def test_recorded_training_sees_checkpoints_and_writes_on_a_gpu() -> None:
    layer = layers()["blocks of 64"]
    x = torch.randn(40, 512, device="cuda").bfloat16().requires_grad_()
    for _ in range(5):
        layer(x).sum().backward()
    expected = torch.autograd.grad(layer.to_dense()(x).sum(), x)[0]
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected, rtol=0.02, atol=0.5)
    y = layer(x)
    with torch.no_grad():
        layer.values.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


@hopper
@pytest.mark.usefixtures("extension")
def test_a_recorded_forward_has_a_captured_backward_on_a_gpu() -> None:
    layer = layers()["blocks of 16"]
    x = torch.randn(40, 512, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(40, 256, device="cuda").bfloat16()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            (expected,) = torch.autograd.grad(layer(x), x, dy)
        y = layer(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        (captured,) = torch.autograd.grad(y, x, dy)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


@hopper
@pytest.mark.usefixtures("extension")
def test_a_pattern_that_is_set_after_recording_has_its_own_gradients_on_a_gpu() -> None:
    layer = layers()["blocks of 16"]
    x = torch.randn(40, 512, device="cuda").bfloat16().requires_grad_()
    for _ in range(4):
        layer(x).sum().backward()
    other = BlockSparseLinear(512, 256, block=16, sparsity=0.25)
    layer.set_pattern(other.offsets, other.columns)
    for _ in range(4):
        layer.values.grad = None
        layer(x).sum().backward()
        assert layer.values.grad.shape == layer.values.shape
        dense = layer.to_dense()
        dense(x).sum().backward()
        right = layer.bsr.sample(dense.weight.grad).values
        torch.testing.assert_close(layer.values.grad, right, rtol=0.02, atol=0.5)
