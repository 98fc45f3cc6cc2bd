"""Block-sparse attention on a GPU against fp64, through the kernels and through the front door."""

from dataclasses import replace
from typing import Any

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
from tests.kernels.attention.cases import random_mask, reference

pytestmark = pytest.mark.gpu
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALLOWED = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 2e-5}
# tokens, block, heads, key heads, lists, D, dtype, options: odd lengths, an empty row, GQA 1, 4, 8
CASES = [
    ((300, 420), 64, 4, 4, 4, 128, "bf16", {}),
    ((257, 257), 128, 8, 2, 2, 64, "bf16", {"causal": True}),
    ((200, 333), 16, 8, 1, 1, 128, "fp16", {"batch": 2}),
    ((150, 301), (24, 40), 4, 1, 4, 96, "fp16", {"bits": True}),
    ((130, 200), 32, 2, 2, 1, 64, "fp32", {"causal": True}),
]


def on_gpu(mask: BlockMask) -> BlockMask:
    """Return the mask on the GPU."""
    return replace(mask, **{name: array.cuda() for name, array in mask.arrays().items()})


def drawn(case: Any) -> tuple[BlockMask, Shape, list[Tensor]]:
    """Return a mask, its sizes, and q, k and v by head."""
    tokens, block, heads, kv_heads, lists, head_dim, dtype, options = case
    torch.manual_seed(0)
    mask = on_gpu(random_mask(tokens, block, lists=lists, **options))
    shape = Shape(mask.batch, *tokens, heads, kv_heads, head_dim, mask.block, dtype)
    sizes = ((tokens[0], heads), (tokens[1], kv_heads), (tokens[1], kv_heads))
    tensors = [
        torch.randn(mask.batch, *size, head_dim, device="cuda").to(DTYPES[dtype]) for size in sizes
    ]
    return mask, shape, tensors


def assert_near(actual: Tensor, expected: Tensor, dtype: str) -> None:
    """Compare, relative to the largest value."""
    assert not actual.isnan().any()
    assert (actual.double() - expected).abs().max() <= ALLOWED[dtype] * expected.abs().max()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_o_and_gradients_are_those_of_fp64_whatever_the_outputs_held(case: Any) -> None:
    mask, shape, tensors = drawn(case)
    leaves = [x.double().requires_grad_() for x in tensors]
    o, lse = reference(*leaves, mask)
    do = torch.randn_like(o).to(tensors[0].dtype)
    o.backward(do.double())
    rows = [x.flatten(2).flatten(0, 1) for x in tensors]
    shared, scale = shared_heads(mask, shape.heads, shape.kv_heads), shape.head_dim**-0.5
    for path in ("tma", "pointers"):
        config = attention_triton.configurations(shape, shared, path)[0]
        bound = attention_triton.launch(rows, mask, shape, scale, config)
        for x in bound.outputs:
            x.fill_(torch.nan)
        bound.program()
        assert_near(bound.outputs[0].view_as(o), o.detach(), shape.dtype)
        torch.testing.assert_close(
            bound.outputs[1].view_as(lse).double(), lse.detach(), atol=1e-4, rtol=1e-4
        )
        halves = attention_triton_backward.configurations(shape, shared, path)[0]
        given_o = o.detach().to(do.dtype).flatten(2).flatten(0, 1)
        given = *rows, given_o, lse.detach().flatten(0, 1).float(), do.flatten(2).flatten(0, 1)
        bound = attention_triton_backward.launch(given, mask, shape, scale, halves)
        bound.program.out.fill_(torch.nan)
        bound.program()
        for actual, leaf in zip(bound.outputs, leaves, strict=True):
            assert leaf.grad is not None
            assert_near(actual.view_as(leaf), leaf.grad, shape.dtype)


@pytest.mark.parametrize("block", [(16, 64), (16, 16)])
def test_split_lists_are_merged(block: tuple[int, int]) -> None:
    case = ((1, 1000), block, 8, 2, 2, 128, "bf16", {"batch": 3, "causal": True})
    mask, shape, tensors = drawn(case)
    expected, _ = reference(*(x.double() for x in tensors), mask)
    rows = [x.flatten(2).flatten(0, 1) for x in tensors]
    for config in attention_split.configurations(shape, 4, "tma", 132)[:3]:
        bound = attention_split.launch(rows, mask, shape, 128**-0.5, config)
        for _ in range(2):  # the counters return to zero
            bound.outputs[0].fill_(torch.nan)
            bound.program()
            assert_near(bound.outputs[0].view_as(expected), expected, "bf16")


def test_a_nan_in_a_block_that_no_query_selects_reaches_nothing() -> None:
    mask, _, tensors = drawn(CASES[0])
    cells = mask.to_dense()
    cells[:, 3] = 0
    mask = BlockMask.from_dense(cells, block=64, tokens=[300, 420])
    for x in tensors[1:]:
        x[:, 192:256] = torch.nan
    leaves = [x.requires_grad_() for x in tensors]
    o = sparsebench.attention(*leaves, mask)
    gradients = torch.autograd.grad(o.sum(), leaves)
    assert not any(x.isnan().any() for x in (o, *gradients))


def test_a_call_can_be_compiled_and_captured_with_its_gradients() -> None:
    mask, _, tensors = drawn(CASES[0])
    leaves = [x.requires_grad_() for x in tensors]
    do = torch.randn_like(tensors[0])

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparsebench.attention(q * 2, k, v, mask)

    expected = torch.autograd.grad(step(*leaves), leaves, do)
    compiled = torch.compile(step, fullgraph=True)
    for actual, gradient in zip(
        torch.autograd.grad(compiled(*leaves), leaves, do), expected, strict=True
    ):
        torch.testing.assert_close(actual, gradient, atol=2e-2, rtol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = torch.autograd.grad(step(*leaves), leaves, do)
    for x in actual:
        x.fill_(torch.nan)
    graph.replay()
    for x, gradient in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, gradient, atol=2e-2, rtol=2e-2)
