"""Backward without Python, by front.cpp on a CPU: gradients, and what only Python computes."""

import gc
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from sparsebench.kernels._common.front import (
    BackwardProduct,
    Conditions,
    Front,
    Guard,
    Recordings,
    Signature,
    node,
    record,
)
from sparsebench.kernels._common.tape import on_tape
from sparsebench.kernels._common.transforms import readable, rows_of
from tests.kernels.conftest import COLUMNS, on_a_cpu, result_of

pytestmark = on_a_cpu
TRAINED = Signature(
    held=("values",),
    backward=(BackwardProduct(("dy", "values"), ("x",)), BackwardProduct(("dy", "x"), ("values",))),
)


class Layer:
    """Y = X + V + bias, with dX = dY + V and dV = dY + X, for V [rows of X, COLUMNS].

    calls   which gradients the derivative in Python computed
    packed  dX reads a copy of V that was made before
    """

    def __init__(self, x: Tensor, bias: Tensor | None = None, *, packed: bool = False) -> None:
        self.values = nn.Parameter(torch.randn(x.numel() // COLUMNS, COLUMNS))
        self.index, self.bias, self.recordings = torch.ones(3), bias, Recordings(TRAINED)
        self.calls: list[tuple[bool, ...]] = []
        self.packed = self.values.detach().clone() if packed else None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.recordings.replay(x)
        return self._first(x) if y is None else y

    def _first(self, x: Tensor) -> Tensor:
        operands = ("values", self.values), ("bias", self.bias), ("index", self.index)
        guards = [Guard(None, name, t, name == "index") for name, t in operands]
        conditions = Conditions(guards, [self.values], self.bias, self.derivative)
        in_python = partial(node, TRAINED, self.derivative, self._y, self.bias, x, self.values)
        y: Tensor = self.recordings.call([x], conditions, lambda rows: [self._y(rows)], in_python)
        return y

    def _y(self, rows: Tensor) -> Tensor:
        y = result_of(readable(rows), self.values.detach())
        return y if self.bias is None else y.add_(self.bias)

    def derivative(
        self,
        front: Front | None,
        dy: Tensor,
        saved: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        self.calls.append((*needed,))
        x, values, *_ = saved
        if torch.is_grad_enabled():
            pairs = zip(needed, (values, x), strict=True)
            return [dy + t.view(dy.shape) if need else None for need, t in pairs]
        rows = readable(rows_of(dy))
        dx = dw = None
        if needed[0]:
            assert values is not None
            (dx,) = record(
                front, 1, [rows, values], self._dx, fixed=[] if self.packed is None else [1]
            )
            dx = dx.view(dy.shape)
        if needed[1]:
            assert x is not None
            (dw,) = record(front, 2, [rows, readable(rows_of(x))], lambda *t: [result_of(*t)])
        return [dx, dw]

    def _dx(self, dy: Tensor, values: Tensor) -> list[Tensor]:
        if self.packed is None:
            return [result_of(dy, values)]
        on_tape(owners=(self.packed,))
        return [result_of(dy, self.packed)]

    def gradients(self, x: Tensor, dy: Tensor) -> list[Tensor]:
        """Return dX and dV, and check both."""
        dx, dw = torch.autograd.grad(self(x), (x, self.values), dy)
        assert torch.equal(dx, dy + self.values.view(x.shape))
        assert torch.equal(dw, (dy + x).view(dw.shape))
        return [dx, dw]


def trained(*shape: int, **options: Any) -> tuple[Layer, Tensor]:
    """Return a layer whose forward and backward are replayed, and its X."""
    x = torch.randn(*(shape or (6,)), COLUMNS, requires_grad=True)
    layer = Layer(x, **options)
    for _ in range(4):
        layer.gradients(x, torch.randn_like(x))
    assert is_in_cpp(layer(x))
    layer.calls.clear()
    return layer, x


def is_in_cpp(y: Tensor) -> bool:
    return not isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_gradients_are_replayed_for_operands_of_the_same_layout(shape: tuple[int, ...]) -> None:
    layer, x = trained(*shape)
    dy = torch.randn_like(x)
    layer.gradients(x, dy)
    layer.gradients(x.detach().clone().requires_grad_(), dy.clone())
    layer.gradients(x, torch.ones(()).expand(x.shape))  # is copied
    layer.gradients(x.detach().mT.contiguous().mT.requires_grad_(), dy)  # and X, in both passes
    assert not layer.calls


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    layer, x = trained()
    dy = torch.randn_like(x)
    (dx,) = torch.autograd.grad(layer(x), x, dy)
    assert torch.equal(dx, dy + layer.values)
    layer(x.detach()).backward(dy)
    assert torch.equal(layer.values.grad, dy + x)
    assert x.grad is None
    layer.recordings.clear()
    for _ in range(3):
        layer(x.detach()).backward(dy)
    assert set(layer.calls) == {(False, True)}


def test_a_bias_has_its_gradient() -> None:
    bias = torch.randn(COLUMNS, requires_grad=True)
    x, dy = torch.randn(2, 3, COLUMNS), torch.randn(2, 3, COLUMNS)
    layer = Layer(x, bias)
    for _ in range(4):
        bias.grad = None
        y = layer(x)
        y.backward(dy)
        torch.testing.assert_close(y, x + layer.values.view(x.shape) + bias)
        torch.testing.assert_close(bias.grad, dy.sum((0, 1)))
    assert is_in_cpp(y)


def test_second_derivatives_take_the_derivative() -> None:
    layer, x = trained()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    assert layer.calls == [(True, False)]
    dx.sum().backward()  # dX = 2 Y + V, and backward of Y gives V the gradient 2 + X
    torch.testing.assert_close(layer.values.grad, 3 + x.detach())


@pytest.mark.parametrize("which", ["values", "x"])
def test_a_write_between_forward_and_backward_is_an_error(which: str) -> None:
    layer, x = trained()
    y = layer(x)
    with torch.no_grad():
        (layer.values if which == "values" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_derivative_sees_an_index_that_is_written_after_forward() -> None:
    layer, x = trained()
    y = layer(x)
    layer.index.zero_()
    y.backward(torch.ones_like(y))
    assert layer.calls == [(True, True)]
    assert layer.recordings.replay(x) is None


def test_values_that_moved_after_forward_are_read_where_they_are() -> None:
    layer, x = trained()
    y, dy = layer(x), torch.randn_like(x)
    layer.values.data = torch.randn(6, COLUMNS)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, dy + layer.values)
    assert layer.recordings.replay(x) is None


def test_an_input_that_no_launch_reads_must_stay_where_it_is() -> None:
    layer, x = trained(packed=True)
    y, dy = layer(x), torch.randn_like(x)
    layer.values.data = layer.values.data.clone()
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, dy + layer.values)
    assert layer.calls == [(True, False)]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, once
def test_a_tangent_of_the_gradient_takes_the_derivative() -> None:
    layer, x = trained()
    y = layer(x)
    with forward_ad.dual_level():
        dy = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        torch.autograd.grad(y, x, dy)
    assert layer.calls == [(True, False)]


def test_autocast_in_backward_takes_the_derivative() -> None:
    layer, x = trained()
    y = layer(x)
    with torch.autocast("cpu"):
        y.backward(torch.ones_like(y))
    assert layer.calls == [(True, True)]


def test_checkpoints_and_hooks_of_saved_tensors_see_x_and_the_values() -> None:
    layer, x = trained(2, 3)
    dy, sizes = torch.randn(2, 3, COLUMNS), []

    def pack(t: Tensor) -> Tensor:
        sizes.append((*t.shape,))
        return t.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy + layer.values.view(x.shape))
    assert sizes == [(2, 3, COLUMNS), (6, COLUMNS)]
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy + layer.values.view(x.shape))


