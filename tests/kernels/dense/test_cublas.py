"""The dense baseline on the CPU: its ways, the requests to cuBLASLt, and what the row records.

cuBLASLt is emulated (tests/emulation/cublaslt_on_cpu.py). Tests marked gpu call the library.
"""

import json
import struct
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
from sparsebench.kernels._common import cuda, scratch
from sparsebench.kernels._common.search import Search, Trial
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, Launch, poison, sum_scale
from sparsebench.kernels.dense import _cublaslt, _gemm, cublas
from sparsebench.kernels.dense._cublaslt import Algorithm
from sparsebench.kernels.dense._gemm import DenseProduct, Way
from tests.emulation import cublaslt_on_cpu
from tests.emulation.cublaslt_on_cpu import ANY, TILED, VERSION

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = [(1, 16, 32), (3, 1, 5), (17, 9, 1), (1, 1, 1), (16, 40, 24)]
UNAVAILABLE = "needs nvmath: pip install 'sparsebench[gpu]'"


@pytest.fixture(autouse=True)
def _no_finalists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test search again."""
    monkeypatch.setattr(_gemm, "FINALISTS_OF", {})


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


def assert_right(y: Tensor, product: DenseProduct, eps: float = 1e-5) -> None:
    """Compare with fp64, or in int8 with int64, rounded to the nearest even step, saturated."""
    if y.dtype == torch.int8:
        sums = (product.a.cpu().long() @ product.b.cpu().long()).double()
        expected = (product.scale * sums).round().clamp(-128, 127).to(torch.int8)
        assert torch.equal(y.cpu(), expected)
    else:
        right = product.scale * (product.a.double() @ product.b.double())
        right = right.relu() if product.relu else right
        torch.testing.assert_close(y.double(), right, rtol=eps, atol=eps)


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
    monkeypatch.setattr(_gemm, "search", chosen)
    return seen


def every_way(product: DenseProduct, monkeypatch: Any) -> list[Way]:
    """Return the ways that a search times."""
    seen = taking(monkeypatch, lambda way: True)
    _gemm.fastest_way(product)
    return seen


def launch_of(way: Way, product: DenseProduct) -> Launch:
    """Return the launch of a way's choice, as a row has it."""
    return _gemm.fastest_way(product, json.loads(json.dumps(_gemm.choice_of(way, product))))


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "more"),
    [
        *((op, shape, "fp32", {}) for op in cublas.PRODUCTS for shape in SHAPES),
        ("linear", (4, 8, 16), "fp32", {"relu": True}),
        *(("linear", (5, 32, 48), dtype, {}) for dtype in ("fp16", "bf16")),
        ("linear", (5, 32, 48), "fp8", {"scale": 0.25}),
        *(
            ("linear", (m, n, k), "int8", {"scale": 2 * sum_scale("int8", k)})
            for m, n, k in ((1, 32, 64), (16, 48, 32), (40, 32, 2064))
        ),
    ],
)
@pytest.mark.usefixtures("emulated")
def test_every_way_computes_the_product_of_redrawn_activations(op, shape, dtype, more, monkeypatch):
    product = product_of(op, *shape, dtype, **more)
    ways = every_way(product, monkeypatch)
    for way in ways:
        launch = launch_of(way, product)
        for _ in range(2):
            poison(product.out)
            assert launch() is product.out
            assert_right(product.out, product, 1e-5 if dtype == "fp32" else 8e-3)
            product.a.copy_(drawn(*product.a.shape, dtype=dtype))
    layouts = {None} if op == "linear_wgrad" else {"rows", *([] if "8" in dtype else ["columns"])}
    assert {way.weights for way in ways if way.algorithm} == layouts
    assert {way.use_fast_accum for way in ways} == ({True, False} if dtype == "fp8" else {None})
    if dtype == "int8":
        assert all(way.algorithm for way in ways)
    elif dtype == "fp32":
        assert {way.library for way in ways} == {"cublas", "cublaslt"}


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
    monkeypatch.setattr(_gemm, "search", lambda calls, _: timed.extend(calls) or Search(0))
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
    monkeypatch.setattr(_gemm, "search", None)  # a search would raise
    again = _gemm.fastest_way(product, json.loads(json.dumps(launch.choice)))
    assert again.choice == launch.choice
    assert torch.equal(launch().clone(), again())


@pytest.mark.parametrize("later", [False, True], ids=["same process", "later process"])
@pytest.mark.usefixtures("emulated")
def test_an_equal_product_is_searched_only_among_the_finalists(later, monkeypatch) -> None:
    seen = taking(monkeypatch, lambda way: True)
    times_us = {3: 9.5, 4: 9.0, 5: 9.9}  # the others take 20
    timed: list[int] = []

    def searched(calls: Sequence[Callable[[], object]], device: torch.device) -> Search:
        timed.append(len(calls))
        took_us = [times_us.get(i, 20.0) if len(calls) > 4 else 9.0 for i in range(len(calls))]
        trials = tuple(map(Trial, took_us))
        return Search(took_us.index(min(took_us)), trials)

    monkeypatch.setattr(_gemm, "search", searched)
    product = product_of("linear", 16, 32, 48)
    first = _gemm.fastest_way(product)
    queried = len(seen)
    if later:
        _gemm.FINALISTS_OF.clear()
    candidates = json.loads(json.dumps(first.candidates))
    again = _gemm.fastest_way(replace(product), **({"timed": candidates} if later else {}))
    assert len(seen) == queried, "cuBLASLt was queried again"
    assert timed == [queried, 4]  # the default and three within NEAR
    assert again.candidates[0]["choice"] == first.candidates[0]["choice"]
    assert again.choice == again.candidates[0]["choice"]  # by the times of this search
    assert first.choice in [line["choice"] for line in again.candidates]
    _gemm.fastest_way(product_of("linear", 17, 32, 48))
    assert len(timed) == 3
    assert timed[2] > 4


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
    assert_right(launch(), product)


