"""Capture CUDA graphs, and keep alive what a captured graph reads.

A graph holds addresses only. If a launch is deleted, its packed weights, work lists and buffers are
freed, but the graph still reads them. So code that enqueues such work names the memory's owner:

    capture_begin        this module writes down which torch.cuda.CUDAGraph the capture fills
    keep(owner) ...      the graph gets an attribute, its owners
    replay ...
    the graph is deleted, or captured anew: so are its owners

torch 2.13 tells which graph a stream is captured into; older versions do not, so `capture_begin` is
wrapped. Somebody else's graph, which is no torch.cuda.CUDAGraph, keeps its owners until the process
ends. As with torch's own memory, who deletes a graph that still runs on a stream other than that of
later allocations waits for it first.

Callers of `capturing` keep the owners themselves; `keep` then does nothing.

Memory that outlives a call must not belong to a graph. While torch.compile(mode="reduce-overhead")
warms up, its thread allocates only such memory, so `make_lasting` allocates in another thread. In a
capture, that thread works on the default stream, which is not captured, and may call what a capture
forbids, because its own interaction with captures is relaxed.
Source: CUDA driver API, cuStreamGetCaptureInfo and cuThreadExchangeStreamCaptureMode.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from threading import local
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sparsebench.kernels._common.driver import driver, require_success

ACTIVE = 1  # CUstreamCaptureStatus
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
OWNERS = "_sparsebench_owners"  # attribute of a torch.cuda.CUDAGraph: what it reads, by id

T = TypeVar("T")
GRAPHS: WeakValueDictionary[int, "torch.cuda.CUDAGraph"] = WeakValueDictionary()  # by capture
KEPT: dict[int, Any] = {}  # by id: the owners of graphs that torch did not capture


class _CaptureDepth(local):
    """The number of `capturing` blocks that the current thread is in."""

    depth = 0


_thread = _CaptureDepth()


@contextmanager
def capturing(graph: "torch.cuda.CUDAGraph", pool: Any = None) -> Iterator[None]:
    """Capture the work of the block, on the current device. Raises RuntimeError if that fails.

    Garbage collection is off meanwhile: objects that Python frees (an older graph, a module, an
    event) may call CUDA, which ends the capture. In a published run 3 of 2088 rows were timed
    without a graph for this reason. The caller keeps what the graph reads.
    """
    enabled = gc.isenabled()
    gc.disable()
    _thread.depth += 1
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        _thread.depth -= 1
        if enabled:
            gc.enable()


def is_capturing(x: Tensor) -> bool:
    """Return whether the current stream of X's device is captured into a graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def make_lasting(make: Callable[[], T], device: torch.device) -> T:
    """Return make(), none of whose memory belongs to a pool that this thread allocates from.

    Another thread makes it, without a gradient, on this thread's stream of the device. While that
    stream is captured, it is made on the default stream instead, and is done when this returns.
    torch counts writes to its tensors even if this thread is in inference mode, also on a CPU.
    """
    if device.type != "cuda":
        with torch.inference_mode(False), torch.no_grad():
            return make()
    capturing = torch.cuda.is_current_stream_capturing()
    current = torch.cuda.default_stream if capturing else torch.cuda.current_stream
    stream = current(device)

    def run() -> T:
        mode = ctypes.c_int(RELAXED)
        require_success(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "capture")
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            stream.query()  # a new thread has no context until it calls CUDA's runtime
            result = make()
            if capturing:
                stream.synchronize()  # replays are not ordered after this stream
        return result

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def keep(owner: object) -> None:
    """Keep an object as long as the graph that the current stream is captured into.

    Does nothing outside of a capture and inside of `capturing`. Raises RuntimeError.
    """
    target = captured_into()
    if target is None or _thread.depth:
        return
    graph = GRAPHS.get(target[0])
    owners = KEPT if graph is None else graph.__dict__[OWNERS]
    owners[id(owner)] = owner


def captured_into() -> tuple[int, int] | None:
    """Return number and address of the graph that the current stream is captured into, or None.

    The number is unique in this process. Raises RuntimeError.
    """
    if not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
        return None
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    status, number = ctypes.c_int(), ctypes.c_uint64()
    graph, nodes, edges, count = (ctypes.c_void_p() for _ in range(4))
    out = (ctypes.byref(value) for value in (status, number, graph, nodes, edges, count))
    result = driver().cuStreamGetCaptureInfo_v3(ctypes.c_void_p(stream), *out)
    require_success(result, "cuStreamGetCaptureInfo")
    return (number.value, graph.value) if status.value == ACTIVE and graph.value else None


def _noting(begin: Callable[..., None]) -> Callable[..., None]:
    """Return capture_begin of a graph that also writes down the graph of the capture."""

    @wraps(begin)
    def capture_begin(graph: "torch.cuda.CUDAGraph", *arguments: Any, **named: Any) -> None:
        begin(graph, *arguments, **named)
        graph.__dict__[OWNERS] = {}
        if target := captured_into():
            GRAPHS[target[0]] = graph

    return capture_begin


torch.cuda.CUDAGraph.capture_begin = _noting(  # type: ignore[method-assign]
    torch.cuda.CUDAGraph.capture_begin
)
