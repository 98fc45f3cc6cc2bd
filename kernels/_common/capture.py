"""Capture CUDA graphs, and keep alive what a captured graph reads.

A graph holds addresses only. If a launch is deleted, its packed weights, work lists and buffers are
freed, but the graph still reads them. So code that enqueues such work names the memory's owner:

    capture ── keep(owner) ── the graph retains a user object ── graph destroyed ── sem_post
                   └─> KEPT: owners, semaphore                  the next sweep frees the owners

The driver calls the destructor of a user object on a thread that may call neither CUDA nor Python,
so the destructor is sem_post of the C library. The driver may call it when the process ends, after
Python has freed its objects, so the C library allocates the semaphore. Instances and clones of a
graph retain the object, too, as does a graph that still runs. A graph has one such object for all
owners, because each object makes a replay longer (NOTES.md). Needs a driver of CUDA 12.3 or newer.

Callers of `capturing` keep the owners themselves; `keep` then does nothing.

Memory that outlives a call must not belong to a graph. While torch.compile(mode="reduce-overhead")
warms up, its thread allocates only such memory, so `make_lasting` allocates in another thread. In a
capture, that thread works on the default stream, which is not captured, and may call what a capture
forbids, because its own interaction with captures is relaxed.
Source: CUDA C++ Programming Guide, "CUDA User Objects"; CUDA driver API, cuGraphRetainUserObject,
cuThreadExchangeStreamCaptureMode.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock, local
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsebench.kernels._common.driver import driver, require_success

ACTIVE = 1  # CUstreamCaptureStatus
ASYNCHRONOUS = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC: the destructor is not awaited
MOVED = 1  # CU_GRAPH_USER_OBJECT_MOVE: our reference becomes the graph's
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
SEMAPHORE_BYTES = 32  # sem_t of glibc and musl on 64 bits

T = TypeVar("T")
KEPT: dict[int, tuple[dict[int, Any], Any]] = {}  # by capture: its owners by id, and a semaphore
_sweep_lock = Lock()


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
    """Keep an object at least as long as the graph that the current stream is captured into.

    Does nothing outside of a capture and inside of `capturing`. Raises RuntimeError.
    """
    target = captured_into()
    if target is None or _thread.depth:
        return
    number, graph = target
    if number in KEPT:
        KEPT[number][0][id(owner)] = owner
        return
    sweep()
    semaphore = ctypes.c_void_p(_c().calloc(1, SEMAPHORE_BYTES))
    _c().sem_init(semaphore, 0, 0)
    destructor, handle = ctypes.cast(_c().sem_post, ctypes.c_void_p), ctypes.c_void_p()
    made = driver().cuUserObjectCreate(ctypes.byref(handle), semaphore, destructor, 1, ASYNCHRONOUS)
    require_success(made, "cuUserObjectCreate")
    KEPT[number] = {id(owner): owner}, semaphore  # before the graph may be destroyed
    retained = driver().cuGraphRetainUserObject(ctypes.c_void_p(graph), handle, 1, MOVED)
    require_success(retained, "cuGraphRetainUserObject")


def sweep() -> int:
    """Release the owners of destroyed graphs; return how many owners are still kept."""
    with _sweep_lock:  # or another thread would read a semaphore that this one has freed
        graphs = [*KEPT.items()]
        ended = [key for key, (_, semaphore) in graphs if _c().sem_trywait(semaphore) == 0]
        released = [KEPT.pop(key) for key in ended]
        for _, semaphore in released:
            _c().free(semaphore)
    return sum(len(owners) for owners, _ in [*KEPT.values()])


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


@cache
def _c() -> Any:
    library = ctypes.CDLL(None)  # the C library of this process
    library.calloc.restype = ctypes.c_void_p
    return library
