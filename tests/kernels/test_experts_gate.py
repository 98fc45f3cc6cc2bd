"""The gate of experts with biases, in one launch: as torch has it, whatever the ends."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.kernels._common.experts_gate import (
    derivative_of,
    differentiate_gate,
    gate_experts,
    kernel_of,
)
from sparsebench.kernels.nn._experts_gate import GATES, gated_of
from tests.compiling.triton_kernels import complaint_about_launch
from tests.tools.marks import crossed

CASES = [  # rows, hidden units, and where the rows of each expert end
    (1, 8, (0, 1)),
    (17, 136, (3, 3, 16)),
    (40, 40, (0, 16, 17, 33, 40)),
    (33, 288, tuple(range(1, 34))),
]


def operands(rows: int, units: int, ends: tuple[int, ...], dtype: Any) -> list[Tensor]:
    random = torch.Generator().manual_seed(rows)
    products = 8 * torch.randn(rows, 2 * units, generator=random)
    bias = torch.randn(len(ends), 2 * units, generator=random)
    return [products.to(dtype), bias.to(dtype), torch.tensor([ends], dtype=torch.int32)]


def expected(operands: list[Tensor], activation: str, *, in_turn: bool, biased: bool) -> Tensor:
    products, bias, ends = (t.cpu() for t in operands[:3])
    row = torch.arange(len(products), dtype=torch.int32)
    number = torch.searchsorted(ends[0], row, right=True).clamp(max=len(bias) - 1)
    of_rows = bias[number] if biased else None
    gated = gated_of(products.double(), activation, in_turn=in_turn, bias=of_rows)
    return gated.hidden()


@pytest.mark.interpreted
@pytest.mark.parametrize(("case", "activation"), crossed(CASES, [*GATES]), ids=str)
def test_the_gate_is_right_in_the_interpreter(case, activation) -> None:
    for in_turn, biased in ((False, True), (True, True), (True, False)):
        products, bias, ends = each = operands(*case, torch.float32)
        program = kernel_of(products, bias if biased else None, ends, activation, in_turn=in_turn)
        program.out.fill_(torch.nan)
        right = expected(each, activation, in_turn=in_turn, biased=biased)
        torch.testing.assert_close(program().double(), right, rtol=1e-5, atol=1e-5)


def gradient_operands(case: Any, dtype: Any) -> list[Tensor]:
    """Return products, bias, ends, V and shares."""
    each = operands(*case, dtype)
    random = torch.Generator().manual_seed(9)
    v = torch.randn(case[0], case[1], generator=random).to(dtype)
    return [*each, v, torch.randn(case[0], generator=random)]


def expected_gradients(
    each: list[Tensor], activation: str, *, in_turn: bool, biased: bool
) -> list[Tensor]:
    """Return autograd's in fp64."""
    products, bias, ends, v, share = (t.cpu().double() for t in each)
    products.requires_grad_()
    of_experts = [products, bias, ends.int()]
    h = expected(of_experts, activation, in_turn=in_turn, biased=biased)
    (both,) = torch.autograd.grad(h, products, share[:, None] * v)
    return [both, share[:, None] * h.detach(), (v * h.detach()).sum(1)]


@pytest.mark.interpreted
@pytest.mark.parametrize(("case", "activation"), crossed(CASES, [*GATES]), ids=str)
def test_the_derivative_is_right_in_the_interpreter(case, activation) -> None:
    for in_turn, biased in ((False, True), (True, True), (True, False)):
        products, bias, ends, v, share = each = gradient_operands(case, torch.float32)
        first = products, bias if biased else None, ends, v, share
        program, results = derivative_of(*first, activation, in_turn=in_turn)
        for result in results:
            result.fill_(torch.nan)
        program()
        actual = [*results[:2], results[2].sum(1)]
        right = expected_gradients(each, activation, in_turn=in_turn, biased=biased)
        for a, e in zip(actual, right, strict=True):
            torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "activation"), crossed(CASES, [*GATES]), ids=str)
def test_the_derivative_is_right_on_a_gpu(case, activation) -> None:
    for in_turn, biased in ((False, True), (True, True), (True, False)):
        each = [t.cuda() for t in gradient_operands(case, torch.bfloat16)]
        products, bias, ends, v, share = each
        first = products, bias if biased else None, ends, v, share
        actual = differentiate_gate(*first, activation, in_turn=in_turn)
        right = expected_gradients(each, activation, in_turn=in_turn, biased=biased)
        for a, e in zip(actual, right, strict=True):
            assert float((a.double().cpu() - e).norm() / e.norm().clamp_min(1e-30)) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "activation"), crossed(CASES, [*GATES]), ids=str)
def test_the_gate_is_right_on_a_gpu(case, activation) -> None:
    for in_turn, biased in ((False, True), (True, True), (True, False)):
        each = [t.cuda() for t in operands(*case, torch.bfloat16)]
        products, bias, ends = each
        h = gate_experts(products, bias if biased else None, ends, activation, in_turn=in_turn)
        right = expected(each, activation, in_turn=in_turn, biased=biased)
        torch.testing.assert_close(h.double().cpu(), right, rtol=0.01, atol=0.01)


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_generation_compiles_the_gate(capability: int) -> None:
    products = torch.empty(64, 5760, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(1, 32, dtype=torch.int32, device="meta")
    bias = torch.empty(32, 5760, dtype=torch.bfloat16, device="meta")
    for in_turn in (False, True):
        program = kernel_of(products, bias, ends, "clamped_swiglu", in_turn=in_turn)
        assert complaint_about_launch(program, capability) is None
        v = torch.empty(64, 2880, dtype=torch.bfloat16, device="meta")
        share = torch.empty(64, dtype=torch.float32, device="meta")
        first = products, bias, ends, v, share
        derivative, _ = derivative_of(*first, "clamped_swiglu", in_turn=in_turn)
        assert complaint_about_launch(derivative, capability) is None
