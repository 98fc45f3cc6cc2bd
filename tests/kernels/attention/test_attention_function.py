"""sparsebench.attention through the kernels of this package, and its gradients."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsebench
from sparsebench.kernels.attention import attention_wgmma, attention_wgmma_backward
from tests.kernels.attention.cases import Case, gradients, moved, unsupported, without

CASE = Case((300, 420), 64, (4, 4), lists=4, dtype="bf16")


@pytest.mark.interpreted(also_compiled=True)
def test_the_public_function_runs_these_kernels_and_reuses_its_plan() -> None:
    case = Case((40, 56), 16, (2, 1), lists=2, head_dim=16, dtype="fp32")
    if reason := unsupported("attention_triton", case):
        pytest.skip(reason)
    mask, operands = case.mask(), case.operands()
    expected, _, grads = gradients(operands, mask)
    *leaves, do = (moved(x) for x in operands)
    for x in leaves:
        x.requires_grad_()
    for _ in range(2):
        o = sparsebench.attention(*leaves, moved(mask))
        actual = o, *torch.autograd.grad(o, leaves, do)
        for x, right in zip(actual, (expected, *grads), strict=True):
            torch.testing.assert_close(x.cpu().double(), right, atol=1e-4, rtol=1e-4)


@pytest.mark.interpreted
def test_the_public_function_binds_the_kernels_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((70, 130), 64, (2, 1), lists=2, head_dim=64)
    mask, operands = case.mask(), case.operands()[:3]
    launches = []

    def bound_by(module: Any, outputs: int) -> Any:
        signature = inspect.signature(module.launch)

        def launch(*args: Any, **kwargs: Any) -> SimpleNamespace:
            arguments = signature.bind(*args, **kwargs).arguments
            launches.append(module)
            operands = arguments["operands"]
            assert [x.shape[0] for x in operands[:3]] == [70, 130, 130]
            zeros = tuple(torch.zeros_like(operands[i]) for i in range(outputs))
            lse = torch.zeros(case.heads[0], case.tokens[0])
            return SimpleNamespace(
                program=lambda: None, outputs=zeros if outputs == 3 else (zeros[0], lse)
            )

        return launch

    for module, outputs in ((attention_wgmma, 1), (attention_wgmma_backward, 3)):
        monkeypatch.setattr(module, "unsupported", lambda *_: None)
        monkeypatch.setattr(module, "launch", bound_by(module, outputs))
        monkeypatch.setattr(module, "work_of", lambda *_: None)
    leaves = [x.requires_grad_() for x in operands]
    sparsebench.attention(*leaves, mask).sum().backward()
    assert launches == [attention_wgmma, attention_wgmma_backward]


@pytest.mark.gpu
def test_a_nan_in_a_block_that_no_query_selects_reaches_nothing() -> None:
    mask = moved(without(CASE.mask(), 3))
    leaves = [moved(x) for x in CASE.operands()[:3]]
    for x in leaves[1:]:
        x[:, 192:256] = torch.nan
    for x in leaves:
        x.requires_grad_()
    o = sparsebench.attention(*leaves, mask)
    grads = torch.autograd.grad(o.sum(), leaves)
    assert not any(x.isnan().any() for x in (o, *grads))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the compiler's own code
def test_a_call_can_be_compiled_and_captured_with_its_gradients() -> None:
    mask, (*leaves, do) = moved(CASE.mask()), map(moved, CASE.operands())
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
