"""The Triton kernels of the family: products in fp8."""

import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.bsr import bsr_triton
from sparsebench.kernels.bsr._triton import path_of
from tests.kernels.bsr.examples import assert_right, call_of, on_gpu


@pytest.mark.parametrize(("width", "fits"), [(8, False), (16, False), (24, True), (64, True)])
def test_fp8_needs_blocks_wider_than_16(width, fits):
    w = Bsr.from_dense(torch.ones(64, 192).to(DTYPES["fp8"]), block=[64, width])
    assert (bsr_triton.unsupported_call(w, call_of("linear", w, 8, "fp8")) is None) == fits


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["tma", "pointers"])
@pytest.mark.parametrize("block", [32, 64, 128, (48, 24)], ids=str)
@pytest.mark.parametrize("m", [5, 33, 300, 1500])
def test_fp8_is_right_in_every_configuration_on_a_gpu(m, block, path):
    if torch.cuda.get_device_capability() < bsr_triton.FP8_CAPABILITY:
        pytest.skip("needs e4m3")
    w, x = on_gpu((m, 528, 784, block, 0.3), "fp8", transposed=False)
    call = call_of("linear", w, m, "fp8")
    if path == "tma" and path_of(w, call) != path:
        pytest.skip("read by pointers")
    for config in bsr_triton.configurations(call.m, w.block, 1, path):
        product = bsr_triton.plan(w, call, config)
        assert_right(product.run(x, product.packed(w.values)), x, w, False, config)
