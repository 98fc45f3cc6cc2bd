"""The dense copy of a frozen weight: small ones in blocks."""

import pytest
import torch

from sparsebench.kernels.bsr._call import BsrCall
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
