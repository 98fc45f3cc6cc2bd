"""The Triton kernels of block-sparse attention, in Triton's interpreter, and their lists."""

import inspect
from collections.abc import Sequence
from functools import partial
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
    attention_wgmma,
    attention_wgmma_backward,
)
from sparsebench.kernels.attention._lists import shared_heads
from sparsebench.kernels.attention._shapes import Bound, Shape, packing
from tests.kernels.attention.cases import Case, flat, gradients, reference, without
from tests.tools.marks import sampled

# The configuration of a case: rows and columns of a step, and the path.
Small = partial(Case, head_dim=32, dtype="fp32")
CASES = [
    Small((60, 90), 32, (4, 2), (16, 32, "tma"), batch=2, lists=4, causal=True),
    Small((45, 70), (24, 40), (2, 1), (32, 16, "pointers"), lists=2, causal=True),
    Small((50, 100), 16, (4, 2), (32, 64, "pointers"), lists=2, bits=True),
    Small((50, 70), 16, (2, 2), (64, 32, "pointers"), lists=2, head_dim=48, density=0),
    Small((64, 64), 64, (2, 2), (64, 32, "tma"), lists=2, head_dim=48),
    Small((1, 130), (1, 16), (8, 2), (16, 16, "tma"), batch=3, lists=2),
    Small((40, 40), 16, (4, 1), (64, 16, "tma"), lists=1, causal=True, density=1),
    Small((33, 33), 48, (1, 1), (32, 16, "tma"), bits=True),
]
# The dtypes alternate, so that each path, mask and grouping has both.
PATHS = sampled((c._replace(dtype=("fp16", "fp32")[i % 2]) for i, c in enumerate(CASES)), 1, 4, 7)
FEW = [
    Small((1, 96), (16, 16), (4, 2), (16, 32, "pointers"), batch=2, density=1.0),
    Small((1, 130), (16, 64), (8, 2), (16, 32, "tma"), batch=3, lists=2, causal=True),
    Small((3, 90), (16, 16), (4, 1), (16, 32, "pointers"), batch=2, causal=True),
    Small((16, 50), (16, 16), (2, 2), (16, 16, "tma"), lists=2, bits=True),
]


def forward(case: Case, mask: BlockMask, operands: Sequence[Tensor]) -> Any:
    """Return O and the LSE of the forward kernel for q, k and v by head."""
    (rows, keys, path), shape = case.config, case.shape()
    shared = shared_heads(mask, *case.heads)
    config = attention_triton.Config(*packing(rows, shape, shared), shared, keys, 2, 4, path)
    inputs = [flat(x) for x in operands]
    bound = attention_triton.launch(inputs, mask, shape, case.head_dim**-0.5, config)
    return bound.program(), bound.outputs[1]


@pytest.mark.interpreted
@pytest.mark.parametrize("case", PATHS)
def test_o_and_lse_are_right_if_a_block_that_no_query_selects_is_nan(case: Case) -> None:
    mask, operands = case.mask(), case.operands()[:3]
    unselected = not case.bits and mask.shape[1] > 1
    mask = without(mask, 1) if unselected else mask
    expected, log_sum = reference(*(x.double() for x in operands), mask)
    if unselected:
        for x in operands[1:]:
            x[:, mask.block[1] : 2 * mask.block[1]] = torch.nan
    o, lse = forward(case, mask, operands)
    allowed = 3e-3 if case.dtype == "fp16" else 1e-5
    torch.testing.assert_close(o.double(), flat(expected), atol=allowed, rtol=allowed)
    log_sum = log_sum.reshape(lse.shape)
    torch.testing.assert_close(lse.double(), log_sum, atol=allowed, rtol=allowed)


