"""Operands of a captured graph live as long as the graph; a fake driver says what is captured."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebench.kernels._common import capture
from sparsebench.kernels._common.gpu_clock import GpuClock
from sparsebench.kernels._kernel import Launch


class Driver:
    """A fake libcuda that says which capture the current stream is part of."""

    def __init__(self) -> None:
        self.capturing = 0  # the number of the capture
        self.result = 0

    def cuStreamGetCaptureInfo_v3(self, stream: Any, *out: Any) -> int:
        status, number, graph = (pointer._obj for pointer in out[:3])
        status.value, number.value, graph.value = 1, self.capturing, 1000 + self.capturing
        return self.result


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.full = driver, False

    def capture_begin(self, number: int) -> None:
        if self.full:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph")
        self.driver.capturing = number

    def capture_end(self) -> None:
        self.driver.capturing, self.full = 0, True

    def reset(self) -> None:
        self.full = False


capture._wrap(Graph)


class Owner:
    """What a graph reads."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(capture, "driver", lambda: fake)
    monkeypatch.setattr(capture, "FOREIGN_OWNERS", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing > 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return fake


def gone(owner: "weakref.ref[Any]") -> bool:
    gc.collect()
    return owner() is None


def graph_of(
    driver: Driver,
    owners: list[Any],
    number: int = 1,
    kind: type[Graph] = Graph,
    keep: Callable[[object], None] = capture.keep,
) -> Graph:
    graph = kind(driver)
    graph.capture_begin(number)
    for owner in owners:
        keep(owner)
    graph.capture_end()
    return graph


def test_every_graph_of_torch_notes_what_it_captures() -> None:
    for kind in (torch.cuda.CUDAGraph, getattr(torch.accelerator, "Graph", torch.cuda.CUDAGraph)):
        assert kind.capture_begin.__wrapped__
        assert kind.reset.__wrapped__


def test_owners_live_until_their_graph_is_deleted(driver: Driver) -> None:
    owners = [Owner(), Owner()]
    seen = [weakref.ref(owner) for owner in owners]
    graph = graph_of(driver, [*owners, owners[0]])
    del owners
    assert not any(map(gone, seen))
    del graph
    assert all(map(gone, seen))


def test_a_graph_that_is_reset_drops_its_owners_before_it_is_captured_anew(driver: Driver) -> None:
    first, second = Owner(), Owner()
    seen = [weakref.ref(first), weakref.ref(second)]
    graph = graph_of(driver, [first])
    del first
    graph.reset()
    assert gone(seen[0])
    graph.capture_begin(2)
    capture.keep(second)
    graph.capture_end()
    del second
    assert not gone(seen[1])


def test_a_capture_that_torch_refuses_drops_nothing(driver: Driver) -> None:
    owner = Owner()
    seen = weakref.ref(owner)
    graph = graph_of(driver, [owner])
    del owner
    with pytest.raises(RuntimeError, match="already owns"):
        graph.capture_begin(2)
    assert not gone(seen)


def test_no_owner_of_a_failed_capture_is_deleted_inside_the_next(driver: Driver) -> None:
    owner = Owner()
    deleted_in: list[int] = []
    weakref.finalize(owner, lambda: deleted_in.append(driver.capturing))
    graph = graph_of(driver, [owner])
    graph.full = False
    del owner
    graph.capture_begin(2)
    capture.keep(Owner())
    graph.capture_end()
    del graph
    gc.collect()
    assert deleted_in == [0]


def test_a_graph_without_our_kernels_needs_no_driver_that_tells(driver, monkeypatch) -> None:
    class Older:
        def cuDriverGetVersion(self, version: Any) -> int:
            version._obj.value = 12020
            return 0

    monkeypatch.setattr(capture, "driver", Older)
    graph = Graph(driver)
    graph.capture_begin(1)
    with pytest.raises(RuntimeError, match=r"expected a driver of CUDA 12\.3 .* found CUDA 12\.2"):
        capture.keep(Owner())


def test_a_subclass_of_a_graph_keeps_its_owners(driver: Driver) -> None:
    class Named(Graph):
        def capture_begin(self, number: int) -> None:
            super().capture_begin(number)

    owner = Owner()
    seen = weakref.ref(owner)
    graph = graph_of(driver, [owner], kind=Named)
    del owner
    assert not gone(seen)
    del graph
    assert gone(seen)


def test_a_backward_pass_in_another_thread_keeps_owners_in_its_graph(driver: Driver) -> None:
    owner = Owner()
    seen = weakref.ref(owner)
    with ThreadPoolExecutor(1) as thread:
        graph = graph_of(driver, [owner], keep=lambda x: thread.submit(capture.keep, x).result())
    del owner
    assert not gone(seen)
    del graph
    assert gone(seen)


def test_an_owner_that_has_its_graph_is_collected_with_it(driver: Driver) -> None:
    owner = Owner()
    seen = weakref.ref(owner)
    owner.graph = graph_of(driver, [owner])  # type: ignore[attr-defined]
    del owner
    assert gone(seen)


def test_an_owner_of_two_graphs_lives_as_long_as_either(driver: Driver) -> None:
    owner = Owner()
    seen = weakref.ref(owner)
    graphs = [graph_of(driver, [owner], number) for number in (1, 2)]
    del owner
    del graphs[0]
    assert not gone(seen)
    graphs.clear()
    assert gone(seen)


def test_the_graph_of_another_library_keeps_its_owners(driver: Driver) -> None:
    owner = Owner()
    driver.capturing = 3
    capture.keep(owner)
    driver.capturing = 0
    assert [*capture.FOREIGN_OWNERS.values()] == [owner]


def test_what_lasts_is_no_inference_tensor() -> None:
    with torch.inference_mode():
        made = capture.make_lasting(lambda: torch.zeros(1), torch.device("cpu"))
    assert not made.is_inference()


def test_a_launch_is_kept_by_the_graph_that_it_is_captured_into(driver: Driver) -> None:
    buffer = torch.ones(4)
    seen = weakref.ref(buffer)
    launch = Launch(lambda buffer=buffer: buffer)
    graph = Graph(driver)
    graph.capture_begin(1)
    launch()
    graph.capture_end()
    del launch, buffer
    assert not gone(seen)
    del graph
    assert gone(seen)


def test_without_a_capture_nothing_is_kept(driver: Driver) -> None:
    capture.keep(Owner())
    assert not capture.FOREIGN_OWNERS


def test_a_graph_of_the_harness_keeps_owners_too(driver, monkeypatch) -> None:
    class Context:
        def __init__(self, graph: Graph, **_: Any) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            self.graph.capture_begin(1)

        def __exit__(self, *_: Any) -> None:
            self.graph.capture_end()

    monkeypatch.setattr(torch.cuda, "graph", Context)
    owner, graph = Owner(), Graph(driver)
    seen = weakref.ref(owner)
    with capture.capturing(graph):  # type: ignore[arg-type]
        capture.keep(owner)
    del owner
    assert not gone(seen)
    del graph
    assert gone(seen)


def test_an_error_of_the_driver_is_one_line(driver, monkeypatch) -> None:
    driver.capturing, driver.result = 1, 801
    names = SimpleNamespace(cuGetErrorName=lambda *_: 0)
    monkeypatch.setattr("sparsebench.kernels._common.driver.driver", lambda: names)
    with pytest.raises(RuntimeError, match=r"^cuStreamGetCaptureInfo: "):
        capture.keep(Owner())


@pytest.mark.gpu
@pytest.mark.parametrize("context", [torch.cuda.graph, capture.capturing])
def test_a_graph_is_right_after_its_launch_was_deleted(context: Any) -> None:
    x = torch.randn(64, 64, device="cuda")

    def launched() -> Launch:
        weight = torch.eye(64, device="cuda")
        return Launch(lambda: x @ weight)

    launch = launched()
    launch()
    graph = torch.cuda.CUDAGraph()
    with context(graph):
        y = launch()
    del launch
    gc.collect()
    garbage = [torch.full((64, 64), float("nan"), device="cuda") for _ in range(100)]
    graph.replay()
    torch.testing.assert_close(y, x)
    del garbage


@pytest.mark.gpu
def test_a_graph_is_captured_anew_after_a_reset() -> None:
    x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    x.add_(0)
    for number in (1, 2):
        owner = Owner()
        seen = weakref.ref(owner)
        with torch.cuda.graph(graph):
            x.fill_(number)
            capture.keep(owner)
        del owner
        graph.replay()
        assert x.tolist() == [number] * 8
        assert not gone(seen)
        graph.reset()
        assert gone(seen)


@pytest.mark.gpu
def test_a_graph_with_owners_takes_no_longer_and_frees_them() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    owner = Owner()
    seen = weakref.ref(owner)
    plain, keeping = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(plain):
        x.add_(1)
    with torch.cuda.graph(keeping):
        x.add_(1)
        capture.keep(owner)
    del owner
    clock = GpuClock(x.device)
    pairs = [clock.cold([(plain.replay, True), (keeping.replay, True)], bool) for _ in range(51)]
    difference = median(b.time_us - a.time_us for a, b in pairs)
    assert difference < 0.7  # an object of the driver that a graph retains took 2.1 µs
    assert not gone(seen)
    del keeping
    assert gone(seen)
