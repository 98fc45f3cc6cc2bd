"""The machine code of the clocks: its first bytes must stay as they are.

    libc       clock_gettime, which time.perf_counter calls
    libcudart  cudaEventElapsedTime, cudaEventRecord, cudaEventSynchronize, ..., if it is loaded

A detour overwrites the start of a function with a jump to other code. A change of the table
through which torch finds these functions leaves the code alone. So two events, recorded once, are
read again at every check: their distance must not change.
"""

import ctypes
import mmap
from functools import cache

import torch

SEALED_BYTES = 32
LIBC = ["clock_gettime"]
CUDART = [
    "cudaEventElapsedTime",
    "cudaEventRecord",
    "cudaEventRecordWithFlags",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cudaGraphLaunch",
]
ALL = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
CODE = mmap.PROT_READ | mmap.PROT_EXEC


class SealedClocks:
    """The code of the clocks, and the distance of two events, as they were."""

    def __init__(self) -> None:
        self._before = {
            name: ctypes.string_at(at, SEALED_BYTES) for name, at in addresses().items()
        }
        self._events = _events()

    def restore(self) -> list[str]:
        """Put the code back, and return the names of the functions that were changed."""
        changed = []
        for name, at in addresses().items():
            if ctypes.string_at(at, SEALED_BYTES) != self._before[name]:
                write(at, self._before[name])
                changed.append(name)
        if self._events:
            begin, end, distance = self._events
            if begin.elapsed_time(end) != distance:
                self._events = None
                changed.append("elapsed_time, which no longer gives what it gave")
        return changed


@cache
def addresses() -> dict[str, int]:
    """Return where each clock begins in memory."""
    libraries = [(ctypes.CDLL(None), LIBC)]
    if (path := _loaded("libcudart.so")) is not None:
        libraries.append((ctypes.CDLL(path), CUDART))
    return {
        name: address
        for library, names in libraries
        for name in names
        if hasattr(library, name)
        and (address := ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    }


def write(address: int, code: bytes) -> None:
    """Write machine code over a function's."""
    page = address & -mmap.PAGESIZE
    size = ctypes.c_size_t(address + len(code) - page)
    libc = ctypes.CDLL(None)
    if libc.mprotect(ctypes.c_void_p(page), size, ALL) == 0:
        ctypes.memmove(address, code, len(code))
        libc.mprotect(ctypes.c_void_p(page), size, CODE)


def _loaded(name: str) -> str | None:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = [line.rpartition(" ")[2].strip() for line in maps if f"/{name}" in line]
    return paths[0] if paths else None


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event, float] | None:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    end.record()
    end.synchronize()
    return begin, end, begin.elapsed_time(end)
