"""Weights in 4 bits: problems that have them, formats that store them, and torch's product."""

import pytest
import torch

from sparsebench.errors import FormatError
from sparsebench.formats.int4 import Int4
from sparsebench.formats.int4_two_four import Int4TwoFour
from sparsebench.kernels.peers import torch_int4
from tests.kernels.four_bits import assert_products_are_right, weight


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("k", [384, 100])
def test_a_problem_of_4_bits_fits_the_format_and_keeps_its_pattern(dtype: str, k: int) -> None:
    w = weight(dtype=dtype, k=k)
    stored = Int4.from_dense(w)
    assert torch.equal(stored.to_dense(), w)
    assert torch.equal(w != 0, weight(dtype=dtype, k=k, weight_bits=None) != 0)
    assert stored.unpacked().unique().numel() >= 15


def test_weights_of_16_bits_are_refused_by_the_format() -> None:
    with pytest.raises(FormatError, match="row 0, columns 0 to 127"):
        Int4.from_dense(weight(weight_bits=None))


def test_weights_that_are_not_2_4_are_refused() -> None:
    with pytest.raises(FormatError, match="row 0, columns 0 to 3"):
        Int4TwoFour.from_dense(weight(pattern="dense", sparsity=0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 17, 130])
def test_products_of_4_bits_are_right_on_a_gpu(m: int) -> None:
    assert_products_are_right(torch_int4, "bf16", m)
