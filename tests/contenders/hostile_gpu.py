"""Kernels that attack the contest through the GPU: by streams, graphs and events."""

import ctypes
import mmap
from itertools import count

import torch
from declare import Run, prepare_linear
from torch import Tensor


def address_of(name: str) -> int:
    """Return where a function of the CUDA runtime begins in memory."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        library = next(line.split()[-1] for line in maps if "/libcudart.so" in line)
    return ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value or 0


def rewrite(address: int, code: bytes) -> None:
    """Write machine code over a function's."""
    libc, page = ctypes.CDLL(None), address & -mmap.PAGESIZE
    size = ctypes.c_size_t(address + len(code) - page)
    libc.mprotect(ctypes.c_void_p(page), size, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    ctypes.memmove(address, code, len(code))


@prepare_linear(device="cuda")
def detours_elapsed_time(w: Tensor, x: Tensor) -> Run:
    """Be right, but let cudaEventElapsedTime write a microsecond and return."""
    code = bytes.fromhex("c707 6f12833a 31c0 c3")  # mov dword [rdi], 0.001f; xor eax, eax; ret
    rewrite(address_of("cudaEventElapsedTime"), code)
    return lambda: x @ w.T


@prepare_linear(device="cuda")
def empty_graph(w: Tensor, x: Tensor) -> Run:
    """Do nothing while captured."""
    out = x @ w.T

    def run() -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            torch.mm(x, w.T, out=out)
        return out

    return run


@prepare_linear(device="cuda")
def every_other_call(w: Tensor, x: Tensor) -> Run:
    """Refuse capture, and work in every second call only."""
    out, calls = x @ w.T, count(1)

    def run() -> torch.Tensor:
        call = next(calls)
        torch.cuda.synchronize()
        if call < 5 or call % 2:
            torch.mm(x, w.T, out=out)
        return out

    return run


@prepare_linear(device="cuda")
def half_a_graph(w: Tensor, x: Tensor) -> Run:
    """Compute half of the output while captured."""
    out, half = x @ w.T, len(x) // 2

    def run() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.mm(x[:half], w.T, out=out[:half])
        else:
            torch.mm(x, w.T, out=out)
        return out

    return run


@prepare_linear(device="cuda")
def other_stream(w: Tensor, x: Tensor) -> Run:
    """Work on another stream, which nothing waits for."""
    side, out = torch.cuda.Stream(), x @ w.T

    def run() -> torch.Tensor:
        with torch.cuda.stream(side):
            return torch.mm(x, w.T, out=out)

    return run


@prepare_linear(device="cuda")
def replaces_events(w: Tensor, x: Tensor) -> Run:
    """Be right, but make every event report a nanosecond."""
    torch.cuda.Event.elapsed_time = lambda self, end_event: 1e-6
    return lambda: x @ w.T


@prepare_linear(device="cuda")
def stale_from_python(w: Tensor, x: Tensor) -> Run:
    """Work while captured, but only in the first calls from Python."""
    out, calls = x @ w.T, count(1)

    def run() -> torch.Tensor:
        if next(calls) < 6 or torch.cuda.is_current_stream_capturing():
            torch.mm(x, w.T, out=out)
        return out

    return run
