"""Calls of several arguments and results without Python, by front.cpp on a CPU."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.kernels._common.front import (
    BackwardProduct,
    Conditions,
    Guard,
    Recordings,
    Signature,
    record,
)
from sparsebench.kernels._common.transforms import aligned
from tests.kernels.conftest import COLUMNS, on_a_cpu, result_of

pytestmark = on_a_cpu
MIXED = Signature(
    arguments=("q", "k", "v"),
    results=("o", "l"),
    backward=(BackwardProduct(("do", "q", "k", "v", "o", "l"), ("q", "k", "v")),),
    exact=True,
)


class Mixing:
    """O = Q + K + V and L = 2 Q [rows, COLUMNS]; dQ = dO + O, dK = dO + K + V, dV = dO + Q + L."""

    def __init__(self) -> None:
        self.mask, self.recordings, self.calls = torch.ones(3), Recordings(MIXED), 0

    def __call__(self, *qkv: Tensor) -> tuple[Tensor, Tensor]:
        results = self.recordings.replay(*qkv)
        if results is None:
            conditions = Conditions([Guard(None, "mask", self.mask)], derivative=self.derivative)
            results = self.recordings.call(qkv, conditions, self._run, lambda: self.right(*qkv))
        o, log = results
        return o, log

    @staticmethod
    def right(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return both results by torch, whose gradients differ."""
        return q + k + v, (2 * q.detach()).reshape(-1, COLUMNS)

    @staticmethod
    def _run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        log = result_of(q, shape=(q.numel() // COLUMNS, COLUMNS))
        flat = result_of(q, k, v, shape=(q.shape[0] * q.shape[1], q.shape[2] * q.shape[3]))
        return [flat.view(q.shape), log]

    def derivative(
        self, front: Any, do: Tensor, saved: Sequence[Any], needed: Any
    ) -> Sequence[Tensor]:
        self.calls += 1
        return record(front, 1, [aligned(t) for t in (do, *saved)], self._gradients)

    @staticmethod
    def _gradients(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, log: Tensor
    ) -> list[Tensor]:
        dq, dk = result_of(do, o), result_of(do, k, v)
        return [dq, dk, result_of(do, q, log)]

    def gradients(self, qkv: Sequence[Tensor], do: Tensor) -> None:
        """Check the results and the gradients of a call."""
        o, log = self(*qkv)
        q, k, v = qkv
        assert not log.requires_grad
        assert all(map(torch.equal, (o, log), self.right(q, k, v)))
        if "Node" in o.grad_fn.name():
            gradients = torch.autograd.grad(o, qkv, do)
            right = do + o, do + k + v, do + q + log.view(q.shape)
            assert all(map(torch.equal, gradients, right))


def whole(*shape: int) -> Tensor:
    """Return whole numbers, of which sums in any order are exact."""
    return torch.randint(-9, 9, shape).float()


def operands(*shape: int) -> list[Tensor]:
    return [whole(*shape, COLUMNS).requires_grad_() for _ in range(3)]


def mixing(*shape: int) -> tuple[Mixing, list[Tensor]]:
    """Return an operator both of whose passes are replayed, and its arguments."""
    op, qkv = Mixing(), operands(*shape)
    for _ in range(4):
        op.gradients(qkv, whole(*qkv[0].shape))
    op.calls = 0
    return op, qkv


@pytest.mark.usefixtures("poisoned")
def test_three_arguments_have_two_results_and_three_gradients() -> None:
    op, _ = mixing(2, 3, 4)
    for _ in range(3):
        qkv = operands(2, 3, 4)
        assert op.recordings.replay(*qkv) is not None
        op.gradients(qkv, whole(*qkv[0].shape))
        with torch.no_grad():
            o, log = op.recordings.replay(*qkv)
            assert all(map(torch.equal, (o, log), op.right(*qkv)))
    assert not op.calls


def test_exact_sizes_are_not_replayed_for_others() -> None:
    op, qkv = mixing(2, 3, 4)
    for shape in ((3, 2, 4), (2, 4, 3), (1, 6, 4), (6, 4), (1, 2, 3, 4)):
        assert op.recordings.replay(*operands(*shape)) is None
    assert op.recordings.replay(qkv[0], qkv[1], qkv[2][:1]) is None
    assert op.recordings.replay(*qkv[:2]) is None
    assert op.recordings.replay(*qkv) is not None


def test_views_are_copied_in_both_passes() -> None:
    op, _ = mixing(2, 3, 4)
    qkv = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in operands(2, 3, 4)]
    qkv = [t.requires_grad_() for t in qkv]
    assert not qkv[0].is_contiguous()
    for do in (whole(2, 3, 4, COLUMNS), torch.ones(()).expand(2, 3, 4, COLUMNS)):
        assert op.recordings.replay(*qkv) is not None
        op.gradients(qkv, do)
    assert not op.calls


def test_one_tensor_may_be_several_arguments() -> None:
    op, x = Mixing(), whole(2, 3, 4, COLUMNS)
    for _ in range(3):
        assert torch.equal(op(x, x, x)[0], 3 * x)
    assert op.recordings.replay(x, x, x) is not None


def test_some_gradients_of_a_product_may_be_needed() -> None:
    op, (q, k, v) = mixing(2, 3, 4)
    do = whole(*q.shape)
    o, _ = op.recordings.replay(q.detach(), k, v.detach())
    (dk,) = torch.autograd.grad(o, k, do)
    assert torch.equal(dk, do + k + v)
    assert not op.calls


def test_a_result_without_a_gradient_may_not_be_written_before_backward() -> None:
    op, qkv = mixing(2, 3, 4)
    for which in (0, 1):
        results = op.recordings.replay(*qkv)
        results[which].detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            results[0].sum().backward()


def test_a_mask_that_is_written_ends_the_recordings() -> None:
    op, qkv = mixing(2, 3, 4)
    o, _ = op.recordings.replay(*qkv)
    op.mask.zero_()
    assert op.recordings.replay(*qkv) is None
    torch.autograd.grad(o, qkv, torch.ones_like(o))
    assert op.calls == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd_of_several_arguments() -> None:
    op, qkv = mixing(2, 3, 4)
    do = whole(*qkv[0].shape)
    for _ in range(2):
        o, log = op.recordings.replay(*qkv)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            o.backward(do)
        right = do + o, do + qkv[1] + qkv[2], do + qkv[0] + log.view(o.shape)
        for operand, gradient in zip(qkv, right, strict=True):
            assert torch.equal(operand.grad, gradient)
            operand.grad = None
    assert not op.calls


def test_results_and_arguments_are_freed_after_backward() -> None:
    op, qkv = mixing(2, 3, 4)
    o, log = op.recordings.replay(*qkv)
    torch.autograd.grad(o, qkv, torch.ones_like(o))
    freed = [weakref.ref(t) for t in (*qkv, o, log)]
    del qkv, o, log
    gc.collect()
    assert all(each() is None for each in freed)
