"""Kernels that fail: each may cost its own row and no other."""

import ctypes
import os
import sys
import time

import torch
from declare import Run, by_call, kernel, prepare_linear, weight_and_input
from torch import Tensor

from sparsebench.kernels._kernel import Launch, Operands


@prepare_linear()
def chatters(w: Tensor, x: Tensor) -> Run:
    """Be right, but print to stdout, from Python and below it."""
    print('{"rows": "are not printed here"}')
    os.write(1, b"nor here\n")
    return lambda: x @ w.T


@kernel()
def crashes(operands: Operands) -> Launch:
    """Write a last line to stderr, then read address 0."""

    def run() -> object:
        sys.stderr.write("about to read address 0\n")
        sys.stderr.flush()
        return ctypes.string_at(0)

    return Launch(run)


CALLS = 80  # one in prepare, two checked, 66 looked at, two tried: the next are in a block


@by_call
def crashes_later(w: Tensor, x: Tensor, call: int) -> object:
    """Be right for 80 calls, then end the process while it is timed."""
    if call > CALLS:
        os._exit(7)
    return x @ w.T


@kernel()
def exhausts(operands: Operands) -> Launch:
    """Ask for more memory than there is."""
    if operands.device.type == "cpu":
        raise MemoryError("asked for 4 EiB")
    return Launch(lambda: torch.empty(1 << 50, dtype=torch.uint8, device=operands.device))


@kernel()
def hangs(operands: Operands) -> Launch:
    """Never return."""
    return Launch(lambda: time.sleep(3600))


SOURCE = 'extern "C" __global__ void f(float* p) { p[1ull << 40] = 1; }'


@kernel(device="cuda")
def illegal_address(operands: Operands) -> Launch:
    """Write to an address outside the GPU's memory: a real CUDA error, which ends the context."""
    import cupy

    kernel = cupy.RawKernel(SOURCE, "f")
    w, x = weight_and_input(operands)

    def run() -> object:
        kernel((1,), (1,), (x.data_ptr(),))
        return x @ w.T

    return Launch(run)


@kernel()
def raises(operands: Operands) -> Launch:
    """Raise in `prepare`."""
    raise RuntimeError("no such instruction <b>here</b>\nsecond line")
