"""Examples for the tests of the CSR kernels, and the kernels' source for this machine."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats.csr import Csr
from tests.emulation.cuda_on_cpu import device_code

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# m, n, k, part stored
SHAPES = [
    (3, 5, 7, 0.5),
    (65, 40, 132, 0.2),
    (40, 70, 260, 0.1),
    (5, 4, 700, 0.02),
    (33, 9, 64, 0.0),
    (9, 33, 100, 1),
]


def example(shape: tuple[int, int, int, float], dtype: torch.dtype) -> tuple[Tensor, Csr]:
    """Return X and W of small integers, so that sums are exact; every fifth row of W is empty."""
    m, n, k, part = shape
    generator = torch.Generator().manual_seed(m)
    w = (
        torch.randint(1, 4, (n, k), generator=generator)
        * torch.tensor([1, -1])[torch.arange(k) % 2]
    )
    there = torch.rand(n, k, generator=generator) < part
    there[::5] = False
    there[1] = True  # a long row
    x = torch.randint(-3, 4, (m, k), generator=generator)
    return x.to(dtype), Csr.from_dense((w * there).to(dtype).contiguous())


def on_this_machine(name: str, dtype: torch.dtype) -> str:
    """Return the source of a kernel with stand-ins for the device."""
    narrowing = "__float_as_uint(f)" if dtype == FP32 else "(u16)narrow(f)"
    return f"""
      #define __align__(n)
      #include "mma_on_cpu.h"
      static void prefetch_l2(const void*) {{}}
      using u16 = unsigned short;
      #define narrow(f) {narrowing}
      {device_code(name, "narrow")}
    """


def on_two_sms(module: ModuleType, config: Any, room: int, patch: pytest.MonkeyPatch) -> list[Any]:
    """Give a module a GPU of two SMs that compiles nothing; return the calls of its `load`."""
    gpu = SimpleNamespace(shared_memory_per_multiprocessor=config.ctas * (room + 1024))
    calls: list[Any] = []
    patch.setattr(module, "load", lambda *arguments: calls.append(arguments) or (None, "code"))
    patch.setattr(module, "multiprocessors", lambda device: 2)
    patch.setattr(module, "target_of", lambda device: "cpu")
    patch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return calls


def on_gpu(operands: tuple[Tensor, Csr]) -> tuple[Tensor, Csr]:
    x, w = operands
    arrays = {name: array.cuda() for name, array in w.arrays().items()}
    return x.cuda(), replace(w, **arrays)
