"""Operands of a captured graph live as long as the graph; a fake driver counts references."""

import ctypes
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebench.kernels._common import capture
from sparsebench.kernels._kernel import Launch


class Driver:
    """A fake libcuda that records user objects and the graphs that own them."""

    def __init__(self) -> None:
        self.capturing = 0  # the number of the capture
        self.made: dict[int, tuple[Any, int]] = {}  # by handle: semaphore, destructor
        self.owned: dict[int, list[int]] = {}  # by graph

    def cuStreamGetCaptureInfo_v3(self, stream: Any, *out: Any) -> int:
        status, number, graph = (pointer._obj for pointer in out[:3])
        status.value, number.value, graph.value = 1, self.capturing, 1000 + self.capturing
        return 0

    def cuUserObjectCreate(
        self, handle: Any, memory: Any, destructor: Any, count: int, flags: int
    ) -> int:
        assert (count, flags) == (1, capture.ASYNCHRONOUS)
        handle._obj.value = len(self.made) + 1
        self.made[handle._obj.value] = memory, destructor.value
        return 0

    def cuGraphRetainUserObject(self, graph: Any, handle: Any, count: int, flags: int) -> int:
        assert (count, flags) == (1, capture.MOVED)
        self.owned.setdefault(graph.value, []).append(handle.value)
        return 0

    def destroy(self, number: int) -> None:
        for handle in self.owned.pop(1000 + number, ()):
            memory, destructor = self.made[handle]
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destructor)(memory.value)


class Owner:
    """What a graph reads."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(capture, "driver", lambda: fake)
    monkeypatch.setattr(capture, "KEPT", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing > 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return fake


def gone(owner: "weakref.ref[Any]") -> bool:
    gc.collect()
    return owner() is None


def test_an_owner_lives_until_its_graph_is_destroyed(driver: Driver) -> None:
    driver.capturing = 3
    owner = Owner()
    seen = weakref.ref(owner)
    capture.keep(owner)
    capture.keep(owner)  # once a graph
    driver.capturing = 0
    del owner
    assert capture.sweep() == 1
    assert not gone(seen)
    assert len(driver.owned[1003]) == 1
    driver.destroy(3)
    assert capture.sweep() == 0
    assert gone(seen)


def test_the_owners_of_a_graph_share_a_user_object(driver: Driver) -> None:
    owners = [Owner(), Owner()]
    seen = [weakref.ref(owner) for owner in owners]
    driver.capturing = 3
    for owner in (*owners, owners[0]):
        capture.keep(owner)
    driver.capturing = 0
    del owner, owners
    assert capture.sweep() == 2
    assert len(driver.owned[1003]) == 1
    driver.destroy(3)
    assert capture.sweep() == 0
    assert all(map(gone, seen))


def test_an_owner_of_two_graphs_lives_as_long_as_either(driver: Driver) -> None:
    owner = Owner()
    seen = weakref.ref(owner)
    for driver.capturing in (1, 2):
        capture.keep(owner)
    driver.capturing = 0
    del owner
    driver.destroy(1)
    assert capture.sweep() == 1
    assert not gone(seen)
    driver.destroy(2)
    assert capture.sweep() == 0
    assert gone(seen)


def test_threads_that_sweep_at_once_free_each_semaphore_once(driver, monkeypatch) -> None:
    driver.capturing = 1
    capture.keep(Owner())
    driver.capturing = 0
    freed, both = list[Any](), Barrier(2)

    def trywait(semaphore: Any) -> int:
        assert semaphore not in freed
        with suppress(BrokenBarrierError):
            both.wait(0.2)
        return 0

    library = SimpleNamespace(sem_trywait=trywait, free=freed.append)
    monkeypatch.setattr(capture, "_c", lambda: library)
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(lambda _: capture.sweep(), range(2))] == [0, 0]
    assert len(freed) == 1


def test_what_lasts_is_no_inference_tensor() -> None:
    with torch.inference_mode():
        made = capture.make_lasting(lambda: torch.zeros(1), torch.device("cpu"))
    assert not made.is_inference()


def test_a_launch_is_kept_by_the_graph_that_it_is_captured_into(driver: Driver) -> None:
    buffer = torch.ones(4)
    seen = weakref.ref(buffer)
    launch = Launch(lambda buffer=buffer: buffer)
    driver.capturing = 1
    launch()
    driver.capturing = 0
    del launch, buffer
    assert not gone(seen)
    driver.destroy(1)
    assert capture.sweep() == 0
    assert gone(seen)


def test_without_a_capture_nothing_is_kept(driver: Driver) -> None:
    capture.keep(Owner())
    assert capture.sweep() == 0
    assert not driver.made


def test_callers_of_capturing_keep_the_owners_themselves(driver, monkeypatch) -> None:
    class Graph:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> None:
            driver.capturing = 1

        def __exit__(self, *_: Any) -> None:
            driver.capturing = 0

    monkeypatch.setattr(torch.cuda, "graph", Graph)
    with capture.capturing(None):  # type: ignore[arg-type]
        capture.keep(Owner())
    assert not driver.made


def test_an_error_of_the_driver_is_one_line(driver, monkeypatch) -> None:
    driver.capturing = 1
    monkeypatch.setattr(driver, "cuGraphRetainUserObject", lambda *_: 801)
    names = SimpleNamespace(cuGetErrorName=lambda *_: 0)
    monkeypatch.setattr("sparsebench.kernels._common.driver.driver", lambda: names)
    with pytest.raises(RuntimeError, match=r"^cuGraphRetainUserObject: "):
        capture.keep(Owner())


@pytest.mark.gpu
def test_a_graph_is_right_after_its_launch_was_deleted() -> None:
    x = torch.randn(64, 64, device="cuda")

    def launched() -> Launch:
        weight = torch.eye(64, device="cuda")
        return Launch(lambda: x @ weight)

    launch = launched()
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = launch()
    del launch
    gc.collect()
    garbage = [torch.full((64, 64), float("nan"), device="cuda") for _ in range(100)]
    graph.replay()
    torch.testing.assert_close(y, x)
    del garbage
