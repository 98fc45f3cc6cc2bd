"""Capture CUDA graphs, and keep alive what a captured graph reads.

A graph holds addresses only. If a launch is deleted, its packed weights, work lists and buffers are
freed, but the graph still reads them. So code that enqueues such work names the memory's owner:

    capture_begin        this module notes which graph of torch the capture fills
    keep(owner) ...      the owners become an attribute of that graph
    replay ...
    reset, or deletion   the graph drops its owners

torch 2.11 does not tell which graph a stream is captured into, so `capture_begin` is wrapped, and
`reset`, too. What a graph of another library reads, or the body of torch.cond inside a graph, is
kept until the process ends.

Owners are freed with the graph, even if it still runs. As with any tensor of torch, that is safe on
the stream that allocated them; on another one, wait for the graph before you delete it. A graph
that was instantiated from raw_cuda_graph() needs the graph of torch as long as it is replayed.

Memory that outlives a call must not come from a graph's pool. A thread that captures allocates from
it, and so does one in which torch.compile(mode="reduce-overhead") warms up. So `make_lasting` uses
another thread. In a capture, that thread works on the default stream, which is not captured, and
may call what a capture forbids, because its own interaction with captures is relaxed.

Needs a driver of CUDA 12.3 or newer.
Source: CUDA driver API, cuStreamGetCaptureInfo and cuThreadExchangeStreamCaptureMode.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sparsebench.kernels._common.driver import driver, require_success

ACTIVE = 1  # CUstreamCaptureStatus
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
OWNERS = "_sparsebench_owners"  # attribute of a graph of torch: what it reads, by id

T = TypeVar("T")
GRAPHS: WeakValueDictionary[int, Any] = WeakValueDictionary()  # graphs of torch, by capture
FOREIGN_OWNERS: dict[int, Any] = {}  # by id: what graphs read that torch did not capture


@contextmanager
def capturing(graph: "torch.cuda.CUDAGraph", pool: Any = None) -> Iterator[None]:
    """Capture the work of the block, on the current device. Raises RuntimeError if that fails.

    Garbage collection is off meanwhile: objects that Python frees (an older graph, a module, an
    event) may call CUDA, which ends the capture. In a published run 3 of 2088 rows were timed
    without a graph for this reason.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
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

    Does nothing outside of a capture. Raises RuntimeError as `captured_into` does.
    """
    if (target := captured_into()) is None:
        return
    graph = GRAPHS.get(target[0])
    owners = FOREIGN_OWNERS if graph is None else graph.__dict__.setdefault(OWNERS, {})
    owners[id(owner)] = owner


def captured_into() -> tuple[int, int] | None:
    """Return number and address of the graph that the current stream is captured into, or None.

    The number is unique in this process. Raises RuntimeError if the driver is older than CUDA 12.3,
    or if it fails.
    """
    if not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
        return None
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    status, number = ctypes.c_int(), ctypes.c_uint64()
    graph, nodes, edges, count = (ctypes.c_void_p() for _ in range(4))
    out = (ctypes.byref(value) for value in (status, number, graph, nodes, edges, count))
    try:
        capture_info = driver().cuStreamGetCaptureInfo_v3
    except AttributeError:
        driver().cuDriverGetVersion(ctypes.byref(version := ctypes.c_int()))
        release = f"{version.value // 1000}.{version.value % 1000 // 10}"
        message = f"capture: expected a driver of CUDA 12.3 or newer, found CUDA {release}"
        raise RuntimeError(message) from None
    require_success(capture_info(ctypes.c_void_p(stream), *out), "cuStreamGetCaptureInfo")
    return (number.value, graph.value) if status.value == ACTIVE and graph.value else None


def _wrap(kind: Any) -> None:
    """Let graphs of a class note what their captures fill, and drop their owners at a reset."""
    begin, reset = kind.capture_begin, kind.reset

    @wraps(begin)
    def capture_begin(graph: Any, *arguments: Any, **named: Any) -> None:
        begin(graph, *arguments, **named)
        # An older driver does not tell. `keep` says so, but graphs without our kernels work.
        with suppress(OSError, RuntimeError):
            if target := captured_into():
                GRAPHS[target[0]] = graph

    @wraps(reset)
    def reset_and_drop(graph: Any) -> None:
        reset(graph)
        graph.__dict__.pop(OWNERS, None)

    kind.capture_begin, kind.reset = capture_begin, reset_and_drop


_wrap(torch.cuda.CUDAGraph)
if hasattr(torch.accelerator, "Graph"):  # in newer versions than torch 2.11
    _wrap(torch.accelerator.Graph)
