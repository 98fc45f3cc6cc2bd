"""bsr_resident: its packing and the operands that it refuses."""

import pytest
import torch

from sparsebench.kernels.bsr.bsr_resident import turned
from tests.kernels.bsr.cases import SHAPES
from tests.kernels.bsr.examples import example


@pytest.mark.parametrize("shape", SHAPES["bsr_resident"], ids=str)
def test_a_turned_matrix_is_the_transpose(shape):
    w, *_ = example(shape)
    there = turned(w)
    assert there.block == w.block[::-1]
    assert torch.equal(there.to_dense(), w.to_dense().T)
