"""Calls that are repeated, in Python and by front.cpp: what must not change while they are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.kernels._common import front
from sparsebench.kernels._common.front_in_python import DGRAD, LINEAR, MOST, WGRAD, Repeats
from tests.kernels.test_front import DOUBLE, kind  # noqa: F401
from tests.kernels.test_front import pytestmark as extension

X = torch.arange(32.0).view(4, 8)
Record = Callable[..., Any]


def by_extension(record: Any, x: Tensor) -> None:
    """Record a launch that writes 2 X."""
    step: Any = (DOUBLE, len(x), 32, 0, [], b"\0" * 16, [0, 8], [(0, 0, 0), (1, 0, 8)], None)
    record.add(0, [x], [torch.empty_like(x)], [step], [], None, [], None)


@pytest.fixture(params=["Python", pytest.param("extension", marks=extension)])
def doubling(request: pytest.FixtureRequest) -> Record:
    """Return a function that records calls of 2 X, for as many tokens as each X has."""
    in_python = request.param == "Python"
    new = Repeats if in_python else request.getfixturevalue("kind")

    def recorded(holder: dict[str, Any], *xs: Tensor, limit: int = 0, content: bool = True) -> Any:
        record = new(limit)
        record.guard(holder, "w", holder["w"], content)
        record.guard(holder, "bias", holder.get("bias"), False)
        for x in xs or (X,):
            if in_python:
                record.add(LINEAR, [x], lambda rows: 2 * rows)
            else:
                by_extension(record, x)
        return record

    return recorded


def test_a_call_is_repeated_for_tensors_of_the_same_layout(doubling: Record) -> None:
    record = doubling({"w": torch.ones(8)}, X, X[:2])
    for x in (X, X.clone(), X[:2] + 1):
        assert torch.equal(record(x), 2 * x)
    for other in (X.half(), X[:3], X.T):
        assert record(other) is None
    assert not record.stale


CHANGES: dict[str, Callable[[Tensor, dict[str, Any]], object]] = {
    "replaced": lambda w, holder: holder.update(w=w.clone()),
    "removed": lambda w, holder: holder.clear(),
    "written": lambda w, holder: w.mul_(2),
    "moved": lambda w, holder: setattr(w, "data", w.clone()),
    "trained": lambda w, holder: w.requires_grad_(),
    "biased": lambda w, holder: holder.update(bias=w),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_changes_ends_the_repeats(doubling: Record, change: str) -> None:
    holder = {"w": torch.ones(8)}
    record = doubling(holder)
    assert record(X) is not None
    CHANGES[change](holder["w"], holder)
    with torch.no_grad():
        assert record(X) is None
    assert record.stale


def test_a_weight_that_every_call_reads_may_be_written(doubling: Record) -> None:
    w = torch.ones(8)
    record = doubling({"w": w}, content=False)
    w.mul_(3)
    assert torch.equal(record(X), 2 * X)


def test_a_call_that_torch_must_see_is_not_repeated(doubling: Record) -> None:
    record = doubling({"w": torch.nn.Parameter(torch.ones(8))})
    assert record(X) is None
    with torch.no_grad():
        assert record(X) is not None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert record(X) is None
        assert record(X.as_subclass(type("Other", (Tensor,), {}))) is None
    frozen = doubling({"w": torch.ones(8)})
    assert frozen(X.clone().requires_grad_()) is None
    seen: list[object] = []

    def mapped(row: Tensor) -> Tensor:
        seen.append(frozen(row))
        return row

    torch.func.vmap(mapped)(X)
    assert seen == [None]
    assert not record.stale
    assert not frozen.stale


def test_a_limited_number_of_calls_is_repeated(doubling: Record) -> None:
    record = doubling({"w": torch.ones(8)}, limit=3)
    repeated = [record(X) is not None for _ in range(5)]
    assert repeated[0]
    assert not repeated[-1]
    assert record.due()
    assert not record.due()
    assert record(X) is not None


def test_the_oldest_call_makes_room_and_copies_are_empty(doubling: Record) -> None:
    later = [torch.ones(m, 8) for m in range(5, 5 + max(MOST, 70))]
    record = doubling({"w": torch.ones(8)}, X, *later)
    assert record(X) is None
    assert torch.equal(record(later[-1]), 2 * later[-1])
    assert copy.deepcopy(record) is None


def test_the_third_call_of_an_unchanged_weight_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEBENCH_FRONT", "0")
    w, bias = torch.full((8,), 2.0), torch.ones(8)
    record: Any = None
    guards = [front.Guard({"w": w}, "w", w)]
    for _ in range(3):
        y, record = front.recorded(record, X, lambda rows: rows * w, guards, bias=bias)
        assert torch.equal(y, 2 * X + 1)
    assert torch.equal(record(X), 2 * X + 1)
    w.mul_(2)
    assert record(X) is None


# ---- backward ----


class Layer:
    """Y = X * W + bias of X [..., 8] and W [8]; the derivative counts its calls, and adds them."""

    def __init__(self, bias: Tensor | None = None) -> None:
        self.values, self.index = torch.nn.Parameter(torch.arange(1.0, 9.0)), torch.ones(3)
        self.calls: list[tuple[bool, bool]] = []
        self.front = Repeats(0)
        for tensor, content in ((self.values, False), (bias, False), (self.index, True)):
            self.front.guard(None, "", tensor, content)
        self.front.differentiate(self.derivative, self.values, bias, False)
        self.bias = 0 if bias is None else bias

    def __call__(self, x: Tensor) -> Tensor:
        self.front.add(LINEAR, [x], lambda rows: rows * self.values + self.bias)
        y = self.front(x)
        assert y is not None
        return y

    def derivative(
        self, record: Any, dy: Tensor, x: Any, values: Any, for_x: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        self.calls.append((for_x, for_values))
        rows, dx, dw = dy.reshape(-1, 8), None, None
        if for_x:
            dx = front.record(record, DGRAD, [rows, values], torch.mul).view(dy.shape)
        if for_values:
            operands = [rows, x.reshape(-1, 8)]
            dw = front.record(record, WGRAD, operands, lambda a, b: (a * b).sum(0))
        return dx, dw

    def gradients(self, x: Tensor, dy: Tensor) -> list[Tensor]:
        """Return dX and dW, and check both."""
        dx, dw = torch.autograd.grad(self(x), (x, self.values), dy)
        torch.testing.assert_close(dx, dy * self.values)
        torch.testing.assert_close(dw, (dy * x).reshape(-1, 8).sum(0))
        return [dx, dw]


@pytest.mark.parametrize("shape", [(4, 8), (2, 2, 8)])
def test_gradients_are_repeated_for_operands_of_the_same_layout(shape: tuple[int, ...]) -> None:
    layer, x, dy = Layer(), torch.randn(shape, requires_grad=True), torch.randn(shape)
    for _ in range(3):
        layer.gradients(x, dy)
        layer.gradients(x.detach().clone().requires_grad_(), dy.clone())
    assert layer.calls == [(True, True)]
    layer.gradients(x, torch.ones(()).expand(shape))  # in another layout
    assert layer.calls[1:] == [(True, True)]


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    layer, x, dy = Layer(), X.clone(), torch.randn(4, 8)
    for needs_x in (False, True, True):
        layer(x.requires_grad_(needs_x)).backward(dy)
    assert layer.calls == [(False, True), (True, False)]  # dW is repeated
    torch.testing.assert_close(x.grad, 2 * dy * layer.values)


def test_a_bias_has_its_gradient() -> None:
    bias, dy = torch.randn(8, requires_grad=True), torch.randn(2, 2, 8)
    Layer(bias)(X.view(2, 2, 8)).backward(dy)
    torch.testing.assert_close(bias.grad, dy.sum((0, 1)))


def test_second_derivatives_take_the_derivative() -> None:
    layer, x = Layer(), X.clone().requires_grad_()
    layer.gradients(x, X)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    dx.sum().backward()
    torch.testing.assert_close(layer.values.grad, (4 * layer.values * x).sum(0).detach())


@pytest.mark.parametrize("which", ["values", "x"])
def test_a_write_between_forward_and_backward_is_an_error(which: str) -> None:
    layer, x = Layer(), X.clone().requires_grad_()
    layer.gradients(x, X)
    y = layer(x)
    with torch.no_grad():
        (layer.values if which == "values" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_derivative_sees_an_index_that_is_written_after_forward() -> None:
    layer, x = Layer(), X.clone().requires_grad_()
    layer.gradients(x, X)
    y = layer(x)
    layer.index.zero_()
    y.backward(X)
    assert layer.calls == [(True, True), (True, True)]
    assert layer.front(x) is None
    assert layer.front.stale


def test_values_that_moved_after_forward_are_read_where_they_are() -> None:
    layer, x = Layer(), X.clone().requires_grad_()
    layer.gradients(x, X)
    y = layer(x)
    layer.values.data = torch.randn(8)
    (dx,) = torch.autograd.grad(y, x, X)
    torch.testing.assert_close(dx, X * layer.values)
    assert layer.front(x) is None
    assert layer.front.stale


def test_autocast_in_backward_takes_the_derivative() -> None:
    layer, x = Layer(), X.clone().requires_grad_()
    layer.gradients(x, X)
    y = layer(x)
    with torch.autocast("cpu"):
        y.backward(X)
    assert len(layer.calls) == 2


def test_checkpoints_and_hooks_of_saved_tensors_see_x_and_the_values() -> None:
    layer, x, sizes = Layer(), X.clone().requires_grad_(), []

    def pack(t: Tensor) -> Tensor:
        sizes.append((*t.shape,))
        return t.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    torch.testing.assert_close(torch.autograd.grad(y, x, X)[0], X * layer.values)
    assert sizes == [(4, 8), (8,)]
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y, x, X)[0], X * layer.values)


def test_a_step_of_an_optimizer_leaves_the_repeats() -> None:
    layer, x = Layer(), X.clone().requires_grad_()
    optimizer = torch.optim.SGD([layer.values], lr=0.1)
    for _ in range(3):
        layer.gradients(x, X)
        layer.values.grad = torch.ones(8)
        optimizer.step()
    assert layer.calls == [(True, True)]
