"""SparseGatedMLP on a GPU: compared with dense layers, captured, recorded, and large."""

import copy
from typing import Any

import pytest
import torch

from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.kernels.twell import _index
from tests.kernels.nn.gated_mlp_examples import (
    CASES,
    GPU,
    Dense,
    assert_correct,
    assert_nan_as_in_dense,
    assert_near,
    draw,
    expected_of,
    gradient_of,
    step,
    units_on,
)

pytestmark = pytest.mark.gpu
ON_GPU = [
    *[(*case, dtype) for case in CASES for dtype in ("bfloat16", "float16")],
    *[(300, 1024, 512, slots, 2.0, "bfloat16") for slots in (60, 16, 1)],
    *[(4096, 5632, 2048, slots, 2.57, "bfloat16") for slots in (88, 8)],
    (1000, 1000, 3000, 30, 2.3, "float16"),
    (200, 136, 72, 20, 1.5, "float32"),
]


def on_gpu(m: int, n: int, k: int, slots: int, rarity: float, dtype: str, **more: Any) -> Any:
    kind = getattr(torch, dtype)
    return draw(m, n, k, slots, rarity=rarity, dtype=kind, device=GPU, **more)


def poison() -> None:
    """Fill the memory that torch allocates next with NaN."""
    sizes = 2**12, 2**16, 2**20, 2**24, 2**28
    blocks = [torch.full((size,), float("nan"), device=GPU) for size in sizes]
    del blocks


@pytest.mark.parametrize(("m", "n", "k", "slots", "rarity", "dtype"), ON_GPU)
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_a_gpu_equals_dense_layers_in_fp64(m, n, k, slots, rarity, dtype, activation) -> None:
    mlp, x = on_gpu(m, n, k, slots, rarity, dtype, activation=activation)
    poison()
    results = assert_correct(mlp, x)
    poison()
    assert all(map(torch.equal, results, step(mlp, x)))
    for mlp.sparse in (True, False):
        mlp.active.zero_()
        assert_near(step(mlp, x), results, 2e-2)
        assert int(mlp.active) == units_on(mlp, x)


@pytest.mark.parametrize("slots", [60, 1])
def test_nan_is_where_dense_layers_have_it_on_a_gpu(slots) -> None:
    mlp, x = on_gpu(300, 1024, 512, slots, 2.0, "bfloat16")
    x[7, 3] = float("nan")
    assert_nan_as_in_dense(mlp, x)


@pytest.mark.filterwarnings("default")  # warnings of inductor itself
def test_a_gpu_compiles_the_layer_into_one_graph() -> None:
    mlp, x = on_gpu(300, 1024, 512, 60, 2.0, "bfloat16")
    whole = torch.compile(mlp, fullgraph=True)
    for mlp.sparse in (True, False):
        expected = step(mlp, x)
        mlp.active.zero_()
        assert_near(step(whole, x), expected, 1e-2)
        assert int(mlp.active) == units_on(mlp, x)


def test_a_captured_step_can_be_sparse_or_dense() -> None:
    mlp, x = on_gpu(300, 1024, 512, 60, 2.0, "bfloat16")
    many = x.clone()
    many[:, 0] = -4.0  # more active units than slots
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(mlp, x)
    torch.cuda.current_stream().wait_stream(side)
    graph, inputs = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step(mlp, inputs)
    for batch in (many, x, many):
        inputs.copy_(batch)
        mlp.active.zero_()
        graph.replay()
        assert int(mlp.active) == units_on(mlp, batch)
        assert all(map(torch.equal, results, step(mlp, batch)))


