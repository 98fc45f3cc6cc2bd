"""Calls without Python, compiled for this machine, with a stand-in for the driver."""

import copy
import ctypes
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebench.kernels._common import front
from tests.tools.marks import needs_gxx

pytestmark = [
    needs_gxx,
    pytest.mark.exhaustive,  # compiles for 15 s
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver itself is connected there"),
]
COLUMNS = 8


class Owner:
    """Memory that a launch reads."""


def floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the class Front, whose launches write 2 A or, with two inputs, A + B."""

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def launch(config: int, function: int, parameters: int, extra: int) -> int:
        count = int(ctypes.cast(config, ctypes.POINTER(ctypes.c_uint32))[0]) * COLUMNS
        *inputs, out = (
            floats(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64))[0], count)
            for pointer in ctypes.cast(parameters, ctypes.POINTER(ctypes.c_uint64))[:function]
        )
        for i, values in enumerate(zip(*inputs, strict=True)):
            out[i] = 2 * values[0] if function == DOUBLE else sum(values)
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))
    def stream(device: int, out: Any) -> int:
        out[0] = 7
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    def capturing(stream: int, out: Any) -> int:
        out[0] = 0
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        file: Path = front._built()
        assert front._built() == file  # the second time from the cache
    module = front._load(file)
    functions = launch, stream, capturing
    module.connect(*(ctypes.cast(f, ctypes.c_void_p).value for f in functions))
    module.functions = functions  # alive as long as the module
    module.Front(0)(torch.randn(1, COLUMNS))  # a thread's first call takes the path in Python
    return module.Front


DOUBLE, ADD = 2, 3  # a kernel's number of arguments


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


class Layer:
    """Y = 2 X with dX = dY + V and dW = dY + X, whose derivative in Python counts its calls."""

    def __init__(self, kind: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.values = torch.nn.Parameter(torch.randn(len(x), COLUMNS))
        self.calls: list[tuple[bool, ...]] = []
        self.front = kind(0)
        self.front.guard(None, "values", self.values, False)
        self.front.guard(None, "bias", bias, False)
        self.front.differentiate(self.derivative, self.values, bias, False)
        step: Any = (DOUBLE, len(x), 32, 0, [], b"\0" * 16, [0, 8], [(0, 0, 0), (2, 0, 8)], None)
        inputs, like = [x.detach(), self.values.detach()], torch.empty(len(x), COLUMNS)
        self.front.add(0, inputs, [like], [step], [1], bias, [], None)

    def derivative(self, front: Any, dy: Any, x: Any, values: Any, *needed: bool) -> Any:
        self.calls.append(needed)
        flat = dy.reshape(-1, COLUMNS)
        dx = (flat + values).view(dy.shape) if needed[0] else None
        return dx, flat + x.reshape(-1, COLUMNS) if needed[1] else None

    def record(self, x: torch.Tensor) -> None:
        """Record both products of backward."""
        step: Any = (
            ADD,
            len(x),
            32,
            0,
            [],
            b"\0" * 24,
            [0, 8, 16],
            [(0, 0, 0), (1, 0, 8), (2, 0, 16)],
            None,
        )
        like = torch.empty(len(x), COLUMNS)
        for op, other in ((1, self.values.detach()), (2, x.detach())):
            assert self.front.add(op, [like, other], [like], [step], [], None, [], None)


def gradients(layer: Layer, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    y = layer.front(x)
    torch.testing.assert_close(y, 2 * x)
    return [*torch.autograd.grad(y, (x, layer.values), dy)]


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_backward_gives_the_gradients_of_the_path_in_python(kind, shape) -> None:
    x = torch.randn(*shape, COLUMNS, requires_grad=True)
    layer = Layer(kind, x.reshape(6, COLUMNS))
    for dy in (torch.randn_like(x), torch.ones(()).expand(x.shape)):
        layer.calls.clear()
        in_python = gradients(layer, x, dy)
        assert layer.calls == [(True, True)]
        layer.record(x.reshape(6, COLUMNS))
        assert all(map(torch.equal, gradients(layer, x, dy), in_python))
        assert layer.calls == [(True, True)]  # no call since
        layer.front = Layer(kind, x.reshape(6, COLUMNS)).front
        layer = Layer(kind, x.reshape(6, COLUMNS))


def test_only_the_gradients_that_are_needed_are_computed(kind: Any) -> None:
    x, dy = torch.randn(6, COLUMNS), torch.randn(6, COLUMNS)
    layer = Layer(kind, x)
    layer.front(x).backward(dy)
    assert layer.calls == [(False, True)]
    (dx,) = torch.autograd.grad(layer.front(x.requires_grad_()), x, dy)
    assert layer.calls[1:] == [(True, False)]
    torch.testing.assert_close(dx, dy + layer.values)


def test_a_bias_has_its_gradient(kind: Any) -> None:
    bias = torch.randn(COLUMNS, requires_grad=True)
    x, dy = torch.randn(6, COLUMNS), torch.randn(2, 3, COLUMNS)
    y = Layer(kind, x, bias).front(x.view(2, 3, COLUMNS))
    y.backward(dy)
    torch.testing.assert_close(y, 2 * x.view(2, 3, COLUMNS) + bias)
    torch.testing.assert_close(bias.grad, dy.sum((0, 1)))


def test_second_derivatives_take_the_derivative_in_python(kind: Any) -> None:
    x = torch.randn(6, COLUMNS, requires_grad=True)
    layer = Layer(kind, x)
    layer.record(x)
    (dx,) = torch.autograd.grad(layer.front(x).square().sum(), x, create_graph=True)
    assert layer.calls == [(True, False)]
    dx.sum().backward()  # dX = 2 Y + V, and backward of Y gives V the gradient 2 + X
    torch.testing.assert_close(layer.values.grad, 3 + x.detach())


@pytest.mark.parametrize("which", ["values", "x"])
def test_a_write_between_forward_and_backward_is_an_error(kind: Any, which: str) -> None:
    x = torch.randn(6, COLUMNS, requires_grad=True)
    layer = Layer(kind, x)
    layer.record(x)
    y = layer.front(x)
    with torch.no_grad():
        (layer.values if which == "values" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_step_of_an_optimizer_leaves_the_recordings(kind: Any) -> None:
    x = torch.randn(6, COLUMNS, requires_grad=True)
    layer = Layer(kind, x)
    layer.record(x)
    optimizer = torch.optim.SGD([layer.values], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer.front(x).sum().backward()
        optimizer.step()
    torch.testing.assert_close(layer.values.grad, 1 + x.detach())
    assert not layer.front.stale
    assert not layer.calls


def test_values_that_moved_after_forward_are_read_where_they_are(kind: Any) -> None:
    x, dy = torch.randn(6, COLUMNS, requires_grad=True), torch.randn(6, COLUMNS)
    layer = Layer(kind, x)
    layer.record(x)
    y = layer.front(x)
    layer.values.data = torch.randn(6, COLUMNS)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, dy + layer.values)
    with torch.no_grad():
        assert layer.front(x) is None
    assert layer.front.stale


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


def test_checkpoints_and_hooks_of_saved_tensors_see_the_same_tensors(kind: Any) -> None:
    x = torch.randn(2, 3, COLUMNS, requires_grad=True)
    layer, sizes = Layer(kind, x.reshape(6, COLUMNS)), []

    def pack(t: torch.Tensor) -> torch.Tensor:
        sizes.append((*t.shape,))
        return t.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer.front(x)
    dy = torch.randn_like(x)
    dx, dw = torch.autograd.grad(y, (x, layer.values), dy)
    assert sizes == [(2, 3, COLUMNS), (6, COLUMNS)]
    torch.testing.assert_close(dx, dy + layer.values.view(x.shape))
    torch.testing.assert_close(dw, (dy + x).view(6, COLUMNS))


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
        layer.record(x)
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
