"""Calls without Python, by front.cpp: what must not change while they are replayed."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.kernels._common import front
from tests.kernels.conftest import ADD, COLUMNS, DOUBLE
from tests.tools.marks import needs_gxx

pytestmark = [
    needs_gxx,
    pytest.mark.exhaustive,  # compiles for 15 s
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver itself is connected there"),
]
X = torch.arange(32.0).view(4, 8)
Record = Callable[..., Any]


class Owner:
    """Memory that a launch reads."""


def add(record: Any, x: torch.Tensor, owners: list[Any] | None = None) -> None:
    """Record one launch, 2 X, for as many tokens as X has."""
    step: Any = (DOUBLE, len(x), 32, 0, [], b"\0" * 16, [0, 8], [(0, 0, 0), (1, 0, 8)], None)
    record.add(0, [x], [torch.empty(len(x), COLUMNS)], [step], [], None, owners or [], None)


@pytest.fixture
def doubling(kind: Any) -> Record:
    """Return a function that records calls of 2 X, for as many tokens as each X has."""

    def recorded(holder: dict[str, Any], *xs: Tensor, limit: int = 0, content: bool = True) -> Any:
        record = kind(limit)
        record.guard(holder, "w", holder["w"], content)
        record.guard(holder, "bias", holder.get("bias"), False)
        for x in xs or (X,):
            add(record, x)
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
    later = [torch.ones(m, 8) for m in range(5, 5 + 70)]
    record = doubling({"w": torch.ones(8)}, X, *later)
    assert record(X) is None
    assert torch.equal(record(later[-1]), 2 * later[-1])
    assert copy.deepcopy(record) is None


# ---- backward ----


class Layer:
    """Y = 2 X + bias, dX = dY + V and dW = dY + X; the derivative in Python counts its calls."""

    def __init__(self, kind: Any, x: Tensor, bias: Tensor | None = None) -> None:
        rows = x.detach().reshape(-1, COLUMNS)
        self.values, self.index = torch.nn.Parameter(torch.randn(len(rows), COLUMNS)), torch.ones(3)
        self.calls: list[tuple[bool, ...]] = []
        self.front = kind(0)
        for name, tensor in (("values", self.values), ("bias", bias), ("index", self.index)):
            self.front.guard(None, name, tensor, name == "index")
        self.front.differentiate(self.derivative, self.values, bias, False)
        self._add(0, [rows, self.values.detach()], DOUBLE, [0, 2], bias)

    def _add(
        self, op: int, inputs: list[Tensor], kernel: int, places: list[int], bias: Any = None
    ) -> None:
        """Record a launch of a kernel whose arguments are operands at some places."""
        at = [8 * i for i in range(len(places))]
        patches = [(place, 0, offset) for place, offset in zip(places, at, strict=True)]
        step: Any = (kernel, len(inputs[0]), 32, 0, [], b"\0" * 8 * len(at), at, patches, None)
        unread = [i for i in range(len(inputs)) if i not in places]
        assert self.front.add(
            op, inputs, [torch.empty_like(inputs[0])], [step], unread, bias, [], None
        )

    def __call__(self, x: Tensor) -> Tensor:
        y = self.front(x)
        assert y is not None
        return y

    def derivative(
        self, record: Any, dy: Tensor, x: Any, values: Any, *needed: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        self.calls.append(needed)
        rows, results = dy.reshape(-1, COLUMNS), []
        for need, other in ((needed[0], values), (needed[1], x)):
            results.append(rows + other.reshape(-1, COLUMNS) if need else None)
        dx, dw = results
        return None if dx is None else dx.view(dy.shape), dw

    def plan(self, x: Tensor) -> None:
        """Record both products of backward."""
        rows = x.detach().reshape(-1, COLUMNS)
        for op, other in ((1, self.values.detach()), (2, rows)):
            self._add(op, [torch.empty_like(rows), other], ADD, [0, 1, 2])

    def gradients(self, x: Tensor, dy: Tensor) -> list[Tensor]:
        """Return dX and dW, and check both."""
        dx, dw = torch.autograd.grad(self(x), (x, self.values), dy)
        torch.testing.assert_close(dx, dy + self.values.view(x.shape))
        torch.testing.assert_close(dw, (dy + x).view(dw.shape))
        return [dx, dw]


def planned(kind: Any, *shape: int) -> tuple[Layer, Tensor]:
    """Return a layer whose backward is repeated, and its X."""
    x = torch.randn(*(shape or (6,)), COLUMNS, requires_grad=True)
    layer = Layer(kind, x)
    layer.plan(x)
    return layer, x


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_gradients_are_repeated_for_operands_of_the_same_layout(kind, shape) -> None:
    layer, x = planned(kind, *shape)
    dy = torch.randn_like(x)
    for _ in range(3):
        layer.gradients(x, dy)
        layer.gradients(x.detach().clone().requires_grad_(), dy.clone())
    assert not layer.calls
    layer.gradients(x, torch.ones(()).expand(x.shape))  # in another layout
    assert not layer.calls


def test_only_the_gradients_that_are_needed_are_computed(kind: Any) -> None:
    x, dy = torch.randn(6, COLUMNS), torch.randn(6, COLUMNS)
    layer = Layer(kind, x)
    layer(x).backward(dy)
    assert layer.calls == [(False, True)]
    (dx,) = torch.autograd.grad(layer(x.requires_grad_()), x, dy)
    assert layer.calls[1:] == [(True, False)]
    torch.testing.assert_close(dx, dy + layer.values)


def test_a_bias_has_its_gradient(kind: Any) -> None:
    bias = torch.randn(COLUMNS, requires_grad=True)
    x, dy = torch.randn(2, 3, COLUMNS), torch.randn(2, 3, COLUMNS)
    y = Layer(kind, x, bias)(x)
    y.backward(dy)
    torch.testing.assert_close(y, 2 * x + bias)
    torch.testing.assert_close(bias.grad, dy.sum((0, 1)))


def test_second_derivatives_take_the_derivative(kind: Any) -> None:
    layer, x = planned(kind)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    assert len(layer.calls) == 1
    dx.sum().backward()  # dX = 2 Y + V, and backward of Y gives V the gradient 2 + X
    torch.testing.assert_close(layer.values.grad, 3 + x.detach())


@pytest.mark.parametrize("which", ["values", "x"])
def test_a_write_between_forward_and_backward_is_an_error(kind: Any, which: str) -> None:
    layer, x = planned(kind)
    y = layer(x)
    with torch.no_grad():
        (layer.values if which == "values" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_derivative_sees_an_index_that_is_written_after_forward(kind: Any) -> None:
    layer, x = planned(kind)
    y = layer(x)
    layer.index.zero_()
    y.backward(torch.ones_like(y))
    assert layer.calls == [(True, True)]
    assert layer.front(x) is None
    assert layer.front.stale


def test_values_that_moved_after_forward_are_read_where_they_are(kind: Any) -> None:
    layer, x = planned(kind)
    y, dy = layer(x), torch.randn_like(x)
    layer.values.data = torch.randn(6, COLUMNS)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, dy + layer.values)
    assert layer.front(x) is None
    assert layer.front.stale


def test_autocast_in_backward_takes_the_derivative(kind: Any) -> None:
    layer, x = planned(kind)
    y = layer(x)
    with torch.autocast("cpu"):
        y.backward(torch.ones_like(y))
    assert layer.calls == [(True, True)]


def test_checkpoints_and_hooks_of_saved_tensors_see_x_and_the_values(kind: Any) -> None:
    x = torch.randn(2, 3, COLUMNS, requires_grad=True)
    layer, dy, sizes = Layer(kind, x), torch.randn(2, 3, COLUMNS), []

    def pack(t: Tensor) -> Tensor:
        sizes.append((*t.shape,))
        return t.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], dy + layer.values.view(x.shape))
    assert sizes == [(2, 3, COLUMNS), (6, COLUMNS)]
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], dy + layer.values.view(x.shape))


def test_a_step_of_an_optimizer_leaves_the_repeats(kind: Any) -> None:
    layer, x = planned(kind)
    optimizer = torch.optim.SGD([layer.values], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).backward(torch.ones_like(x))
        optimizer.step()
    torch.testing.assert_close(layer.values.grad, 1 + x.detach())
    assert not layer.front.stale
    assert not layer.calls


def test_a_weight_that_holds_its_recordings_is_freed(kind: Any) -> None:
    x, owner = torch.randn(1, COLUMNS), Owner()
    owner.front = kind(0)  # type: ignore[attr-defined]
    add(owner.front, x, [owner])  # type: ignore[attr-defined]
    freed = weakref.ref(owner)
    del owner
    gc.collect()
    assert freed() is None


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