@pytest.mark.parametrize("slots", [60, 1])
def test_a_step_is_repeated_for_any_address_stream_and_number_of_tokens(slots) -> None:
    mlp, x = on_gpu(300, 1024, 512, slots, 2.0, "bfloat16")
    expected = {m: step(mlp, x[:m]) for m in (300, 33, 1)}
    stream = torch.cuda.Stream()
    for m in (300, 300, 33, 1, 33):  # a plan passes tensors to Triton in its first call
        inputs, dy = (torch.empty(m * 512 + i, dtype=x.dtype, device=GPU)[i:] for i in (1, 3))
        inputs = inputs.view(m, 512).copy_(x[:m]).requires_grad_()
        dy = dy.view(m, 512).copy_(gradient_of(x[:m]))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y, l1 = mlp(inputs, l1=True)
            leaves, grads = [inputs, *mlp.parameters()], [dy, l1.new_tensor(0.5)]
            for keep in (True, False):
                poison()
                results = torch.autograd.grad([y, l1], leaves, grads, retain_graph=keep)
                assert all(map(torch.equal, (y, l1, *results), expected[m]))
            strided = mlp(inputs).sum()  # its gradient has strides of zero
            ones = torch.autograd.grad((mlp(inputs) * torch.ones_like(y)).sum(), leaves)
            assert all(map(torch.equal, torch.autograd.grad(strided, leaves), ones))
        stream.synchronize()


@pytest.mark.parametrize("m", [1, 16, 200, 513, 1500])
def test_recorded_calls_see_writes_and_new_modules_on_a_gpu(m: int) -> None:
    mlp, x = on_gpu(m, 5632, 2048, 60, 2.5, "bfloat16")

    def assert_right() -> None:
        whole = expected_of(mlp, x)
        right = Expected(whole.reference[:m], whole.spread[:m], x.dtype, 5632, rounded=True)
        for _ in range(4):
            poison()
            assert (reason := check(mlp(x), right).reason) is None, reason

    with torch.no_grad():
        assert_right()
        mlp.up.weight.mul_(2)
        assert_right()
        mlp.gate = copy.deepcopy(mlp.gate)
        mlp.gate.weight[:, 1] += 1
        assert_right()
        mlp.activation, mlp.slots = "relu2", 30
        assert_right()
        assert torch.equal(copy.deepcopy(mlp)(x), mlp(x))
    y = mlp(x)
    assert y.requires_grad  # with gradients, the layer trains


@pytest.mark.parametrize("slots", [88, 8])
def test_a_gpu_computes_matrices_of_two_billion_elements(slots) -> None:
    n, k = 5632, 2048
    m = _index.ELEMENTS // n
    mlp, _ = on_gpu(8, n, k, slots, 2.57, "bfloat16")
    dense = Dense(mlp)
    x = torch.randint(-2, 3, (m, k), device=GPU, dtype=torch.int8).bfloat16()
    x[:, 0] = 1
    dy = torch.randint(-8, 9, (m, k), device=GPU, dtype=torch.int8).bfloat16() / 8
    inputs = x.requires_grad_()
    y, l1 = mlp(inputs, l1=True)
    results = torch.autograd.grad([y, l1], [inputs, *mlp.parameters()], [dy, torch.ones_like(l1)])
    sums = [torch.zeros_like(w, dtype=torch.float64) for w in dense.parameters()]
    norm = 0.0
    for at in range(0, m, 2**15):
        of = slice(at, min(m, at + 2**15))
        part = x[of].detach().requires_grad_()
        right, mean = dense(part, l1=True)
        share = torch.full_like(mean, len(part) / m)
        leaves = [part, *dense.parameters()]
        dx, *rest = torch.autograd.grad([right, mean], leaves, [dy[of], share])
        assert_near((y[of], results[0][of]), (right, dx), 1e-2)
        for total, gradient in zip(sums, rest, strict=True):
            total += gradient
        norm += float(mean.detach() * share)
    assert_near(results[1:], tuple(sums), 1e-2)
    assert float(l1.detach()) == pytest.approx(norm, rel=1e-2)


def test_a_step_stores_a_tenth_of_dense_layers_and_peaks_lower() -> None:
    m, n, k = 16384, 5632, 2048
    mlp, x = on_gpu(m, n, k, 88, 2.57, "bfloat16")
    dense, dy, x = Dense(mlp), gradient_of(x), x.requires_grad_()
    stored, peaks = [], []
    for layer in (mlp, dense):
        for _ in range(2):  # the first one compiles
            layer.zero_grad(set_to_none=True)
            x.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y = layer(x)
            after = torch.cuda.memory_allocated() - before - y.nbytes
            y.backward(dy)
            peak = torch.cuda.max_memory_allocated() - before
            del y
        stored.append(after)
        peaks.append(peak)
    assert stored[0] <= 0.1 * stored[1], stored
    assert peaks[0] <= 0.7 * peaks[1], peaks
