"""Capture CUDA graphs, and keep alive what a captured graph reads.

A graph knows addresses alone: packed weights, work lists and buffers of a launch that has gone are
freed memory, which the graph still reads. So whoever enqueues such work says whose memory it is:

    capture ── keep(owner) ── the graph retains a user object ── graph destroyed ── sem_post
                   └─> _KEPT: owner, semaphore                   the next sweep lets the owner go

The driver calls the destructor of a user object on a thread where neither CUDA nor Python may be
called. So it is sem_post of the C library. A graph that is instantiated or cloned retains the
object as well, and one that still runs does. Needs a driver of CUDA 12.3 or newer.

Whoever captures by `capturing` keeps the owners himself; `keep` then does nothing.
Source: CUDA C++ Programming Guide, "CUDA User Objects"; CUDA driver API, cuGraphRetainUserObject.
"""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import local
from typing import Any

import torch

ACTIVE = 1  # CUstreamCaptureStatus
ASYNCHRONOUS = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC: nobody waits for the destructor
MOVED = 1  # CU_GRAPH_USER_OBJECT_MOVE: our reference becomes the graph's
SEMAPHORE_BYTES = 32  # sem_t of glibc and musl on 64 bits

_KEPT: dict[tuple[int, int], tuple[Any, Any]] = {}  # by capture and id of owner: owner, semaphore


class _Own(local):
    """What a thread has of its own: how many blocks of `capturing` it is in."""

    depth = 0


_own = _Own()


@contextmanager
def capturing(graph: "torch.cuda.CUDAGraph", pool: Any = None) -> Iterator[None]:
    """Capture the work of the block, on the current device. Raises RuntimeError if it cannot be.

    No garbage is collected meanwhile: what Python frees may call CUDA (an older graph, a module, an
    event), and such a call ends the capture. In a published run 3 of 2088 rows were timed without a
    graph for this reason. The caller keeps what the graph reads.
    """
    enabled = gc.isenabled()
    gc.disable()
    _own.depth += 1
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        _own.depth -= 1
        if enabled:
            gc.enable()


def keep(owner: object) -> None:
    """Keep an object at least as long as the graph that the current stream is captured into.

    Without a capture, or inside of `capturing`, it does nothing. Raises RuntimeError.
    """
    found = captured_into()
    if found is None or _own.depth or (found[0], id(owner)) in _KEPT:
        return
    sweep()
    number, graph = found
    semaphore = ctypes.create_string_buffer(SEMAPHORE_BYTES)
    _c().sem_init(semaphore, 0, 0)
    destructor, handle = ctypes.cast(_c().sem_post, ctypes.c_void_p), ctypes.c_void_p()
    _require(
        "cuUserObjectCreate",
        _driver().cuUserObjectCreate(ctypes.byref(handle), semaphore, destructor, 1, ASYNCHRONOUS),
    )
    _KEPT[number, id(owner)] = owner, semaphore  # before the graph may be destroyed
    retained = _driver().cuGraphRetainUserObject(ctypes.c_void_p(graph), handle, 1, MOVED)
    _require("cuGraphRetainUserObject", retained)


def sweep() -> int:
    """Let go of what destroyed graphs read; return how many objects are still kept."""
    for key, (_, semaphore) in [*_KEPT.items()]:
        if _c().sem_trywait(semaphore) == 0:
            _KEPT.pop(key, None)
    return len(_KEPT)


def captured_into() -> tuple[int, int] | None:
    """Return number and address of the graph that the current stream is captured into, or None.

    No other capture of this process has the number. Raises RuntimeError.
    """
    if not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
        return None
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    status, number = ctypes.c_int(), ctypes.c_uint64()
    graph, nodes, edges, count = (ctypes.c_void_p() for _ in range(4))
    out = (ctypes.byref(value) for value in (status, number, graph, nodes, edges, count))
    asked = _driver().cuStreamGetCaptureInfo_v3(ctypes.c_void_p(stream), *out)
    _require("cuStreamGetCaptureInfo", asked)
    return (number.value, graph.value) if status.value == ACTIVE and graph.value else None


def _require(what: str, result: int) -> None:
    if result:
        raise RuntimeError(f"{what}: expected success of the CUDA driver, found error {result}")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _c() -> Any:
    return ctypes.CDLL(None)  # the C library of this process
