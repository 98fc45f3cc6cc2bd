"""The dense copy of a frozen weight in blocks, and what no copy does."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.unstructured import UnstructuredCall
from sparsebench.kernels.bsr._call import BsrCall
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
def searched(monkeypatch) -> list[tuple[int, bool]]:
    """Fake the baseline's search; return the tokens and layouts that it was called with."""
    searches: list[tuple[int, bool]] = []

    def fastest_way(product: DenseProduct) -> SimpleNamespace:
        m, columns = len(product.a), product.b.is_contiguous()
        searches.append((m, columns))
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
    return searches


def direct(number: int, *, columns: bool = True) -> DenseConfig:
    return DenseConfig(algorithm=Algorithm(number), columns=columns)


def test_a_direct_call_that_takes_no_single_row_is_left_out(searched) -> None:
    configs = [*_dense_copy.direct_choices({True: torch.randn(32, 16).T}, 8)]
    assert configs == [direct(1), direct(12)]
    assert searched == [(8, True)]


def test_direct_calls_have_both_layouts_and_the_ends_of_a_bucket(searched) -> None:
    w = torch.randn(32, 16)
    copies = {columns: _dense_copy.laid_out(w, columns=columns) for columns in (True, False)}
    configs = [*_dense_copy.direct_choices(copies, 320)]
    both = [direct(1), direct(1, columns=False)]
    assert configs == [*both, direct(324), direct(293)]
    assert searched == [(320, True), (320, False), (289, True), (289, False)]


def test_a_search_times_torch_and_the_fastest_direct_call_first() -> None:
    products, direct_calls = [DenseConfig(), DenseConfig(columns=False)], map(direct, (1, 2, 3))
    configs = [*_dense_copy.choices_of(products, direct_calls)]
    assert configs == [products[0], direct(1), products[1], direct(2), direct(3)]
