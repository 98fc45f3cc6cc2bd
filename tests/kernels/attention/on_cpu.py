"""The CUDA kernels of attention on a CPU: emulated (warpgroup_on_cpu.h), thread by thread.

Their plans run as on a GPU: they load the text of a kernel, describe matrices to TMA, and launch
with arguments, which the emulation reads by the kernel's signature.
"""

import ctypes
import re
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from sparsebench.kernels._common import cuda
from sparsebench.kernels.attention import _gathered_wgmma, attention_wgmma
from tests.emulation.cuda_on_cpu import entry_point, library_of, ring, run_here
from tests.tools.paths import cuda_source

SOURCES = {
    "attend": "attention_wgmma.cu",
    "differentiate": "attention_wgmma_backward.cu",
    "differentiate_queries": "attention_wgmma_dq.cu",
    "weigh_rows": "attention_wgmma_stored.cu",
    "multiply_stored": "attention_wgmma_stored.cu",
}
FIXED = """
  auto* notes = (int (*)[SLOTS][NOTE_INTS])fixed_shared();
  auto* entries = (int*)(fixed_shared() + (1 << 13));
  auto *full = (u64 (*)[SLOTS])(fixed_shared() + (1 << 14)), *empty = full + GROUPS;
  auto *RESIDENT_full = (u64*)(empty + GROUPS), *RESIDENT_empty = RESIDENT_full + 2 * GROUPS;
"""
BARRIERS = "auto *full = (u64*)fixed_shared(), *empty = full + SLOTS;"
SMS = 2


def on_two_sms(patch: pytest.MonkeyPatch, late: bool) -> None:
    """Let plans run on this machine, as on a GPU of two SMs.

    late  a copy lands, and a product reads its operands, when it is waited for
    """

    def build(function: str, constants: cuda.Constants) -> Any:
        return getattr(library(function, constants, late), function + "_here")

    run_here(patch, build)
    for module in (attention_wgmma, _gathered_wgmma):
        patch.setattr(module, "multiprocessors", lambda device: SMS)
    driver = SimpleNamespace(cuTensorMapEncodeTiled=encode)
    patch.setattr(cuda, "driver", lambda: driver)


def encode(place: Any, kind: int, rank: int, address: Any, *layout: Any) -> int:
    """Write the TensorMap of wgmma_on_cpu.h."""
    (width, tokens, _), (row, *_), (columns, rows, _), *_ = layout
    described = struct.pack("Piiiiii", address.value, tokens, width, row, rows, columns, 128)
    ctypes.memmove(place, described, len(described))
    return 0


def library(function: str, constants: cuda.Constants, late: bool) -> ctypes.CDLL:
    """Build a kernel, with stand-ins for its headers, and its entry point."""
    # What stays in shared memory beside the ring is the prefix of its barriers.
    fixed = FIXED.replace("RESIDENT", "kv" if function == "differentiate" else "q")
    device = cuda_source("wgmma.cuh")
    start = device.index("__device__ __forceinline__ u64 smem_descriptor")
    descriptor = device[start : device.index("__device__", start + 1)]
    header = cuda_source("warpgroup.cuh")
    stores = header[header.index("template <int WIDTH") :]  # it has no PTX
    walk = re.sub("#pragma once", "", cuda_source("walk.cuh"))
    kernel = cuda_source(SOURCES[function])
    text = stores + kernel.replace('#include "walk.cuh"', walk)
    text = re.sub(r"#include .*", "", text)
    text = re.sub(r"extern __shared__.*", "char* const shared = dynamic_shared();", text)
    text = text.replace("__shared__ u64 full[SLOTS], empty[SLOTS];", BARRIERS)
    text = re.sub(r"__shared__ int notes[^;]*;", fixed, text)
    text = re.sub(r"__shared__ int entries[^;]*;", "", text)
    text = re.sub(r"__shared__ u64 full[^;]*;", "", text)
    assert "asm" not in text
    stored = SOURCES[function] == "attention_wgmma_stored.cu"
    entry = entry_point(
        call_of(kernel, function),
        *("256" if function == "weigh_rows" else "THREADS", "1" if stored else "grid"),
        name=function + "_here",
    )
    source = '#include "warpgroup_on_cpu.h"\n' + ring() + descriptor + text + entry
    return library_of(source, constants, late)


def call_of(kernel: str, function: str) -> str:
    """Return C++ that calls a kernel with the arguments of a launch."""
    (parameters,) = re.findall(rf"^{function}\(([^)]*)\) {{", kernel, re.MULTILINE)
    kinds = re.findall(r"(\S+ ?\**) ?\w+(?:,|$)", parameters)
    arguments = ", ".join(f"at<{kind.strip()}>({i})" for i, kind in enumerate(kinds))
    return f"{function}({arguments});"
