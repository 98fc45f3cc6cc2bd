"""Calls without Python, by front.cpp on a CPU: what they return, and what ends them."""

import copy
import ctypes
import gc
import pickle
import struct
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from sparsebench.kernels._common.cuda import LibraryCall, MatrixProduct, TransposedCopy, on_tape
from sparsebench.kernels._common.front import (
    LAYOUTS,
    PRODUCT,
    BackwardProduct,
    Conditions,
    Front,
    Guard,
    Recordings,
    Signature,
    node,
    record,
)
from sparsebench.kernels._common.transforms import aligned, readable, rows_of
from tests.kernels.conftest import COLUMNS, launch
from tests.tools.marks import needs_gxx

pytestmark = [
    needs_gxx,
    pytest.mark.exhaustive,  # compiles for 25 s
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver itself is connected there"),
    pytest.mark.usefixtures("recording"),
]
TRAINED = Signature(
    held=("values",),
    backward=(BackwardProduct(("dy", "values"), ("x",)), BackwardProduct(("dy", "x"), ("values",))),
)


def result_of(*inputs: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Return what a launch with these inputs writes."""
    y = inputs[0].new_empty(shape or inputs[0].shape)
    launch(*inputs, y)
    on_tape(y)
    return y


class Doubling:
    """Y = 2 X of a frozen weight, whose content every recording reads unless `content` is False."""

    def __init__(self, *, content: bool = True, limit: int = 0, planned: bool = True) -> None:
        self.holder: dict[str, Any] = {"w": torch.ones(COLUMNS), "bias": None}
        self.recordings, self.content, self.limit = Recordings(PRODUCT), content, limit
        self.planned, self.in_python, self.looks = planned, 0, 0
        self.owner: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.recordings.replay(x)
        return self._first(x) if y is None else y

    def _first(self, x: Tensor) -> Tensor:
        self.in_python += 1
        self.looks += self.recordings.due()
        guards = [Guard(self.holder, "w", self.holder.get("w"), self.content)]
        guards.append(Guard(self.holder, "bias", self.holder.get("bias"), content=False))
        conditions = Conditions(guards, limit=self.limit)
        run = self._run if self.planned else None
        y: Tensor = self.recordings.call([x], conditions, run, lambda: 2 * x)
        return y

    def _run(self, rows: Tensor) -> list[Tensor]:
        on_tape(owners=(self.owner,))
        return [result_of(rows)]

    def is_replayed(self, x: Tensor) -> bool:
        """Return whether a call needs no Python, and check its result."""
        before = self.in_python
        assert torch.equal(self(x).float(), 2 * x.float())
        return self.in_python == before


def doubling(x: Tensor, **options: Any) -> Doubling:
    """Return an operator whose calls with X are replayed."""
    op = Doubling(**options)
    assert not op.is_replayed(x)
    assert not op.is_replayed(x)
    assert op.is_replayed(x)
    return op


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, COLUMNS)


# ---- calls ----


@pytest.mark.usefixtures("poisoned")
def test_a_call_is_replayed_for_tensors_of_the_same_layout(x: Tensor) -> None:
    op = doubling(x)
    for other in (x.clone(), x + 1, x.view(2, 2, COLUMNS), x.view(4, 1, COLUMNS)):
        assert op.is_replayed(other)
    for other in (x[:3], x.half(), torch.randn(4, 4 * COLUMNS)):
        assert op.recordings.replay(other) is None
    assert op.is_replayed(x)


def test_a_tensor_that_kernels_cannot_read_is_copied(x: Tensor) -> None:
    op = doubling(x)
    wide = torch.randn(4, COLUMNS + 1)
    for other in (wide[:, :COLUMNS], torch.randn(COLUMNS, 4).T, torch.randn(COLUMNS).expand(4, -1)):
        assert op.is_replayed(other)
    shifted = torch.randn(4 * COLUMNS + 1)[1:].view(4, COLUMNS)
    assert op.is_replayed(shifted)
    assert op.is_replayed(torch.randn(2, COLUMNS, 2).transpose(1, 2))


def test_rows_with_a_gap_are_read_where_they_are() -> None:
    gapped, op = torch.randn(2, 3, 2 * COLUMNS)[..., :COLUMNS], Doubling()
    for _ in range(2):
        op(gapped)
    assert op.recordings.replay(gapped.view(6, COLUMNS)) is not None
    assert op.recordings.replay(gapped.contiguous()) is None


CHANGES: dict[str, Callable[[Tensor, dict[str, Any]], object]] = {
    "replaced": lambda w, holder: holder.update(w=w.clone()),
    "removed": lambda w, holder: holder.clear(),
    "written": lambda w, holder: w.mul_(2),
    "moved": lambda w, holder: setattr(w, "data", w.clone()),
    "trained": lambda w, holder: w.requires_grad_(),
    "biased": lambda w, holder: holder.update(bias=w),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_changes_ends_the_recordings(x: Tensor, change: str) -> None:
    op = doubling(x)
    CHANGES[change](op.holder["w"], op.holder)
    with torch.no_grad():
        assert not op.is_replayed(x)
        assert not op.is_replayed(x)
        assert op.is_replayed(x)


def test_a_weight_that_every_call_reads_may_be_written(x: Tensor) -> None:
    op = doubling(x, content=False)
    op.holder["w"].mul_(3)
    assert op.is_replayed(x)


def test_a_weight_that_changes_in_every_call_is_never_recorded(x: Tensor) -> None:
    op, launches = Doubling(), []
    op._run = lambda rows: launches.append(rows) or [result_of(rows)]  # type: ignore
    for _ in range(4):
        op.holder["w"] = op.holder["w"] + 1
        assert not op.is_replayed(x)
    assert not launches


def test_a_weight_whose_writes_torch_does_not_count_is_never_recorded(x: Tensor) -> None:
    op = Doubling()
    with torch.inference_mode():
        op.holder["w"] = torch.ones(COLUMNS)
        for _ in range(4):
            assert not op.is_replayed(x)


def test_calls_in_inference_mode_are_replayed(x: Tensor) -> None:
    op = doubling(x)
    with torch.inference_mode():
        other = torch.randn(4, COLUMNS)  # with other dispatch keys
        assert [op.is_replayed(other) for _ in range(2)] == [False, True]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # by make_dual
def test_a_call_that_torch_must_see_is_not_replayed(x: Tensor) -> None:
    op = doubling(x)
    for other in (x.clone().requires_grad_(), x.as_subclass(type("Other", (Tensor,), {}))):
        assert op.recordings.replay(other) is None
    seen: list[object] = []

    def mapped(row: Tensor) -> Tensor:
        seen.append(op.recordings.replay(row))
        return row

    torch.func.vmap(mapped)(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        seen.append(op.recordings.replay(dual))
    assert seen == [None, None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op.recordings.replay(x) is None
    assert op.is_replayed(x)


def test_a_limited_number_of_calls_is_replayed(x: Tensor) -> None:
    op = doubling(x, limit=6)
    replayed = [op.is_replayed(x) for _ in range(6)]
    assert replayed == [True, True, False, True, True, True]
    assert op.looks == 1


def test_a_call_that_is_not_planned_yet_is_not_recorded(x: Tensor) -> None:
    op = Doubling(planned=False)
    assert not any(op.is_replayed(x) for _ in range(4))


def test_the_oldest_layout_makes_room(x: Tensor) -> None:
    op = doubling(x)
    later = [torch.randn(m, COLUMNS) for m in range(5, 75)]
    for other in later:
        assert not any(op.is_replayed(other) for _ in range(2))
    assert op.is_replayed(later[-1])
    assert not op.is_replayed(x)


def test_a_server_with_a_new_layout_in_each_call_needs_no_more_memory() -> None:
    recordings = Recordings(PRODUCT)
    for m in range(2 * LAYOUTS):
        x = torch.empty(m, COLUMNS)
        recordings.call([x], Conditions([]), None, lambda: None)
    assert all(len(kept) <= LAYOUTS for kept in vars(recordings).values() if isinstance(kept, dict))


def test_copies_and_pickles_have_no_recordings(x: Tensor) -> None:
    op = doubling(x)
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op.recordings))):
        recordings = getattr(other, "recordings", other)
        assert recordings.replay(x) is None
        assert recordings.signature == PRODUCT


def test_a_call_whose_launches_are_not_all_recorded_stays_in_python(x: Tensor) -> None:
    op, runs = Doubling(), []

    def run(rows: Tensor) -> list[Tensor]:
        runs.append(rows)
        on_tape(complete=False)
        return [result_of(rows)]

    op._run = run  # type: ignore[method-assign]
    assert not any(op.is_replayed(x) for _ in range(5))
    assert len(runs) == 1  # and is not tried again


def test_a_recording_that_gives_other_bits_is_refused(x: Tensor) -> None:
    op = Doubling()

    def run(rows: Tensor) -> list[Tensor]:
        return [result_of(rows).add_(1)]  # torch's own launch is not on the tape

    op._run = run  # type: ignore[method-assign]
    assert not op.is_replayed(x)
    with pytest.warns(UserWarning, match="other bits"):
        assert not op.is_replayed(x)
    assert not op.is_replayed(x)


def test_threads_replay_calls_at_the_same_time(x: Tensor) -> None:
    op = doubling(x)

    def calls(start: float) -> bool:
        op(x)  # a thread's first call takes the path in Python
        return all(torch.equal(op(x + start), 2 * (x + start)) for _ in range(50))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(calls, range(8)))


class Owner:
    """Memory that a launch reads."""


def test_a_weight_that_holds_its_recordings_is_freed(x: Tensor) -> None:
    op, owner = Doubling(), Owner()
    op.owner = owner
    owner.op = op  # type: ignore[attr-defined]
    for _ in range(3):
        op(x)
    freed = weakref.ref(owner)
    del op, owner
    gc.collect()
    assert freed() is None


def test_replayed_calls_hold_no_memory(x: Tensor) -> None:
    op = doubling(x)
    results = [weakref.ref(op(x + i)) for i in range(3)]
    gc.collect()
    assert all(each() is None for each in results)


# ---- backward ----


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


def test_a_product_with_a_weight_that_launches_write_out() -> None:
    signature = Signature(backward=(BackwardProduct(("dy",), ("x",)),))
    x, dy = torch.randn(2, 3, COLUMNS, requires_grad=True), torch.randn(2, 3, COLUMNS)
    tiles, recordings, calls = torch.randn(COLUMNS, COLUMNS), Recordings(signature), []
    half = COLUMNS // 2

    def product(rows: Tensor) -> list[Tensor]:
        w = torch.empty(COLUMNS, COLUMNS)
        on_tape(w, owners=(tiles,))
        for part, source in ((w[:half], tiles[:half]), (w[half:], tiles[half:])):
            on_tape(view=(part, w))
            launch(source, part)
        dx = rows @ w
        on_tape(dx, call=MatrixProduct(rows, w, dx))
        return [dx]

    def derivative(front: Any, dy: Tensor, saved: Any, needed: Any) -> list[Tensor]:
        calls.append(saved)
        return [record(front, 1, [rows_of(dy)], product)[0].view(dy.shape)]

    conditions = Conditions([Guard(None, "tiles", tiles)], derivative=derivative)
    run = partial(node, signature, derivative, lambda rows: 2 * rows, None, x)
    y: Any = None
    for _ in range(4):
        y = recordings.call([x], conditions, lambda rows: [result_of(rows)], run)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(dx, dy @ (2 * tiles))
    assert len(calls) < 4
    assert calls[-1][0] is None  # X is not kept
    count, y = len(calls), recordings.replay(x)
    tiles.zero_()
    assert not torch.autograd.grad(y, x, dy)[0].any()
    assert len(calls) == count + 1  # Python sees a weight that was written after forward


def test_blocks_are_transposed_by_torch() -> None:
    x, recordings = torch.randn(2, COLUMNS * COLUMNS), Recordings(PRODUCT)

    def product(rows: Tensor) -> list[Tensor]:
        blocks = result_of(rows, shape=(2, COLUMNS, COLUMNS))
        transposed = blocks.mT.contiguous()
        on_tape(transposed, call=TransposedCopy(blocks, transposed))
        return [result_of(transposed)]

    for _ in range(3):
        y = recordings.call([x], Conditions([]), product, lambda: torch.empty(0))
    assert torch.equal(y, 4 * x.view(2, COLUMNS, COLUMNS).mT)
    assert recordings.replay(x) is not None


@ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 16)
def _matmul(*arguments: Any) -> int:
    """Write W + X to Y, as if it were cublasLtMatmul; fail if an argument is not in its place."""
    place = ctypes.c_float * COLUMNS
    w, x, y = (place.from_address(arguments[i]) for i in (3, 5, 8))
    y[:] = [a + b for a, b in zip(w, x, strict=True)]
    return int([*arguments[:3], arguments[14]] != [None, 1, 2, 14])


@pytest.mark.parametrize("size", [14, 13])
def test_a_call_of_a_library_is_replayed_or_its_status_is_an_error(size: int) -> None:
    w, x, recordings = torch.randn(1, COLUMNS), torch.randn(1, COLUMNS), Recordings(PRODUCT)

    def product(rows: Tensor) -> list[Tensor]:
        y = w + rows
        at_y = y.data_ptr()
        words = [0, 1, 2, w.data_ptr(), 4, rows.data_ptr(), 6, 7, at_y, 9, at_y, 11, 12, 13, size]
        function = int(ctypes.cast(_matmul, ctypes.c_void_p).value or 0)
        on_tape(y, owners=(w,), call=LibraryCall(function, struct.pack("16Q", *words, 0)))
        return [y]

    def call(x: Tensor) -> Tensor:
        result: Tensor = recordings.call([x], Conditions([]), product, lambda: w + x)
        return result

    call(x)
    if size == 13:
        with pytest.raises(RuntimeError, match="status 1"):
            call(x)
        return
    call(x)
    for _ in range(2):
        x = torch.randn(1, COLUMNS)
        y = recordings.replay(x)
        assert y is not None
        assert torch.equal(y, w + x)


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


# ---- several arguments and results ----

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
