"""bsr_ffn, a layer of two block-sparse products: in Triton's interpreter, on a CPU and on a GPU."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.search import Search
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr import bsr_ffn
from sparsebench.results.record import Problem, Value
from tests.compiling.nvcc import hopper
from tests.kernels.layers import CPU, assert_right, assert_right_twice, operands_for, problem_of
from tests.tools.marks import sampled

CUDA = torch.device("cuda", 0)


def problem(m: int, n: int, k: int, dtype: str, block: Any, **more: Value) -> Problem:
    fields = {"m": m, "n": n, "k": k, "dtype": dtype, "block": block, "pattern": "blocks"}
    return problem_of("ffn", **{**fields, "sparsity": 0.5, "activation": "relu", **more})


def operands_of(problem: Problem, device: torch.device = CPU) -> Operands:
    packed = partial(Bsr.from_dense, block=problem["block"])
    return operands_for(problem, device, dict.fromkeys(("wg", "wu", "wd"), packed))


# ---- in Triton's interpreter ----


# Blocks that divide n and k, that do not, and a layer with few units on.
LAYERS: list[tuple[Any, ...]] = [
    (20, 128, 96, "fp16", 32, {"activation": "silu"}),
    (5, 120, 72, "fp32", [32, 16], {"activation": "relu2"}),
    (3, 72, 56, "fp16", 16, {}),
    (40, 256, 128, "fp32", 16, {"active": 20.0, "sparsity": 0.75}),
]


@pytest.mark.interpreted
@pytest.mark.parametrize(("m", "n", "k", "dtype", "block", "more"), sampled(LAYERS, 1, 2, 3))
def test_interpreted_layers_are_right(m, n, k, dtype, block, more) -> None:
    launch = assert_right_twice(
        operands_of(problem(m, n, k, dtype, block, **more)), bsr_ffn.prepare
    )
    assert {each["kernel"] for each in launch.choice.values()} == {"bsr_triton"}


# ---- on a CPU ----


def test_gate_and_up_of_different_blocks_are_refused() -> None:
    gate, up = (Bsr.from_dense(torch.ones(64, 64), block=side) for side in (16, 32))
    with pytest.raises(Unsupported, match="gate and up of the same blocks, found 16x16 and 32x32"):
        bsr_ffn.stacked(gate, up)


def test_a_product_uses_the_fastest_kernel_that_can_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    these = operands_of(problem(4, 64, 32, "fp32", 16))
    calls: list[Any] = []

    def module(name: str, reason: str | None) -> Any:
        def prepare(inputs: Operands, *, tuned: bool) -> Launch:
            calls.append((name, inputs.pinned, tuned))
            if name == "third":
                raise Unsupported("not of these blocks")
            return Launch(lambda: torch.zeros(1), {"of": name}, name)

        return SimpleNamespace(
            KERNEL=Kernel("linear", "bsr", "any", prepare, lambda *_: reason), prepare=prepare
        )

    modules = {name: module(name, None) for name in ("first", "second", "third")}
    modules["fourth"] = module("fourth", "not on this device")
    monkeypatch.setattr(bsr_ffn, "PRODUCTS", modules)
    monkeypatch.setattr(bsr_ffn, "search", lambda launches, device: Search(len(launches) - 1))
    w, x = these.weights["wd"], these.activations["x"]
    assert isinstance(w, Bsr)
    launch = bsr_ffn.fastest(these, "down", w, x, False)
    assert (launch.choice, launch.code) == ({"kernel": "second", "of": "second"}, "second")
    assert calls == [(name, None, False) for name in ("first", "second", "third")]
    pinned = {"down": {"kernel": "first"}}
    launch = bsr_ffn.fastest(replace(these, pinned=pinned), "down", w, x, True)
    assert launch.choice["kernel"] == "first"
    monkeypatch.setattr(bsr_ffn, "PRODUCTS", {n: modules[n] for n in ("third", "fourth")})
    reasons = "down: third: not of these blocks; fourth: not on this device"
    with pytest.raises(Unsupported, match=reasons):
        bsr_ffn.fastest(these, "down", w, x, True)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 300, 2048])
@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize(("dtype", "activation"), [("bf16", "silu"), ("fp16", "relu2")])
def test_a_gpu_computes_the_layer(m: int, block: int, dtype: str, activation: str) -> None:
    layer = problem(m, 1024, 512, dtype, block, activation=activation)
    launch = assert_right_twice(operands_of(layer, CUDA), bsr_ffn.prepare)
    y = launch()
    assert isinstance(y, torch.Tensor)
    expected, graph = y.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch()
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, expected)


@hopper
@pytest.mark.parametrize("kernel", bsr_ffn.PRODUCTS)
def test_a_hopper_gpu_computes_it_by_each_kernel(kernel, monkeypatch) -> None:
    layer = problem(200, 1000, 512, "bf16", 64, active=30.0)
    these = operands_of(layer, CUDA)
    monkeypatch.setattr(bsr_ffn, "PRODUCTS", {kernel: bsr_ffn.PRODUCTS[kernel]})
    launch = bsr_ffn.prepare(these, tuned=False)
    assert [each["kernel"] for each in launch.choice.values()] == [kernel, kernel]
    assert_right(launch, these)