@pytest.mark.interpreted
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", sampled(FEW, 2, 3))
def test_split_lists_give_the_same_output_each_time(case: Case, splits: int) -> None:
    mask, shape, operands = case.mask(), case.shape(), case.operands()[:3]
    _, keys, path = case.config
    shared = shared_heads(mask, *case.heads)
    config = attention_split.Config(*packing(16, shape, shared), shared, keys, splits, 2, 4, path)
    inputs = [flat(x) for x in operands]
    bound = attention_split.launch(inputs, mask, shape, case.head_dim**-0.5, config)
    run, (_, lse) = bound.program, bound.outputs
    first = run().clone()
    assert torch.equal(first, run())
    expected, log_sum = reference(*(x.double() for x in operands), mask)
    torch.testing.assert_close(first.double(), flat(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), log_sum.reshape(lse.shape), atol=1e-5, rtol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("case", PATHS)
def test_gradients_are_right_and_the_same_twice(case: Case) -> None:
    mask, shape, operands = case.mask(), case.shape(), case.operands()
    o, lse, expected = gradients(operands, mask)
    rows, columns, path = case.config
    shared = shared_heads(mask, *case.heads)
    tile = *packing(rows, shape, shared), shared, columns, 2, 4, path
    other = path if mask.block[0] % columns == 0 else "pointers"
    config = attention_triton_backward.Config(*tile, rows, columns, 2, 4, other)
    q, k, v, do = (flat(x) for x in operands)
    inputs = q, k, v, flat(o.to(q.dtype)), lse.flatten(0, 1).float(), do
    bound = attention_triton_backward.launch(inputs, mask, shape, case.head_dim**-0.5, config)
    run = bound.program
    first = run().clone()
    assert torch.equal(first, run())
    rows_of_all = torch.cat([x.reshape(-1, case.head_dim) for x in expected])
    allowed = 1e-2 if case.dtype == "fp16" else 1e-4
    torch.testing.assert_close(first.double(), rows_of_all, atol=allowed, rtol=allowed)


@pytest.mark.interpreted
def test_the_public_function_runs_these_kernels() -> None:
    case = Case((40, 56), 16, (2, 1), lists=2, head_dim=16, dtype="fp32")
    mask, (*leaves, do) = case.mask(), case.operands()
    expected, _, grads = gradients((*leaves, do), mask)
    for x in leaves:
        x.requires_grad_()
    for _ in range(2):  # the second call uses the plan of the first
        o = sparsebench.attention(*leaves, mask)
        torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
        for actual, gradient in zip(torch.autograd.grad(o, leaves, do), grads, strict=True):
            torch.testing.assert_close(actual.double(), gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [16, 24, 64, 128, (1, 64)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("module", [attention_triton, attention_triton_backward])
def test_a_block_has_configurations_that_fit(block: Any, dtype: str, module: Any) -> None:
    sides = (block, block) if isinstance(block, int) else block
    for head_dim in (64, 128, 256):
        shape = Shape(1, 512, 512, 8, 8, head_dim, sides, dtype)
        configs = module.configurations(shape, 1, "tma")
        assert 1 <= len(configs) <= 8


@pytest.mark.interpreted
def test_the_public_function_binds_the_kernels_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((70, 130), 64, (2, 1), lists=2, head_dim=64)
    mask, operands = case.mask(), case.operands()[:3]
    launches = []

    def bound_by(module: Any, outputs: int) -> Any:
        signature = inspect.signature(module.launch)

        def launch(*args: Any, **kwargs: Any) -> Bound:
            arguments = signature.bind(*args, **kwargs).arguments
            launches.append(module)
            operands = arguments["operands"]
            assert [x.shape[0] for x in operands[:3]] == [70, 130, 130]
            zeros = tuple(torch.zeros_like(operands[i]) for i in range(outputs))
            lse = torch.zeros(case.heads[0], case.tokens[0])
            return Bound(lambda: None, (), zeros if outputs == 3 else (zeros[0], lse))

        return launch

    for module, outputs in ((attention_wgmma, 1), (attention_wgmma_backward, 3)):
        monkeypatch.setattr(module, "unsupported", lambda *_: None)
        monkeypatch.setattr(module, "launch", bound_by(module, outputs))
        monkeypatch.setattr(module, "work_of", lambda *_: None)
    leaves = [x.requires_grad_() for x in operands]
    sparsebench.attention(*leaves, mask).sum().backward()
    assert launches == [attention_wgmma, attention_wgmma_backward]
