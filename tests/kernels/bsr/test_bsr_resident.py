"""bsr_resident: its packing, and plans for fewer tokens than they were made for."""

from typing import Any

import pytest
import torch

from sparsebench.kernels._common import cuda
from sparsebench.kernels.bsr import bsr_resident
from sparsebench.kernels.bsr.bsr_resident import Config, Product, turned
from tests.kernels.bsr.cases import RESIDENT, SHAPES
from tests.kernels.bsr.examples import assert_right, example, on_gpu
from tests.tools.marks import needs_cupy


@pytest.mark.parametrize("shape", SHAPES["bsr_resident"], ids=str)
def test_a_turned_matrix_is_the_transpose(shape):
    w, *_ = example(shape)
    there = turned(w)
    assert there.block == w.block[::-1]
    assert torch.equal(there.to_dense(), w.to_dense().T)


def test_a_plan_launches_a_group_of_ctas_for_each_tile_of_fewer_tokens(monkeypatch) -> None:
    def load(*_: Any) -> tuple[None, str]:
        return None, "code"

    monkeypatch.setattr(cuda, "load", load)
    monkeypatch.setattr(cuda, "target_of", lambda device: "sm_90")
    monkeypatch.setattr(bsr_resident, "groups_of", lambda *sizes: 5)
    w, *_ = example((1, 100, 96, (10, 12), 0.5))
    product = Product(w, 64, Config(16, 4))
    assert [product.loaded(m).grid for m in (1, 16, 17, 64)] == [5, 5, 10, 20]


@pytest.mark.gpu
@needs_cupy
@pytest.mark.parametrize("config", RESIDENT, ids=str)
def test_a_plan_is_right_for_fewer_tokens_on_a_gpu(config: Config) -> None:
    for shape in SHAPES["bsr_resident"]:
        w, x = on_gpu(shape, "bf16", False)
        product = Product(w, len(x), config)
        packed = product.pack(w.values)
        for m in {len(x), -(-len(x) // 2), 1}:
            assert_right(product.run(x[:m], packed), x[:m], w, False, shape)