def test_a_step_of_an_optimizer_leaves_the_recordings() -> None:
    layer, x = trained()
    optimizer = torch.optim.SGD([layer.values], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).backward(torch.ones_like(x))
        optimizer.step()
    torch.testing.assert_close(layer.values.grad, 1 + x.detach())
    assert not layer.calls
    assert is_in_cpp(layer(x))


@pytest.mark.parametrize("error", [KeyError("no plan"), None])
def test_an_error_of_the_derivative_reaches_the_caller(error: Exception | None) -> None:
    layer, x = trained()

    def derivative(*_: Any) -> list[Tensor]:
        if error is not None:
            raise error
        return []

    layer.recordings.clear()
    layer.derivative = derivative  # type: ignore[method-assign]
    for _ in range(3):
        y = layer(x)
    with pytest.raises(type(error or ValueError()), match="no plan" if error else "a gradient or"):
        y.sum().backward()


def test_a_graph_keeps_its_recordings_and_frees_them() -> None:
    layer, x = trained(packed=True)
    assert layer.packed is not None
    freed = weakref.ref(layer.packed)
    y = layer(x)
    del layer
    gc.collect()
    assert freed() is not None
    torch.autograd.grad(y, x, torch.ones_like(y))
    del y
    gc.collect()
    assert freed() is None


def test_threads_differentiate_at_the_same_time() -> None:
    layer, _ = trained()

    def step(_: int) -> bool:
        own, dy = torch.randn(6, COLUMNS, requires_grad=True), torch.randn(6, COLUMNS)
        for _ in range(20):
            (dx,) = torch.autograd.grad(layer(own), own, dy)
            assert torch.equal(dx, dy + layer.values)
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(step, range(8)))


@pytest.mark.parametrize("planned", [False, True])
def test_compiled_autograd_gives_the_same_gradients(planned: bool) -> None:
    bias = torch.randn(COLUMNS, requires_grad=True)
    x, dy = torch.randn(6, COLUMNS, requires_grad=True), torch.randn(6, COLUMNS)
    layer = Layer(x, bias)
    inputs = x, layer.values, bias
    for _ in range(4):
        right = torch.autograd.grad(layer(x), inputs, dy)
    if not planned:
        layer.recordings.clear()
        for _ in range(3):
            y = layer(x)
        assert is_in_cpp(y)
    layer.calls.clear()
    for _ in range(2):  # the second time from the cache of compiled graphs
        y = layer(x)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward(dy)
        for operand, gradient in zip(inputs, right, strict=True):
            assert operand.grad is not None
            assert torch.equal(operand.grad, gradient)
            operand.grad = None
    assert bool(layer.calls) is not planned