# ---- on a GPU ----


def on_gpu(product: DenseProduct) -> DenseProduct:
    """Move the operands, keeping which of their sides is contiguous."""
    return replace(product, **{n: getattr(product, n).to(CUDA) for n in ("a", "b", "out")})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "tf32", "fp8", "int8"])
@pytest.mark.parametrize("shape", [(1, 64, 128), (3, 1000, 336), (17, 80, 4112), (1000, 528, 48)])
@pytest.mark.parametrize("op", cublas.PRODUCTS)
def test_every_way_is_right_in_a_graph_on_a_gpu(op, shape, dtype, monkeypatch) -> None:
    in_8_bits = dtype in ("fp8", "int8")
    if in_8_bits and (op != "linear" or shape[1] % 16 or cublas.unsupported_8_bits(dtype, CUDA)):
        pytest.skip("8 bits need op linear, n in multiples of 16 and a device that supports them")
    scale = sum_scale("int8", shape[2]) if dtype == "int8" else 1.0
    product = on_gpu(product_of(op, *shape, dtype, tf32=dtype == "tf32", scale=scale))
    ways = every_way(product, monkeypatch)
    for way in [*ways[:4], *ways[4::20]]:  # of up to a thousand
        launch = launch_of(way, product)
        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        product.a.copy_(drawn(*product.a.shape, dtype=dtype))
        poison(product.out)
        graph.replay()
        if dtype == "int8":
            assert_right(product.out, product)
            continue
        right = product.scale * (product.a.double() @ product.b.double())
        error = (product.out.double() - right).norm() / right.norm()
        assert error < {"fp32": 1e-6, "tf32": 1e-3, "fp16": 1e-3}.get(dtype, 8e-3), way


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 1001, 333), (17, 13, 7), (1, 1, 5)])
def test_odd_sizes_are_right_on_a_gpu(shape: tuple[int, int, int]) -> None:
    for op in cublas.PRODUCTS:
        product = on_gpu(product_of(op, *shape, "bf16"))
        launch = _gemm.fastest_way(product)
        again = _gemm.fastest_way(product, json.loads(json.dumps(launch.choice)))
        for call in (launch, again):
            product.out.fill_(torch.nan)
            assert_right(call(), product, 8e-2)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("columns", [False, True])
def test_a_weight_is_multiplied_by_any_x_up_to_the_most_tokens(columns: bool, monkeypatch) -> None:
    monkeypatch.setattr(_cublaslt, "_address", lambda: 1)
    monkeypatch.setattr(scratch, "_stream", lambda _: 0)
    n, k, most = 24, 16, 20
    w = torch.randn(n, k)
    w = w.T.contiguous().T if columns else w
    for algorithm in (Algorithm(ANY), Algorithm(TILED, tile=32)):
        run = _cublaslt.bind_weight(w, algorithm, most)
        for m in (20, 1, 7, 20):
            for x in (torch.randn(m, k), torch.randn(m, 2 * k)[:, :k]):
                y = torch.full((m, n), float("nan"))
                with cuda.taping() as tape:
                    assert run(x, w, y) is y
                torch.testing.assert_close(y, x @ w.T)
                torch.testing.assert_close(run(x, 2 * w), 2 * y)
                (call,) = tape.launches
                words = struct.unpack("16Q", call.arguments)
                addresses = w.data_ptr(), x.data_ptr(), y.data_ptr(), y.data_ptr(), 0
                assert (words[3], words[5], words[8], words[10], words[15]) == addresses
    for refused in (Algorithm(99), Algorithm(TILED, tile=16)):
        with pytest.raises(Unsupported, match="does not accept"):
            _cublaslt.bind_weight(w, refused, most)


@pytest.mark.usefixtures("emulated")
def test_a_graph_keeps_no_workspace_that_its_own_pool_has(monkeypatch) -> None:
    """Each call would have its own, and torch.compile refuses to record the next graph."""
    kept, workspace, w = list[Any](), torch.empty(8), torch.randn(24, 16)
    monkeypatch.setattr(_cublaslt, "_address", lambda: 1)
    monkeypatch.setattr(_cublaslt, "is_capturing", lambda y: True)
    monkeypatch.setattr(_cublaslt, "keep", kept.append)
    monkeypatch.setattr(scratch, "workspace", lambda x, count: workspace)
    _cublaslt.bind_weight(w, Algorithm(ANY), 8)(torch.randn(8, 16), w)
    [owners] = kept
    assert any(owner is w for owner in owners)
    assert not any(owner is workspace for owner in owners)
