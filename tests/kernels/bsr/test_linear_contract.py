"""The contract of the CUDA kernels for linear layers and their input gradients.

bsr_small, bsr_strips and bsr_wgmma run on Hopper, bsr_resident on any GPU from 8.0 on. test_NAME.py
has the tests that only one kernel needs: its work lists and what it refuses.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.cuda import BoundKernel
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.bsr import bsr_resident, bsr_small, bsr_strips, bsr_wgmma
from sparsebench.kernels.bsr._strip_tiles import tiles_of
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc, needs_hopper
from tests.kernels.bsr.cases import RESIDENT, SHAPES, SMALL, STRIPS, WGMMA, name_of
from tests.kernels.bsr.examples import Shape, assert_right, example, on_gpu
from tests.tools.marks import needs_cupy, sampled

HALF, BF16 = torch.float16, torch.bfloat16
KERNELS = bsr_resident, bsr_small, bsr_strips, bsr_wgmma
CONFIGS = [
    *(pytest.param(bsr_resident, config, id=f"resident-{config}") for config in RESIDENT),
    *(pytest.param(bsr_small, c, marks=needs_hopper, id=f"small-{c}") for c in SMALL),
    *(pytest.param(bsr_strips, c, marks=needs_hopper, id=f"strips-{c}") for c in STRIPS),
    *(pytest.param(bsr_wgmma, c, marks=needs_hopper, id=f"wgmma-{c}") for c in WGMMA),
]
LARGE: dict[Any, list[Shape]] = {
    bsr_resident: [],
    bsr_small: [(1000, 1536, 1280, 16, 0.2)],
    bsr_strips: [(1000, 1536, 1280, (48, 40), 0.2)],
    bsr_wgmma: [(1000, 1536, 1280, (128, 128), 0.3)],
}


def variants(module: Any, config: Any) -> Iterator[cuda.Constants]:
    """Yield the macros of the code that a configuration runs, for typical blocks and dtypes."""
    if module is bsr_resident:
        for block, dtype in (((10, 10), BF16), ((8, 24), HALF)):
            yield module.constants_of(config, block, dtype)
    elif module is bsr_small:
        rest = (24, HALF, False, True), (12, BF16, False, False), (5, BF16, True, True)
        for block, (room, dtype, *flags) in product(module.BLOCKS, rest):
            yield module.constants_of(config, room, block, dtype, *flags)
    elif module is bsr_strips:
        tiles = (48, 48, 23, BF16), (24, 40, 5, HALF), (40, 24, 42, BF16)
        for height, depth, *rest in tiles:
            yield module.constants_of(config, height, 16 if config.across > 1 else depth, *rest)
    else:
        for transposed, dtype in product((False, True), (HALF, BF16)):
            yield module.constants_of(config, dtype, transposed)
        for span in (64, 128):
            yield module.constants_of(config, DTYPES["fp8"], False, span)


COMPILED = [
    *sampled([(bsr_resident, config) for config in RESIDENT]),
    *sampled([(bsr_small, config) for config in SMALL]),
    *sampled(
        [(bsr_strips, c) for c in (*STRIPS[:4], bsr_strips.Config(128, 3, 2), *STRIPS[4:])], 0, -4
    ),
    *sampled([(bsr_wgmma, config) for config in WGMMA]),
]


@by_nvcc
@pytest.mark.parametrize(("module", "config"), COMPILED, ids=str)
def test_every_variant_compiles_without_a_spill_or_a_serialised_product(module, config, tmp_path):
    # C7519: a fence before each row's products, whose registers a branch may have left unchanged.
    allowed = "(C7519)" if module in (bsr_small, bsr_strips) else ""
    for constants in variants(module, config):
        assert_compiles_cleanly(name_of(module), constants, tmp_path, allowed=allowed)


def launches(
    module: Any, config: Any, w: Bsr, x: torch.Tensor, transposed: bool
) -> Iterator[BoundKernel]:
    """Yield the launches of a configuration, with and without the watchdog if it has one."""
    if module is bsr_resident:
        yield bsr_resident.launch(x, w, config)
        return
    if module is bsr_strips and not tiles_of(w, transposed, config.across).possible(config):
        return
    for watchdog in (True, False):
        yield module.launch(x, w, config, transposed=transposed, watchdog=watchdog)


@pytest.mark.gpu
@needs_cupy
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("module", "config"), CONFIGS)
def test_the_products_are_right_on_a_gpu(module, config, transposed, dtype) -> None:
    if module is bsr_resident and transposed:
        pytest.skip("bsr_resident multiplies by W.T, which is another matrix")
    for shape in [*LARGE[module], *SHAPES[name_of(module)]]:
        w, x = on_gpu(shape, dtype, transposed)
        for program in launches(module, config, w, x, transposed):
            for _ in range(3):
                program.out.fill_(float("nan"))
                program()
            torch.cuda.synchronize()
            assert_right(program.out, x, w, transposed, shape)


@pytest.mark.gpu
@needs_cupy
@pytest.mark.parametrize(("module", "config"), CONFIGS)
def test_a_nan_stays_out_of_the_rows_that_do_not_touch_its_column(module: Any, config: Any) -> None:
    side = {bsr_resident: 10, bsr_small: 16, bsr_strips: 24, bsr_wgmma: 64}[module]
    w, _, _ = example((1, 4 * side, 4 * side, side, 1.0))
    dense = w.to_dense().cuda().half()
    dense[:side, side : 2 * side] = 0  # block row 0 does not touch this block column, others do
    x = torch.randn(300, 4 * side, device="cuda").half()
    x[:, 2 * side - 8] = float("nan")  # bsr_strips reads eight columns beside a block
    y = module.launch(x, Bsr.from_dense(dense, block=side), config)()
    assert y[:, :side].isfinite().all()
    assert y[:, side:].isnan().all()
