"""attention_wgmma and its gradients on a GPU of compute capability 9.0, against fp64."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels.attention import attention_wgmma, attention_wgmma_backward
from sparsebench.kernels.attention._lists import shared_heads
from sparsebench.kernels.attention._shapes import Shape
from tests.compiling.nvcc import hopper
from tests.kernels.attention.cases import random_mask, reference, without
from tests.kernels.attention.warpgroups import DTYPES


class Case(NamedTuple):
    """Sizes of a mask, and heads."""

    tokens: tuple[int, int]
    block: Any
    heads: tuple[int, int]
    batch: int = 1
    lists: int = 1
    causal: bool = False
    bits: bool = False
    head_dim: int = 128
    dtype: str = "bf16"


CASES = [
    Case((1000, 777), 128, (4, 4), lists=4),
    Case((1000, 777), 64, (8, 2), batch=2, lists=8, causal=True),
    Case((600, 1000), 64, (8, 1), batch=2, lists=1, head_dim=64, dtype="fp16"),
    Case((1000, 777), (64, 128), (4, 4), batch=2, lists=4, bits=True, dtype="fp16"),
    Case((333, 500), 16, (8, 2), lists=2, causal=True),
    Case((500, 700), (256, 192), (2, 1)),
    Case((500, 700), (64, 8), (2, 2), lists=2, bits=True, head_dim=64),
]
UNSEEN = 1  # block of keys that no query selects, with NaN


def drawn(case: Case) -> tuple[BlockMask, Shape, list[Tensor], list[Tensor]]:
    """Return a mask and sizes, q, k, v and dO, and O, LSE and the gradients in fp64, on the GPU."""
    torch.manual_seed(0)
    whole = random_mask(
        case.tokens,
        case.block,
        batch=case.batch,
        lists=case.lists,
        causal=case.causal,
        bits=case.bits,
    )
    mask = whole if case.bits else without(whole, UNSEEN)
    shape = Shape(case.batch, *case.tokens, *case.heads, case.head_dim, mask.block, case.dtype)
    sizes = [(case.tokens[i > 0 and i < 3], case.heads[i > 0 and i < 3]) for i in range(4)]
    q, k, v, do = (
        torch.randn(case.batch, tokens, heads, case.head_dim).to(DTYPES[case.dtype])
        for tokens, heads in sizes
    )
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    o, lse = reference(leaves[0], leaves[1], leaves[2], mask)
    o.backward(do.double())
    if not case.bits:
        start = UNSEEN * mask.block[1]
        for x in (k, v):
            x[:, start : start + mask.block[1]] = torch.nan
    grads = [x.grad for x in leaves if x.grad is not None]
    expected = [o.detach(), lse.detach().flatten(0, 1), *grads]
    tensors = ("offsets", "columns", "bits", "slots")
    there = {name: x.cuda() for name in tensors if (x := getattr(mask, name)) is not None}
    flat = [x.flatten(2).flatten(0, 1).contiguous().cuda() for x in (q, k, v, do)]
    return replace(mask, **there), shape, flat, [x.cuda() for x in expected]


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm; infinite if it is not finite."""
    ratio = float((actual.double().view(expected.shape) - expected).norm() / expected.norm())
    return ratio if math.isfinite(ratio) else math.inf


@hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_o_and_lse_are_right_in_each_configuration(case: Case) -> None:
    mask, shape, (q, k, v, _), (o, lse, *_) = drawn(case)
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
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_gradients_are_right_in_each_configuration(case: Case, deterministic: bool) -> None:
    mask, shape, (q, k, v, do), (o, lse, *grads) = drawn(case)
    for config in attention_wgmma_backward.configurations(shape, deterministic=deterministic):
        given = q, k, v, o.to(q.dtype).view(q.shape), lse.float(), do
        scale = case.head_dim**-0.5
        program, _, outputs = attention_wgmma_backward.launch(given, mask, shape, scale, config)
        program.out.fill_(torch.nan)
        first = program().clone()
        program.out.fill_(torch.nan)
        again = program()
        assert not deterministic or torch.equal(first, again)
        for actual, expected in zip(outputs, grads, strict=True):
            assert error(actual, expected) < 6e-3
