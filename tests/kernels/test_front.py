"""Calls without Python, by front.cpp on a CPU: what they return, and what ends them."""

import copy
import ctypes
import gc
import pickle
import struct
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.kernels._common.front import (
    LAYOUTS,
    PRODUCT,
    BackwardProduct,
    Conditions,
    Guard,
    Recordings,
    Signature,
    node,
    record,
)
from sparsebench.kernels._common.tape import LibraryCall, MatrixProduct, TransposedCopy, on_tape
from sparsebench.kernels._common.transforms import rows_of
from tests.kernels.conftest import COLUMNS, launch, on_a_cpu, result_of

pytestmark = on_a_cpu


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


# ---- products of libraries, and copies by torch ----


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


@pytest.mark.usefixtures("poisoned")
def test_an_output_is_kept_until_the_last_launch_that_reads_it(x: Tensor) -> None:
    recordings = Recordings(Signature(results=("y", "twice"), exact=True))

    def product(x: Tensor) -> list[Tensor]:
        twice = result_of(x)
        four = result_of(twice)
        eight = result_of(four)
        nothing = torch.empty_like(x)
        launch(eight, nothing)  # read by no one
        on_tape(nothing)
        return [result_of(result_of(eight), four), twice]

    recordings.call([x], Conditions([]), product, list)
    for _ in range(3):
        x = torch.randn(x.shape)
        y, twice = recordings.call([x], Conditions([]), product, list)
        torch.testing.assert_close(y, 20 * x)
        assert torch.equal(twice, 2 * x)


@pytest.mark.usefixtures("poisoned")  # torch must not read what it writes
def test_products_of_batches_are_made_by_torch() -> None:
    x, recordings = torch.randn(2, 3, 4, COLUMNS), Recordings(Signature(exact=True))

    def product(x: Tensor) -> list[Tensor]:
        twice = result_of(x)
        scores = torch.baddbmm(x.new_empty(()), *pairs(twice, x), beta=0, alpha=0.3)
        alpha = struct.pack("d", 0.3)
        on_tape(scores, call=MatrixProduct(twice, x, scores, alpha=alpha))
        return [result_of(scores.view(-1, COLUMNS))]

    def pairs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.flatten(0, 1), b.flatten(0, 1).mT

    for _ in range(3):
        x = torch.randn(x.shape)
        y = recordings.call([x], Conditions([]), product, lambda: torch.empty(0))
    assert recordings.replay(x) is not None
    torch.testing.assert_close(y.view(6, 4, 4), 1.2 * torch.bmm(*pairs(x, x)))


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
