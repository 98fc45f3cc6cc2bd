"""Calls without Python, by front.cpp alone; what Python does too is in test_front_in_python.py."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

from sparsebench.kernels._common import front
from tests.kernels.conftest import COLUMNS, DOUBLE
from tests.kernels.test_front_in_python import Layer, extension

pytestmark = extension


class Owner:
    """Memory that a launch reads."""


def add(record: Any, x: torch.Tensor, owners: list[Any] | None = None) -> None:
    """Record one launch, 2 X, for as many tokens as X has."""
    step: Any = (DOUBLE, len(x), 32, 0, [], b"\0" * 16, [0, 8], [(0, 0, 0), (1, 0, 8)], None)
    record.add(0, [x], [torch.empty(len(x), COLUMNS)], [step], [], None, owners or [], None)


def test_a_weight_that_holds_its_recordings_is_freed(kind: Any) -> None:
    x, owner = torch.randn(1, COLUMNS), Owner()
    owner.front = kind(0)  # type: ignore[attr-defined]
    add(owner.front, x, [owner])  # type: ignore[attr-defined]
    freed = weakref.ref(owner)
    del owner
    gc.collect()
    assert freed() is None


# ---- backward ----


def test_an_input_that_no_launch_reads_must_stay_where_it_is(kind: Any) -> None:
    x, dy = torch.randn(6, COLUMNS, requires_grad=True), torch.randn(6, COLUMNS)
    layer = Layer(kind, x)
    packed = layer.values.detach()
    step: Any = (DOUBLE, 6, 32, 0, [], b"\0" * 16, [0, 8], [(0, 0, 0), (2, 0, 8)], None)
    layer.front.add(1, [dy, packed], [torch.empty_like(dy)], [step], [1], None, [packed], None)
    (dx,) = torch.autograd.grad(layer.front(x), x, dy)
    assert torch.equal(dx, 2 * dy)
    y = layer.front(x)
    layer.values.data = torch.randn(6, COLUMNS)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], dy + layer.values)


def test_a_frozen_weight_has_a_gradient_of_x_alone(kind: Any) -> None:
    x, dy = torch.randn(6, COLUMNS, requires_grad=True), torch.randn(6, COLUMNS)
    record = kind(0)
    calls = []

    def derivative(*args: Any) -> Any:
        calls.append(args[2:])
        return 2 * args[1], None

    for keeps_x in (False, True):
        record.differentiate(derivative, None, None, keeps_x)
        add(record, x.detach())
        assert torch.equal(torch.autograd.grad(record(x), x, dy)[0], 2 * dy)
        (seen, *rest) = calls.pop()
        assert (seen is x, rest) == (keeps_x, [None, True, False])


def test_a_product_with_a_weight_that_launches_write_out(kind: Any) -> None:
    x, dy = torch.randn(2, 3, COLUMNS, requires_grad=True), torch.randn(2, 3, COLUMNS)
    tiles, record, calls = torch.randn(COLUMNS, COLUMNS), kind(0), []

    def derivative(*args: Any) -> Any:
        calls.append(args)
        return torch.zeros_like(x), None

    record.guard(None, "tiles", tiles, True)
    record.differentiate(derivative, None, None, False)
    add(record, x.detach().view(6, COLUMNS))
    half = COLUMNS // 2
    halves: list[Any] = []
    for i, start in enumerate((0, half * COLUMNS * 4)):
        image = tiles[i * half :].data_ptr().to_bytes(8, "little") + b"\0" * 8
        halves.append((DOUBLE, half, 32, 0, [], image, [0, 8], [(1, start, 8)], None))
    product = (0, 0, 0, 0, [], b"", [], [(0, 0, 0), (1, 0, 0), (2, 0, 0)], None)
    outputs = [torch.empty(COLUMNS, COLUMNS), torch.empty(6, COLUMNS)]
    rows = dy.view(6, COLUMNS)
    assert record.add(1, [rows], outputs, [*halves, product], [], None, [tiles], None)
    torch.testing.assert_close(torch.autograd.grad(record(x), x, dy)[0], dy @ (2 * tiles))
    y = record(x)
    tiles.zero_()
    assert not torch.autograd.grad(y, x, dy)[0].any()
    assert len(calls) == 1  # Python sees a weight that was written after forward


def test_an_error_of_the_derivative_reaches_the_caller(kind: Any) -> None:
    x = torch.randn(6, COLUMNS, requires_grad=True)
    layer = Layer(kind, x)

    def fail(*args: Any) -> Any:
        raise KeyError("no plan")

    layer.front.differentiate(fail, layer.values, None, False)
    with pytest.raises(KeyError, match="no plan"):
        layer.front(x).sum().backward()


def test_a_graph_keeps_its_recordings_and_frees_them(kind: Any) -> None:
    x = torch.randn(6, COLUMNS, requires_grad=True)
    layer, owner = Layer(kind, x), Owner()
    freed = weakref.ref(owner)
    step: Any = (DOUBLE, 6, 32, 0, [], b"\0" * 16, [0, 8], [(0, 0, 0), (2, 0, 8)], None)
    tensors = [torch.empty(6, COLUMNS)]
    layer.front.add(1, [tensors[0], layer.values], tensors, [step], [1], None, [owner], None)
    y = layer.front(x)
    del owner, layer
    gc.collect()
    assert freed() is not None
    torch.autograd.grad(y, x, torch.ones_like(y))
    del y
    gc.collect()
    assert freed() is None


def test_a_weight_that_changes_in_every_call_is_never_recorded(kind, monkeypatch) -> None:
    monkeypatch.setattr(front, "front_type", lambda: kind)
    x, record, w = torch.randn(6, COLUMNS), None, torch.ones(3)
    for _ in range(4):
        w = w + 1
        y, record = front.recorded(record, x, lambda rows: 2 * rows, [front.Guard(None, "w", w)])
        assert torch.equal(y, 2 * x)
        assert isinstance(record, front.Pending)
        assert copy.deepcopy(record) is None
    guards = [front.Guard(None, "w", w)]
    _, record = front.recorded(record, x, lambda rows: 2 * rows, guards)
    assert isinstance(record, kind)


@pytest.mark.parametrize("planned", [False, True])
def test_compiled_autograd_gives_the_same_gradients(kind: Any, planned: bool) -> None:
    bias = torch.randn(COLUMNS, requires_grad=True)
    x, dy = torch.randn(6, COLUMNS, requires_grad=True), torch.randn(6, COLUMNS)
    layer = Layer(kind, x, bias)
    if planned:
        layer.plan(x)
    inputs = x, layer.values, bias
    right = torch.autograd.grad(layer.front(x), inputs, dy)
    for _ in range(2):  # the second time from the cache of compiled graphs
        y = layer.front(x)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward(dy)
        for operand, gradient in zip(inputs, right, strict=True):
            assert operand.grad is not None
            assert torch.equal(operand.grad, gradient)
            operand.grad = None
    assert bool(layer.calls) is not planned
