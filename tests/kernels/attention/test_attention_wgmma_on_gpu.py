"""attention_wgmma and its gradients on a GPU of compute capability 9.0, against fp64."""

import math

import pytest
import torch
from torch import Tensor

from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels.attention import _stored, attention_wgmma, attention_wgmma_backward
from sparsebench.kernels.attention._lists import shared_heads
from sparsebench.kernels.attention._shapes import Shape
from tests.compiling.nvcc import hopper
from tests.kernels.attention.cases import Case, flat, gradients, on_gpu, reference, rising, without

CASES = [
    Case((1000, 777), 128, (4, 4), lists=4, dtype="bf16"),
    Case((1000, 777), 64, (8, 2), batch=2, lists=8, causal=True, dtype="bf16"),
    Case((600, 1000), 64, (8, 1), batch=2, head_dim=64),
    Case((1000, 777), (64, 128), (4, 4), batch=2, lists=4, bits=True),
    Case((333, 500), 16, (8, 2), lists=2, causal=True, dtype="bf16"),
    Case((500, 700), (256, 192), (2, 1), dtype="bf16"),
    Case((500, 700), (64, 8), (2, 2), lists=2, bits=True, head_dim=64, dtype="bf16"),
    Case((1, 1000), (16, 64), (8, 2), batch=3, lists=2, causal=True, dtype="bf16"),
    Case((333, 500), 64, (4, 2), lists=2, dtype="bf16", density=0),
    Case((333, 500), 64, (4, 2), lists=2, dtype="bf16", density=1),
]
BACKWARD_CASES = [
    *CASES[:5],
    *CASES[-2:],
    Case((500, 700), (16, 64), (4, 1), bits=True, head_dim=64, dtype="bf16"),
    Case((333, 500), 32, (4, 2), lists=2),
]
UNSEEN = 1  # block of keys that no query selects, with NaN


def problem(case: Case) -> tuple[BlockMask, Shape, list[Tensor], list[Tensor]]:
    """Return a mask and sizes, q, k, v and dO, and O, LSE and the gradients in fp64, on the GPU."""
    mask, unseen = case.mask(), not case.bits and case.density < 1
    mask = without(mask, UNSEEN) if unseen else mask
    operands = case.operands()
    o, lse, grads = gradients(operands, mask)
    if unseen:
        start = UNSEEN * mask.block[1]
        for x in operands[1:3]:
            x[:, start : start + mask.block[1]] = torch.nan
    expected = [x.cuda() for x in (o, lse.flatten(0, 1), *grads)]
    return on_gpu(mask), case.shape(), [flat(x).cuda() for x in operands], expected


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm; infinite if it is not finite."""
    ratio = float((actual.double().view(expected.shape) - expected).norm() / expected.norm())
    return ratio if math.isfinite(ratio) else math.inf


@hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_o_and_lse_are_right_in_each_configuration(case: Case) -> None:
    mask, shape, (q, k, v, _), (o, lse, *_) = problem(case)
    shared = shared_heads(mask, shape.heads, shape.kv_heads)
    for config in attention_wgmma.configurations(shape, shared):
        scale = case.head_dim**-0.5
        program, _, outputs = attention_wgmma.launch((q, k, v), mask, shape, scale, config)
        for _ in range(2):
            for x in outputs:
                x.fill_(torch.nan)
            program()
        assert error(outputs[0], o) < 4e-3
        torch.testing.assert_close(outputs[1].double(), lse, atol=1e-4, rtol=1e-4)


@hopper
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_scores_that_rise_along_a_list_are_right(case: Case) -> None:
    mask, shape, operands = case.mask(), case.shape(), rising(case.operands())
    o, lse = reference(*(x.double() for x in operands[:3]), mask)
    q, k, v = (flat(x).cuda() for x in operands[:3])
    shared = shared_heads(mask, shape.heads, shape.kv_heads)
    config = attention_wgmma.configurations(shape, shared)[0]
    scale = case.head_dim**-0.5
    program, _, outputs = attention_wgmma.launch((q, k, v), on_gpu(mask), shape, scale, config)
    program()
    assert error(outputs[0], o.cuda()) < 4e-3
    expected = lse.flatten(0, 1).cuda()
    torch.testing.assert_close(outputs[1].double(), expected, atol=1e-4, rtol=1e-5)


@hopper
@pytest.mark.parametrize("case", BACKWARD_CASES, ids=str)
def test_gradients_are_right_in_each_configuration(case: Case) -> None:
    mask, shape, (q, k, v, do), (o, lse, *grads) = problem(case)
    operands = q, k, v, o.to(q.dtype).reshape(q.shape), lse.float(), do
    shared = shared_heads(mask, shape.heads, shape.kv_heads)
    for config in attention_wgmma_backward.configurations(shape, shared):
        scale = case.head_dim**-0.5
        program, _, outputs = attention_wgmma_backward.launch(operands, mask, shape, scale, config)
        program.out.fill_(torch.nan)
        first = program().clone()
        program.out.fill_(torch.nan)
        again = program()
        assert torch.equal(first, again)
        for actual, expected in zip(outputs, grads, strict=True):
            assert error(actual, expected) < 6e-3


@hopper
@pytest.mark.parametrize("block", [64, 128])
def test_sections_that_overlap_give_the_bits_of_a_single_one(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((1500, 1400), block, (12, 12), lists=12, dtype="bf16")
    mask, shape, (q, k, v, do), (o, lse, *_) = problem(case)
    operands = q, k, v, o.to(q.dtype).reshape(q.shape), lse.float(), do
    config = attention_wgmma_backward.configurations(shape, 1)[0]
    args = operands, mask, shape, case.head_dim**-0.5, config
    single = attention_wgmma_backward.launch(*args).program().clone()
    monkeypatch.setattr(_stored, "SECTION_BYTES", 3 << 20)  # a head takes 2.0 MB
    work = attention_wgmma_backward.work_of(mask, shape, config)
    assert work.stored
    assert len(work.stored.keys) == 12
    program = attention_wgmma_backward.launch(*args, work).program
    for _ in range(20):
        program.out.fill_(torch.nan)
        assert torch.equal(program(), single)
