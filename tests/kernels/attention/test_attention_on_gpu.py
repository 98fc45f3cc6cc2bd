"""Block-sparse attention on a GPU against fp64: the kernels, and sparsebench.attention."""

import pytest
import torch
from torch import Tensor

import sparsebench
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels.attention import (
    attention_split,
    attention_triton,
    attention_triton_backward,
)
from sparsebench.kernels.attention._lists import shared_heads
from sparsebench.kernels.attention._shapes import Shape
from tests.kernels.attention.cases import Case, flat, gradients, on_gpu, without

pytestmark = pytest.mark.gpu
ALLOWED = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 2e-5}
# Odd lengths, an empty row, GQA 1, 4, 8, one block, all blocks.
CASES = [
    Case((300, 420), 64, (4, 4), lists=4, dtype="bf16"),
    Case((257, 257), 128, (8, 2), lists=2, head_dim=64, dtype="bf16", causal=True),
    Case((200, 333), 16, (8, 1), batch=2),
    Case((150, 301), (24, 40), (4, 1), lists=4, head_dim=96, bits=True),
    Case((130, 200), 32, (2, 2), head_dim=64, dtype="fp32", causal=True),
    Case((130, 200), 64, (4, 2), lists=2, dtype="bf16", density=0),
    Case((130, 200), 64, (4, 2), lists=2, dtype="bf16", density=1),
]


def problem(case: Case) -> tuple[BlockMask, Shape, list[Tensor]]:
    """Return a mask, its sizes, and q, k, v and dO by head, on the GPU."""
    return on_gpu(case.mask()), case.shape(), [x.cuda() for x in case.operands()]


def expected(case: Case) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return O, the LSE and the gradients in fp64, computed on the CPU, on the GPU."""
    o, lse, grads = gradients(case.operands(), case.mask())
    return o.cuda(), lse.cuda(), [x.cuda() for x in grads]


def assert_near(actual: Tensor, expected: Tensor, dtype: str) -> None:
    """Compare, relative to the largest value."""
    assert not actual.isnan().any()
    assert (actual.double() - expected).abs().max() <= ALLOWED[dtype] * expected.abs().max()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_o_and_gradients_are_those_of_fp64_whatever_the_outputs_held(case: Case) -> None:
    mask, shape, operands = problem(case)
    o, lse, grads = expected(case)
    *rows, do = (flat(x) for x in operands)
    shared, scale = shared_heads(mask, shape.heads, shape.kv_heads), shape.head_dim**-0.5
    for path in ("tma", "pointers"):
        config = attention_triton.configurations(shape, shared, path)[0]
        bound = attention_triton.launch(rows, mask, shape, scale, config)
        for x in bound.outputs:
            x.fill_(torch.nan)
        bound.program()
        assert_near(bound.outputs[0].view_as(o), o, shape.dtype)
        torch.testing.assert_close(
            bound.outputs[1].view_as(lse).double(), lse, atol=1e-4, rtol=1e-4
        )
        halves = attention_triton_backward.configurations(shape, shared, path)[0]
        inputs = *rows, flat(o.to(do.dtype)), lse.flatten(0, 1).float(), do
        bound = attention_triton_backward.launch(inputs, mask, shape, scale, halves)
        bound.program.out.fill_(torch.nan)
        bound.program()
        for actual, gradient in zip(bound.outputs, grads, strict=True):
            assert_near(actual.view_as(gradient), gradient, shape.dtype)


@pytest.mark.parametrize("block", [(16, 64), (16, 16)])
def test_split_lists_are_merged(block: tuple[int, int]) -> None:
    case = Case((1, 1000), block, (8, 2), batch=3, lists=2, causal=True, dtype="bf16")
    mask, shape, operands = problem(case)
    o, *_ = expected(case)
    rows = [flat(x) for x in operands[:3]]
    for config in attention_split.configurations(shape, 4, "tma", 132)[:3]:
        bound = attention_split.launch(rows, mask, shape, 128**-0.5, config)
        for _ in range(2):  # the counters return to zero
            bound.outputs[0].fill_(torch.nan)
            bound.program()
            assert_near(bound.outputs[0].view_as(o), o, "bf16")


def test_a_nan_in_a_block_that_no_query_selects_reaches_nothing() -> None:
    mask, _, operands = problem(CASES[0])
    mask, leaves = without(mask, 3), operands[:3]
    for x in leaves[1:]:
        x[:, 192:256] = torch.nan
    for x in leaves:
        x.requires_grad_()
    o = sparsebench.attention(*leaves, mask)
    grads = torch.autograd.grad(o.sum(), leaves)
    assert not any(x.isnan().any() for x in (o, *grads))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the compiler's own code
def test_a_call_can_be_compiled_and_captured_with_its_gradients() -> None:
    mask, _, (*leaves, do) = problem(CASES[0])
    for x in leaves:
        x.requires_grad_()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparsebench.attention(q * 2, k, v, mask)

    eager = torch.autograd.grad(step(*leaves), leaves, do)
    compiled = torch.compile(step, fullgraph=True)
    for actual, gradient in zip(
        torch.autograd.grad(compiled(*leaves), leaves, do), eager, strict=True
    ):
        torch.testing.assert_close(actual, gradient, atol=2e-2, rtol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = torch.autograd.grad(step(*leaves), leaves, do)
    for x in actual:
        x.fill_(torch.nan)
    graph.replay()
    for x, gradient in zip(actual, eager, strict=True):
        torch.testing.assert_close(x, gradient, atol=2e-2, rtol=2e-2)
