"""The Triton kernels of the family: how they pack and split on the host, and products in fp8."""

from dataclasses import replace

import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.bsr import bsr_triton, bsr_triton_wgrad
from sparsebench.kernels.bsr._triton import path_of
from tests.kernels.bsr.examples import assert_right, call_of, example, on_gpu


def test_blocks_of_whole_tiles_are_used_as_stored():
    stored = Bsr.from_dense(torch.ones(256, 256).half(), block=128)
    config = bsr_triton.configurations(4096, (128, 128), 2, "tma")[0]
    assert bsr_triton.unions_of(stored, config)[1] is None


def test_united_rows_of_blocks_are_packed_side_by_side():
    w, _, _ = example((1, 45, 53, (10, 10), 0.5))
    config = replace(bsr_triton.configurations(300, (10, 10), 4, "pointers")[0], group=2)
    unions, pack = bsr_triton.unions_of(w, config)
    packed, dense = pack(w.values), torch.zeros(60, 60)
    for group, (start, end) in enumerate(zip(unions.offsets, unions.offsets[1:], strict=False)):
        for block, column in zip(packed[start:end], unions.columns[start:end], strict=True):
            dense[20 * group : 20 * group + 20, 10 * column : 10 * column + 10] = block[:20, :10]
    assert torch.equal(dense[:45, :53], w.to_dense())
    counts = unions.offsets.diff()[unions.order]
    assert torch.equal(counts, counts.sort(descending=True).values)


def test_tokens_are_split_if_there_are_few_blocks():
    def parts(m, blocks):
        return bsr_triton_wgrad.configurations(m, (64, 64), blocks, 2, "tma", 132)[0].parts

    assert [parts(4096, blocks) for blocks in (400, 264, 132, 50, 3, 0)] == [1, 1, 2, 4, 16, 16]
    assert [parts(m, 3) for m in (1, 511, 512, 2048)] == [1, 1, 2, 8]


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
