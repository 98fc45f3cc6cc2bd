"""What the kernels of layers compile to, and the shapes of their launches."""

import pytest
import torch
from torch import Tensor

from sparsebench.kernels._common.operator import bucket
from sparsebench.kernels.twell import _grouped, _remainder, _twell_gate, ffn_few
from sparsebench.kernels.twell._call import TwellCall
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc
from tests.compiling.triton_kernels import complaint_about_launch
from tests.tools.marks import sampled

HALF, BF16 = torch.float16, torch.bfloat16
AT_ONCE = {1: 132, 2: 66, 4: 30}.__getitem__  # clusters of ffn_few, on an H200


def test_a_cluster_shares_x_and_every_sm_has_work() -> None:
    shapes = {m: ffn_few.shape_of(m, 2048, AT_ONCE) for m in (1, 8, 9, 16, 17, 32, 33, 64)}
    assert shapes == {
        **dict.fromkeys((1, 8), (8, 1, 132)),
        **dict.fromkeys((9, 16), (16, 1, 132)),
        **dict.fromkeys((17, 32), (32, 1, 132)),
        **dict.fromkeys((33, 64), (64, 2, 66)),
    }
    assert ffn_few.shape_of(1, 4096, AT_ONCE) == (8, 2, 66)
    assert ffn_few.shape_of(64, 4096, AT_ONCE) == (64, 4, 30)


def test_groups_use_all_multiprocessors() -> None:
    few = {8: 1, 64: 1, 132: 1, 133: 2, 256: 2, 512: 4, 704: 6, 1024: 8}
    many = {1100: 5, 1536: 6, 2048: 8, 4096: 8, 131072: 8}
    assert {m: _grouped.height_of(m, 132) for m in few | many} == few | many  # an H200


def test_the_limit_of_a_group_is_constant_for_many_tokens() -> None:
    assert _grouped.limit_of(8, 512, 8) == 512
    assert _grouped.limit_of(8, 5632, 8) == _grouped.MOST_ROWS
    assert _grouped.limit_of(256, 5632, 8) == 4 * 5632 // 32
    assert _grouped.limit_of(4096, 5632, 8) == _grouped.limit_of(131072, 5632, 8) == 579
    assert _grouped.limit_of(700, 5632, 6) == 434


@pytest.mark.parametrize("m", [32, 33, 512, 513])
def test_the_configurations_that_are_timed_depend_on_the_number_of_tokens(m: int) -> None:
    call = TwellCall(bucket(m), 5632, 2048, BF16, False)
    alone = [c.alone for c in _grouped.choices(call)]
    assert alone == ([True, False] if m <= 512 else [False])


# n, k
FEW = [(5632, 2048), (9728, 2560), (16384, 4096), (16384, 1024), (28672, 4096), (1000, 200)]


@by_nvcc
@pytest.mark.parametrize(("n", "k"), sampled(FEW, 0, 5))
@pytest.mark.parametrize("m", sampled([1, 16, 32, 64], 1, 3))
def test_ffn_few_compiles_without_spills(m: int, n: int, k: int, tmp_path) -> None:
    shape = ffn_few.shape_of(m, k, AT_ONCE)
    for squared, gated, dtype in ((False, True, BF16), (True, False, HALF)):
        call = TwellCall(m, n, k, dtype, squared, gated)
        assert_compiles_cleanly("ffn_few", ffn_few.constants_of(call, shape), tmp_path)


GROUPED = [(k, height, _grouped.Config(cluster=c)) for k in (2048, 200, 2040)
           for height in (8, 2) for c in (0, 1)]  # fmt: skip
GROUPED += [(k, height, _grouped.Config(alone=True)) for k in (2560, 2048, 200, 1032, 2880)
            for height in (8, 6, 4, 3, 2, 1)]  # fmt: skip


@by_nvcc
@pytest.mark.parametrize(("k", "height", "config"), sampled(GROUPED, 0, 1, 16, 41), ids=str)
def test_ffn_sparse_compiles_without_spills(k, height, config, tmp_path) -> None:
    for squared, gated, dtype in ((False, True, BF16), (True, config.cluster > 0, HALF)):
        call = TwellCall(8, 8, k, dtype, squared, gated)
        constants = _grouped.constants_of(call, height, config)
        assert_compiles_cleanly("ffn_sparse", constants, tmp_path)


@by_nvcc
@pytest.mark.parametrize("cluster", sampled(_twell_gate.CLUSTERS))
def test_the_gate_compiles_without_spills_or_serialised_products(cluster: int, tmp_path) -> None:
    for dtype in (BF16, HALF):
        constants = _twell_gate.constants_of(cluster, dtype)
        assert_compiles_cleanly("twell_gate", constants, tmp_path)


@pytest.mark.compiles
@pytest.mark.parametrize("m", [1, 16, 64, 300, 4096])
def test_the_dense_products_compile_for_any_number_of_tokens(m: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    n, k = 5632, 2048
    counts = empty(3, dtype=torch.int32), empty(-(-m // 8), dtype=torch.int32)
    operands = empty(m, k), (g := empty(m, n)), empty(n, k), empty(m, k), *counts
    for wu in (empty(n, k), None):
        for program in _remainder.products(*operands, squared=m == 300, device=g.device, wu=wu):
            assert complaint_about_launch(program, 90) is None
