"""Time calls on a GPU that does not wait for the host, and flush its L2 cache before them.

    host   hold  flush begin call end  flush begin call end ...  release
    GPU    -------------------- waits -------------------------> flush begin call end  flush ...

Two events around a call measure the call only if the GPU never runs out of work between them. So a
kernel of one thread holds the stream: it waits until the host, which enqueues the samples behind it
in the meantime, writes a number into pinned memory. A host that is slow or interrupted then delays
the samples, but is not part of them.

    limit    after LIMIT_S the kernel ends by itself, so nothing can hang
    late     the GPU has already passed `begin` when the host has recorded `end`. Then the GPU may
             have waited for the host between the two, and the time may be too long
    depth    a launch queue has room for 1021 entries (H200). If it is full, the host waits for the
             GPU. So a hold covers at most SAMPLES samples. The next ones are enqueued
             behind a separate hold while the GPU works, so the GPU is hardly ever idle

Some streams are not held, and then the host can be late:
    calls that no CUDA graph can capture   they may wait for the stream themselves
    blocking launches                      under a profiler, or with CUDA_LAUNCH_BLOCKING=1, a
                                           launch returns only when its kernel has ended
    after EXPIRED holds reached the limit  something in this process waits for the stream

Call everything once before calling it under a hold, because loading a module or allocating memory
may wait for the stream.

The driver's cuStreamWaitValue32 takes the host 3 instead of 14 µs and needs no kernel, but it has
no time limit: a host that then waits for the GPU waits forever. nvbench holds its stream by a
kernel too (blocking_kernel.cu). harness/NOTES.md has measurements.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sparsebench.kernels._common.driver import driver, require_success

LIMIT_S = 1.0  # a host that shares its core needs up to 0.2 s for the samples of one hold
TRIALS, TRIAL_S = 3, 0.1  # number and limit of the holds that find out whether launches block
SAMPLES = 16  # samples per hold, of about 6 entries each
EXPIRED = 3
REPEATS = 2  # repeats of late samples
FLUSHES = 2  # bytes that a flush reads, over the size of the L2 cache
WHAT = "the kernel that holds a stream"

# hold(flag, number, limit_ns): wait until *flag >= number, or for limit_ns.
PTX = b"""
.version 6.0
.target sm_70
.address_size 64
.visible .entry hold(.param .u64 flag, .param .u32 number, .param .u64 limit_ns) {
    .reg .pred %p<3>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [flag];
    ld.param.u32 %r1, [number];
    ld.param.u64 %rd2, [limit_ns];
    mov.u64 %rd3, %globaltimer;
wait:
    ld.volatile.global.u32 %r2, [%rd1];
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 bra done;
    mov.u64 %rd4, %globaltimer;
    sub.u64 %rd5, %rd4, %rd3;
    setp.lt.u64 %p2, %rd5, %rd2;
    @%p2 bra wait;
done:
    ret;
}
"""


Call = tuple[Callable[[], Any], bool]
"""A call, and whether the stream may be held for it."""


@dataclass(frozen=True)
class EventPair:
    """Two events around a call, and whether the host was late (see above)."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    late: bool

    @property
    def time_us(self) -> float:
        """Return the time between the events. The stream must have passed them."""
        return 1e3 * float(self.begin.elapsed_time(self.end))


class GpuClock:
    """Takes samples on the current stream of a device, which it holds if it can."""

    def __init__(self, device: torch.device) -> None:
        """Load the kernel that holds a stream, and test whether it can hold this one."""
        torch.cuda.synchronize(device)  # in a new thread, makes the device's context current
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._number = ctypes.c_uint32.from_address(self._flag.data_ptr())
        self._turn = self._expired = 0
        self.holds = not _launches_block(self._index)

    @contextmanager
    def hold(self, allowed: bool = True) -> Iterator[None]:
        """Hold the stream during the block if `allowed` and possible, then release it."""
        if not (allowed and self.holds):
            yield
            return
        self._turn += 1
        passed = _hold(self._index, self._flag, self._turn, LIMIT_S)
        try:
            yield
        finally:
            self._expired += passed.query()
            self._number.value = self._turn
            self.holds = self._expired < EXPIRED

    def sample(self, call: Callable[[], Any], keep: Callable[[Any], Any] = id) -> EventPair:
        """Enqueue a call between two events, and pass its output to `keep`."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        keep(call())
        end.record()
        return EventPair(begin, end, begin.query())

    def cold(self, calls: Sequence[Call], flush: Callable[[], None]) -> list[EventPair]:
        """Return a sample of each call, behind a flush; repeat late ones up to REPEATS times."""
        samples: dict[int, EventPair] = {}
        pending = sorted(range(len(calls)), key=lambda i: not calls[i][1])
        for _ in range(1 + REPEATS):
            for start in range(0, len(pending), SAMPLES):
                part = pending[start : start + SAMPLES]
                with self.hold(all(calls[i][1] for i in part)):
                    for i in part:
                        flush()
                        samples[i] = self.sample(calls[i][0])
            torch.cuda.synchronize(self._index)
            pending = [i for i in pending if samples[i].late and calls[i][1]]
        return [samples[i] for i in range(len(calls))]


def _hold(index: int, flag: torch.Tensor, number: int, limit_s: float) -> torch.cuda.Event:
    """Hold the current stream until *flag >= number; return an event that follows."""
    values = (
        ctypes.c_uint64(flag.data_ptr()),
        ctypes.c_uint32(number),
        ctypes.c_uint64(int(1e9 * limit_s)),
    )
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))
    grid_and_block = 1, 1, 1, 1, 1, 1
    result = driver().cuLaunchKernel(_kernel(index), *grid_and_block, 0, stream, pointers, None)
    require_success(result, WHAT)
    passed = torch.cuda.Event()
    passed.record()
    return passed


@cache
def _launches_block(index: int) -> bool:
    """Return whether a launch returns only when its kernel has ended, also when tried again."""
    flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    for _ in range(TRIALS):
        if not _hold(index, flag, 1, TRIAL_S).query():
            flag.fill_(1)
            torch.cuda.synchronize(index)
            return False
    return True


@cache
def _kernel(index: int) -> ctypes.c_void_p:
    """Load the kernel into the context of a device, which is current."""
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    require_success(driver().cuModuleLoadData(ctypes.byref(module), PTX), WHAT)
    require_success(driver().cuModuleGetFunction(ctypes.byref(kernel), module, b"hold"), WHAT)
    return kernel


def flusher(device: torch.device) -> Callable[[], None]:
    """Return a function that enqueues a read of FLUSHES times the L2 cache.

    A flush that writes leaves dirty lines, which are written back while the next kernel runs. On an
    H200 cuBLAS then takes 17.6 instead of 14.5 µs at m = 64, n = k = 4096, bf16, and 42.1 instead
    of 34.7 µs at n = 14336. Writing first and then reading gives the same times as reading (14.3
    and 34.5 µs).
    """
    l2_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
    ballast = torch.ones(FLUSHES * l2_bytes // 4, device=device)
    total = torch.empty((), device=device)

    def flush() -> None:
        torch.sum(ballast, 0, out=total)

    flush()  # loads its kernel and takes its workspace, which may wait for the stream
    return flush
