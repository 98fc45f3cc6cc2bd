"""The Triton kernels of the family: packing and splitting on the host, and products on a GPU."""

from dataclasses import replace

import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.harness.bench.correctness import TF32, Expected, check
from sparsebench.harness.catalog import load_op
from sparsebench.harness.ops._op import longest_row
from sparsebench.kernels._common.triton import precision_of
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.bsr import bsr_triton, bsr_triton_dgrad, bsr_triton_wgrad
from tests.kernels.bsr.examples import assert_right, on_gpu


def test_blocks_of_whole_tiles_are_used_as_stored():
    stored = Bsr.from_dense(torch.ones(256, 256).half(), block=128)
    config = bsr_triton.configurations(4096, (128, 128), 2, "tma")[0]
    assert bsr_triton.pack(stored, config).values is stored.values


def test_tokens_are_split_if_there_are_few_blocks():
    def parts(m, blocks):
        return bsr_triton_wgrad.configurations(m, (64, 64), blocks, 2, "tma", 132)[0].parts

    assert [parts(4096, blocks) for blocks in (400, 264, 132, 50, 3, 0)] == [1, 1, 2, 4, 16, 16]
    assert [parts(m, 3) for m in (1, 511, 512, 2048)] == [1, 1, 2, 8]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "tf32"])  # the interpreter supports neither
@pytest.mark.parametrize(
    ("m", "block"), [(33, 64), (1500, 8), (1500, 32), (1500, 128), (1500, [10, 24])]
)
def test_every_configuration_is_right_on_a_gpu(m, block, dtype):
    n, k = 520, 776
    r, c = block if isinstance(block, list) else (block, block)
    cells = torch.rand(-(-n // r), -(-k // c)) < 0.3
    mask = cells.repeat_interleave(r, 0).repeat_interleave(c, 1)[:n, :k]
    drawn = torch.randn(n, k) * mask, torch.randn(m, n), torch.randn(m, k)
    w, dy, x = (t.to("cuda", DTYPES[dtype]) for t in drawn)
    stored = Bsr.from_dense(w, block=[r, c])

    def verdicts(op, operands, configs, launch, pattern=None):
        exact = [operand.double() for operand in operands]
        depth = op.depth(*exact) if op.depth else longest_row(exact[0])
        right = Expected(
            *(op.definition(*exact), op.spread(*exact), w.dtype, depth),
            products=TF32 if dtype == "tf32" else 0.0,
        )
        for config in configs:
            program = launch(config)
            program().fill_(float("nan"))
            out = replace(pattern, values=program()) if pattern else program()
            yield check(out, right, pattern).reason, config

    reasons = []
    for path in ("tma", "pointers"):
        kind = w.element_size(), path, precision_of(dtype)
        if path == "pointers" or not bsr_triton.unsupported_by_tma(x, stored):
            reasons += verdicts(
                *(load_op("linear"), (w, x), bsr_triton.configurations(m, (r, c), *kind)),
                lambda config: bsr_triton.launch(x, stored, config),
            )
        if path == "pointers" or not bsr_triton_dgrad.unsupported_by_tma(dy, stored):
            reasons += verdicts(
                *(load_op("linear_dgrad"), (w, dy)),
                bsr_triton_dgrad.configurations(m, (r, c), *kind),
                lambda config: bsr_triton_dgrad.launch(dy, stored, config),
            )
        if path == "pointers" or not bsr_triton_wgrad.unsupported_by_tma(dy, x, (r, c)):
            sizes = m, (r, c), len(stored.columns), w.element_size(), path, 132
            reasons += verdicts(
                *(load_op("linear_wgrad"), (dy, x)),
                bsr_triton_wgrad.configurations(*sizes, precision_of(dtype)),
                lambda config: bsr_triton_wgrad.launch(dy, x, stored, config),
                stored,
            )
    assert not [line for line in reasons if line[0]]


@pytest.mark.parametrize(("width", "fits"), [(8, False), (16, False), (24, True), (64, True)])
def test_fp8_needs_blocks_wider_than_16(width, fits):
    w = Bsr.from_dense(torch.ones(64, 192).to(DTYPES["fp8"]), block=[64, width])
    assert (bsr_triton.unsupported_blocks(w) is None) == fits


@pytest.mark.gpu
@pytest.mark.parametrize("block", [32, 64, 128, (48, 24)], ids=str)
@pytest.mark.parametrize("m", [5, 33, 300, 1500])
def test_fp8_is_right_in_every_configuration_on_a_gpu(m, block):
    if torch.cuda.get_device_capability() < bsr_triton.FP8_CAPABILITY:
        pytest.skip("needs e4m3")
    w, x = on_gpu((m, 528, 784, block, 0.3), "fp8", transposed=False)
    for path in ("tma", "pointers"):
        if path == "tma" and bsr_triton.unsupported_by_tma(x, w):
            continue
        for config in bsr_triton.configurations(m, w.block, 1, path):
            program = bsr_triton.launch(x, w, config)
            program.out.fill_(float("nan"))
            assert_right(program(), x, w, False, config)
