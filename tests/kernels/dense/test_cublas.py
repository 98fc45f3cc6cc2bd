"""The dense baseline on the CPU: its ways, the requests to cuBLASLt, and what the row records.

cuBLASLt is emulated (tests/emulation/cublaslt_on_cpu.py). Tests marked gpu call the library.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.elementwise import rounded_sums
from sparsebench.kernels._common.search import FINALISTS, Search, Trial
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, poison, sum_scale
from sparsebench.kernels.dense import _cublaslt, _gemm, cublas
from sparsebench.kernels.dense._gemm import DenseProduct, Way
from tests.emulation import cublaslt_on_cpu
from tests.emulation.cublaslt_on_cpu import ANY, TILED, VERSION

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = [(1, 16, 32), (3, 1, 5), (17, 9, 1), (1, 1, 1), (16, 40, 24)]
UNAVAILABLE = "needs nvmath: pip install 'sparsebench[gpu]'"


@pytest.fixture(autouse=True)
def _no_finalists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test search again."""
    monkeypatch.setattr(_gemm, "_finalists", {})


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products on the CPU call the emulation as they call cuBLASLt on a GPU."""
    bindings = SimpleNamespace(cublasLt=cublaslt_on_cpu)
    monkeypatch.setitem(sys.modules, "nvmath", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "nvmath.bindings", bindings)
    monkeypatch.setattr(_cublaslt, "unavailable", lambda: None)
    monkeypatch.setattr(_cublaslt, "_handle", lambda device: 1)
    monkeypatch.setattr(_gemm, "_on_gpu", lambda product: True)
    monkeypatch.setattr(_gemm, "preferred", lambda library: nullcontext())
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


def drawn(*shape: int, dtype: str) -> Tensor:
    if dtype == "int8":
        return torch.randint(-127, 128, shape, dtype=torch.int8)
    return torch.randn(shape).to(DTYPES[dtype])


def product_of(op: str, m: int, n: int, k: int, dtype: str = "fp32", **more: Any) -> DenseProduct:
    arguments = {
        "linear": {"w": (n, k), "x": (m, k)},
        "linear_active": {"w": (n, k), "x": (m, k)},
        "linear_dgrad": {"w": (n, k), "dy": (m, n)},
        "linear_wgrad": {"dy": (m, n), "x": (m, k)},
    }[op]
    a, b = cublas.PRODUCTS[op](**{name: drawn(*s, dtype=dtype) for name, s in arguments.items()})
    poison(out := torch.empty(len(a), b.shape[1], dtype=OUTPUTS[dtype]))
    return DenseProduct(a, b, out, op != "linear_wgrad", **more)


def right(product: DenseProduct) -> Tensor:
    return product.scale * (product.a.double() @ product.b.double())


def right_int8(product: DenseProduct) -> Tensor:
    """Return the product of int64, scaled, rounded to the nearest even step, saturated."""
    sums = (product.a.cpu().long() @ product.b.cpu().long()).double()
    return (product.scale * sums).round().clamp(-128, 127).to(torch.int8)


def taking(monkeypatch: pytest.MonkeyPatch, matches: Callable[[Way], bool]) -> list[Way]:
    """Let the search keep the first matching way; return the list of the ways that it times."""
    seen: list[Way] = []
    ways_of = _gemm.ways_of

    def noted(product: DenseProduct, layout: Any) -> list[Way]:
        ways = ways_of(product, layout)
        seen.extend(ways)
        return ways

    def chosen(calls: Sequence[object], device: torch.device) -> Search:
        assert len(calls) == len(seen)
        seen.sort(key=lambda way: way.algorithm is not None)
        best = next(i for i, way in enumerate(seen) if matches(way))
        return Search(best, (Trial(1.0),) * len(calls))

    monkeypatch.setattr(_gemm, "ways_of", noted)
    monkeypatch.setattr(_gemm, "screened", lambda calls, *_: [*range(len(calls))])
    monkeypatch.setattr(_gemm, "searched", chosen)
    return seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", cublas.PRODUCTS)
@pytest.mark.usefixtures("emulated")
def test_every_way_computes_the_product_of_redrawn_activations(op, shape, monkeypatch) -> None:
    product = product_of(op, *shape)
    seen = taking(monkeypatch, lambda way: True)
    _gemm.fastest_way(product)
    assert {way.library for way in seen} == {"cublas", "cublaslt"}
    for way in seen:
        launch = _gemm.fastest_way(product, _gemm._choice(way, product))
        product.a.normal_()
        product.out.fill_(torch.nan)
        assert launch() is product.out
        torch.testing.assert_close(product.out.double(), right(product), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8"])
@pytest.mark.usefixtures("emulated")
def test_every_way_is_right_in_16_bits_and_in_scaled_fp8(dtype, monkeypatch) -> None:
    product = product_of("linear", 5, 32, 48, dtype, scale=0.25 if dtype == "fp8" else 1.0)
    seen = taking(monkeypatch, lambda way: True)
    _gemm.fastest_way(product)
    direct = [way for way in seen if way.algorithm]
    assert {way.weights for way in direct} == ({"rows"} if dtype == "fp8" else {"rows", "columns"})
    accumulations = {True, False} if dtype == "fp8" else {None}
    assert {way.use_fast_accum for way in seen} == accumulations
    for way in seen:
        launch = _gemm.fastest_way(product, _gemm._choice(way, product))
        torch.testing.assert_close(launch().double(), right(product), rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize("shape", [(1, 32, 64), (16, 48, 32), (40, 32, 2064)])
@pytest.mark.usefixtures("emulated")
def test_every_way_in_int8_is_that_of_int64(shape, monkeypatch) -> None:
    product = product_of("linear", *shape, "int8", scale=2 * sum_scale("int8", shape[2]))
    seen = taking(monkeypatch, lambda way: True)
    _gemm.fastest_way(product)
    assert {way.weights for way in seen} == {"rows"}
    assert {(way.algorithm is None, way.sums) for way in seen} == {
        (True, "int32"),
        (False, "int32"),
        (False, None),
    }
    for way in seen:
        launch = _gemm.fastest_way(product, json.loads(json.dumps(_gemm._choice(way, product))))
        for _ in range(2):
            poison(product.out)
            assert torch.equal(launch(), right_int8(product)), way
            product.a.copy_(drawn(*product.a.shape, dtype="int8"))


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", [(1, 8), (33, 200)])
def test_int32_sums_are_rounded_to_even_and_saturate(shape: tuple[int, int]) -> None:
    sums = torch.randint(-(2**12), 2**12, shape, dtype=torch.int32)
    sums[0, :4] = torch.tensor([16, -16, 48, 2**31 - 1], dtype=torch.int32)  # halves at 2^-5
    poison(out := torch.empty(shape, dtype=torch.int8))
    rounded_sums(sums, out, 2.0**-5)()
    expected = (sums.double() / 32).round().clamp(-128, 127)
    assert torch.equal(out.double(), expected)
    assert out[0, :4].tolist() == [0, 0, 2, 127]


@pytest.mark.usefixtures("emulated")
def test_relu_is_part_of_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    product = product_of("linear", 4, 8, 16, relu=True)
    seen = taking(monkeypatch, lambda way: True)
    _gemm.fastest_way(product)
    for way in seen:
        launch = _gemm.fastest_way(product, _gemm._choice(way, product))
        torch.testing.assert_close(launch().double(), right(product).relu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n", "combined"), [(32, True), (1 << 26, False)])
@pytest.mark.usefixtures("emulated")
def test_short_products_also_try_combinations_that_are_never_proposed(n, combined) -> None:
    a, b, out = (torch.empty(shape, device="meta") for shape in ((16, 128), (128, n), (16, n)))
    gemm = DenseProduct(a, b, out).gemms[None]
    algorithms = _gemm._algorithms(gemm)
    proposed = {algorithm for algorithm, tokens in algorithms if tokens is not None}
    others = {algorithm for algorithm, tokens in algorithms if tokens is None} - proposed
    assert {(each.tile, each.option) for each in proposed if each.id == TILED} > {(16, 1), (32, 0)}
    assert ((32, 1) in {(each.tile, each.option) for each in others}) == combined


@pytest.mark.parametrize("left", [torch.nan, 1.0])
@pytest.mark.usefixtures("emulated")
def test_a_combination_that_is_wrong_is_not_timed(left, monkeypatch) -> None:
    product = product_of("linear", 16, 32, 48)
    bind, timed = _cublaslt.bind, []

    def broken(gemm: Any, algorithm: Any, space: Any = None) -> Callable[[], Tensor]:
        wrong = (algorithm.tile, algorithm.option) == (32, 1)
        return (lambda: product.out.fill_(left)) if wrong else bind(gemm, algorithm, space)

    monkeypatch.setattr(_cublaslt, "bind", broken)
    seen = taking(monkeypatch, lambda way: True)
    monkeypatch.setattr(_gemm, "searched", lambda calls, _: timed.extend(calls) or Search(0))
    _gemm.fastest_way(product)
    assert len(timed) == len(seen) - len(_gemm.LAYOUTS)


@pytest.mark.usefixtures("emulated")
def test_a_pinned_choice_is_called_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    product = product_of("linear", 16, 32, 48)
    taking(monkeypatch, lambda way: way.weights == "columns" and way.tokens == 32)
    launch = _gemm.fastest_way(product)
    assert launch.candidates[0]["choice"] == {"library": "cublas", "weights": "rows"}
    assert [line["choice"].get("tokens") for line in launch.candidates if "kept" in line] == [32]
    assert launch.choice == {
        "library": "cublaslt",
        "weights": "columns",
        "algorithm": {
            **{"id": TILED, "tile": 32, "split_k": 1, "reduction": 0, "swizzle": 0},
            **{"option": 0, "stages": 5, "inner_shape": 2, "cluster_shape": 3},
        },
        "tokens": 32,
        "version": VERSION,
    }
    monkeypatch.setattr(_gemm, "searched", None)  # a search would raise
    again = _gemm.fastest_way(product, json.loads(json.dumps(launch.choice)))
    assert again.choice == launch.choice
    assert torch.equal(launch().clone(), again())


@pytest.mark.usefixtures("emulated")
def test_an_equal_product_is_searched_only_among_the_finalists(monkeypatch) -> None:
    seen = taking(monkeypatch, lambda way: True)
    times_us = {3: 9.5, 4: 9.0, 5: 9.9}  # the others take 20
    timed: list[int] = []

    def searched(calls: Sequence[Callable[[], object]], device: torch.device) -> Search:
        timed.append(len(calls))
        took_us = [times_us.get(i, 20.0) if len(calls) > 4 else 9.0 for i in range(len(calls))]
        trials = tuple(map(Trial, took_us))
        return Search(took_us.index(min(took_us)), trials)

    monkeypatch.setattr(_gemm, "searched", searched)
    product = product_of("linear", 16, 32, 48)
    first = _gemm.fastest_way(product)
    queried = len(seen)
    again = _gemm.fastest_way(replace(product))
    assert len(seen) == queried, "cuBLASLt was queried again"
    assert timed == [queried, 4]  # the default and three within NEAR
    assert again.candidates[0]["choice"] == first.candidates[0]["choice"]
    assert first.choice in [line["choice"] for line in again.candidates]
    _gemm.fastest_way(product_of("linear", 17, 32, 48))
    assert len(timed) == 3
    assert timed[2] > 4


@pytest.mark.usefixtures("emulated")
def test_a_later_process_times_only_the_finalists(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = taking(monkeypatch, lambda way: True)
    timed: list[int] = []

    def searched(calls: Sequence[Callable[[], object]], device: torch.device) -> Search:
        timed.append(len(calls))
        took_us = [9.0 + 0.05 * i for i in range(len(calls))]
        return Search(2, tuple(map(Trial, took_us)))

    monkeypatch.setattr(_gemm, "searched", searched)
    product = product_of("linear", 16, 32, 48)
    first = _gemm.fastest_way(product)
    monkeypatch.setattr(_gemm, "_finalists", {})  # another process
    queried, candidates = len(seen), json.loads(json.dumps(first.candidates))
    again = _gemm.fastest_way(replace(product), timed=candidates)
    assert len(seen) == queried, "cuBLASLt was queried again"
    near = sum(9.0 + 0.05 * i <= 1.1 * 9.0 for i in range(queried))
    assert timed == [queried, min(near, FINALISTS)]
    choices = [line["choice"] for line in first.candidates if "choice" in line]
    assert all(line["choice"] in choices for line in again.candidates)
    assert again.choice == again.candidates[2]["choice"]  # by the times of this process


@pytest.mark.usefixtures("emulated")
def test_an_algorithm_that_the_library_refuses_is_unsupported() -> None:
    product = product_of("linear", 16, 32, 48)
    pinned = {"library": "cublaslt", "algorithm": {"id": TILED, "tile": 8}}
    with pytest.raises(Unsupported, match=f"cuBLASLt {VERSION} does not accept the algorithm"):
        _gemm.fastest_way(product, pinned)


@pytest.mark.usefixtures("emulated")
def test_without_nvmath_the_row_says_that_cublaslt_was_not_called_directly(monkeypatch) -> None:
    monkeypatch.setattr(_cublaslt, "unavailable", lambda: UNAVAILABLE)
    product = product_of("linear", 16, 32, 48)
    seen = taking(monkeypatch, lambda way: True)
    launch = _gemm.fastest_way(product)
    assert [way.algorithm for way in seen] == [None] * 4
    assert launch.choice == {
        "library": "cublas",
        "weights": "rows",
        "untried": f"cuBLASLt called directly: {UNAVAILABLE}",
    }
    direct = {"library": "cublaslt", "algorithm": {"id": ANY}}
    with pytest.raises(Unsupported, match="needs nvmath"):
        _gemm.fastest_way(product, direct)


def test_a_choice_of_an_older_run_is_accepted() -> None:
    product = product_of("linear", 3, 8, 16)
    launch = _gemm.fastest_way(product, {"library": "cublas"})
    assert launch.choice == {"library": "cublas"}
    torch.testing.assert_close(launch().double(), right(product), rtol=1e-5, atol=1e-5)


# ---- on a GPU ----


def on_gpu(product: DenseProduct) -> DenseProduct:
    """Move the operands, keeping which of their sides is contiguous."""
    return replace(product, **{n: getattr(product, n).to(CUDA) for n in ("a", "b", "out")})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "tf32", "fp8"])
@pytest.mark.parametrize("shape", [(1, 64, 128), (3, 1000, 336), (17, 80, 4112), (1000, 528, 48)])
@pytest.mark.parametrize("op", cublas.PRODUCTS)
def test_every_way_is_right_in_a_graph_on_a_gpu(op, shape, dtype, monkeypatch) -> None:
    if dtype == "fp8" and (op != "linear" or cublas.unsupported_8_bits("fp8", CUDA)):
        pytest.skip("fp8 needs op linear and a device that supports it")
    if dtype == "fp8" and shape[1] % 16:
        pytest.skip("cuBLASLt multiplies fp8 with n in multiples of 16")
    product = on_gpu(product_of(op, *shape, dtype, tf32=dtype == "tf32"))
    seen = taking(monkeypatch, lambda way: True)
    _gemm.fastest_way(product)
    for way in [*seen[:4], *seen[4::20]]:  # of up to a thousand
        launch, graph = (
            _gemm.fastest_way(product, _gemm._choice(way, product)),
            torch.cuda.CUDAGraph(),
        )
        launch()
        with torch.cuda.graph(graph):
            launch()
        product.a.copy_(torch.randn(product.a.shape))
        product.out.fill_(torch.nan)
        graph.replay()
        error = (product.out.double() - right(product)).norm() / right(product).norm()
        assert error < {"fp32": 1e-6, "tf32": 1e-3, "fp16": 1e-3}.get(dtype, 8e-3), way


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 64, 128), (16, 4096, 512), (17, 80, 4112), (1000, 528, 48)])
def test_every_way_in_int8_is_that_of_int64_in_a_graph_on_a_gpu(shape, monkeypatch) -> None:
    product = on_gpu(product_of("linear", *shape, "int8", scale=sum_scale("int8", shape[2])))
    seen = taking(monkeypatch, lambda way: True)
    _gemm.fastest_way(product)
    assert any(way.algorithm and way.sums is None for way in seen), "cuBLASLt proposes no int8 call"
    for way in [seen[0], *seen[1::10]]:
        launch = _gemm.fastest_way(product, _gemm._choice(way, product))
        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        product.a.copy_(drawn(*product.a.shape, dtype="int8"))
        poison(product.out)
        graph.replay()
        assert torch.equal(product.out.cpu(), right_int8(product)), way


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 1001, 333), (17, 13, 7), (1, 1, 5)])
def test_odd_sizes_are_right_on_a_gpu(shape: tuple[int, int, int]) -> None:
    for op in cublas.PRODUCTS:
        product = on_gpu(product_of(op, *shape, "bf16"))
        launch = _gemm.fastest_way(product)
        again = _gemm.fastest_way(product, json.loads(json.dumps(launch.choice)))
        for call in (launch, again):
            product.out.fill_(torch.nan)
            torch.testing.assert_close(call().double(), right(product), rtol=8e-3, atol=8e-2)
