"""The dense copy of a frozen weight in blocks, and what no copy does."""

from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common import choices as lists
from sparsebench.kernels._common.unstructured import UnstructuredCall
from sparsebench.kernels.bsr._call import BsrCall, problem_of
from sparsebench.kernels.dense._cublaslt import Algorithm
from sparsebench.kernels.dense._gemm import DenseProduct
from sparsebench.kernels.nn import _dense_copy
from sparsebench.kernels.nn._dense_copy import DenseConfig
from tests.kernels.contract import Example, run_engine

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "example", [Example(33, 120, 96, 0.3, (8, 8)), Example(7, 50, 30, 0.5, (10, 10))]
)
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_its_product_is_exact(example: Example, columns: bool, dtype: torch.dtype) -> None:
    configs = [DenseConfig(columns=columns)]
    assert run_engine(_dense_copy.OF_BLOCKS, example, dtype, configs=configs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"live": True}, "frozen values"),
        ({"dtype": torch.float8_e4m3fn}, "16 bits or fp32"),
        ({"shape": (8192, 8192)}, "33554432 bytes"),
    ],
)
def test_a_large_weight_or_one_that_trains_is_not_copied(change, reason) -> None:
    call = BsrCall("linear", 64, (1000, 1000), (10, 10), BF16, live=False)
    assert _dense_copy.unsupported_call(call) is None
    assert reason in _dense_copy.unsupported_call(call._replace(**change))


def test_a_configuration_of_another_format_is_refused() -> None:
    dense = torch.ones(16, 32, dtype=BF16)
    call = BsrCall("linear", 8, (16, 32), (8, 8), BF16, live=False)
    with pytest.raises(Unsupported, match=r"expected padded=0 .*, found 128"):
        _dense_copy.plan_blocks(Bsr.from_dense(dense, block=8), call, DenseConfig(128))
    by_rows = Bitmap.from_dense(dense), UnstructuredCall("linear", 8), DenseConfig(columns=False)
    with pytest.raises(Unsupported, match="expected columns=True, found False"):
        _dense_copy.plan_dense(*by_rows)


def test_a_choice_of_a_smaller_weight_makes_no_larger_copy(monkeypatch) -> None:
    w, call, config = Csr.from_dense(torch.eye(64)), UnstructuredCall("linear", 8), DenseConfig()
    _dense_copy.plan_dense(w, call, config)
    monkeypatch.setattr(_dense_copy, "MOST_BYTES", 2**10)
    with pytest.raises(Unsupported, match="copy of 1024 bytes or 2 times those of W"):
        _dense_copy.plan_dense(w, call, config)


@pytest.fixture
def searches(monkeypatch) -> list[tuple[int, bool]]:
    """Fake the baseline's search; return the tokens and layouts that it was called with."""
    calls: list[tuple[int, bool]] = []

    def fastest_way(product: DenseProduct) -> SimpleNamespace:
        m, columns = len(product.a), product.b.is_contiguous()
        calls.append((m, columns))
        times = {0: 1.0, 1: 2.0, 2 if columns else 3: 3.0 + columns, 4 + m: 2.5}
        lines = [
            {"choice": {"algorithm": asdict(Algorithm(number))}, "median_us": time_us}
            for number, time_us in times.items()
        ]
        return SimpleNamespace(
            candidates=[{"choice": {}, "median_us": 0.5}, {"left_out": 9}, *lines]
        )

    def bind_weight(w: Tensor, algorithm: Algorithm, most: int) -> Any:
        if algorithm == Algorithm(0):
            raise Unsupported("cuBLASLt does not accept it for 1 row")
        return lambda x, w, out: torch.mm(x, w.T, out=out)

    monkeypatch.setattr(_dense_copy, "fastest_way", fastest_way)
    monkeypatch.setattr(_dense_copy, "runs", lambda run: run() is not None)
    monkeypatch.setattr(_dense_copy._cublaslt, "unavailable", lambda: None)
    monkeypatch.setattr(_dense_copy._cublaslt, "bind_weight", bind_weight)
    return calls


def direct(number: int, *, columns: bool = True) -> DenseConfig:
    return DenseConfig(algorithm=Algorithm(number), columns=columns)


def test_a_direct_call_that_takes_no_single_row_is_left_out(searches) -> None:
    configs = [*_dense_copy.direct_choices({True: lambda: torch.randn(16, 32).T}, 8)]
    assert configs == [direct(1), direct(12)]
    assert searches == [(8, True)]


def copies() -> dict[bool, Any]:
    make, w = _dense_copy.with_layout, torch.randn(32, 16)
    return {columns: partial(make, w, columns=columns) for columns in (True, False)}


def test_direct_calls_have_both_layouts_and_the_ends_of_a_bucket(searches) -> None:
    configs = [*_dense_copy.direct_choices(copies(), 320)]
    both = [direct(1), direct(1, columns=False)]
    assert configs == [*both, direct(324), direct(293)]
    assert searches == [(320, True), (320, False), (289, True), (289, False)]


def test_a_call_that_is_fast_for_the_fewest_tokens_is_right_for_all(searches, monkeypatch) -> None:
    def bind_weight(w: Tensor, algorithm: Algorithm, most: int) -> Any:
        wrong = algorithm == Algorithm(4 + 289)
        return lambda x, w, out: out.copy_(x @ w.T * (2 if wrong and len(x) > 289 else 1))

    monkeypatch.setattr(_dense_copy._cublaslt, "bind_weight", bind_weight)
    assert direct(4 + 289) not in _dense_copy.direct_choices(copies(), 320)


def test_nothing_is_timed_before_a_search_comes_to_direct_calls(searches) -> None:
    offsets: Any = SimpleNamespace(is_cuda=True, device="cpu")
    call = BsrCall("linear", 64, (32, 16), (8, 8), torch.float32, live=False)
    before = torch.get_rng_state()
    choices = _dense_copy.block_choices(SimpleNamespace(offsets=offsets), call)  # type: ignore
    assert next(iter(choices)) == DenseConfig()
    assert torch.equal(torch.get_rng_state(), before)
    assert not searches
    assert next(iter(choices)).algorithm
    assert searches


@pytest.mark.parametrize("columns", [True, False])
def test_a_list_may_have_a_direct_call_with_either_layout(searches, tmp_path, columns) -> None:
    dense = torch.randn(32, 16)
    w = Bsr.from_dense(dense, block=8)
    call = BsrCall("linear", 8, (32, 16), (8, 8), torch.float32, live=False)
    problem = problem_of(call, len(w.columns))
    choice = {"kernel": "dense", **asdict(direct(1, columns=columns))}
    file = tmp_path / "list.choices"
    file.write_text(lists.line(problem, choice))
    [candidate] = _dense_copy.OF_BLOCKS.candidates(w, call, lists.parse(file)[lists.key(problem)])
    product, x, out = candidate.plan(), torch.randn(8, 16), torch.empty(8, 32)
    packed = product.packed(w.values)
    assert packed.is_contiguous() != columns
    torch.testing.assert_close(product.run(x, packed, out), x @ dense.T)


def test_a_search_times_torch_and_the_fastest_direct_call_first() -> None:
    products, direct_calls = [DenseConfig(), DenseConfig(columns=False)], map(direct, (1, 2, 3))
    configs = [*_dense_copy.choices_of(products, direct_calls)]
    assert configs == [products[0], direct(1), products[1], direct(2), direct(3)]
