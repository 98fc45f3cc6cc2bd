"""The text of a kernel of warpgroups, for emulation on a CPU (warpgroup_on_cpu.h)."""

import re

from tests.emulation.cuda_on_cpu import ring
from tests.tools.paths import cuda_source

FIXED = """
  auto* notes = (int (*)[SLOTS][NOTE_INTS])fixed_shared();
  auto *full = (u64 (*)[SLOTS])(fixed_shared() + (1 << 14)), *empty = full + GROUPS;
  auto *RESIDENT_full = (u64*)(empty + GROUPS), *RESIDENT_empty = RESIDENT_full + 2 * GROUPS;
"""
BARRIERS = "auto *full = (u64*)fixed_shared(), *empty = full + SLOTS;"
BOXES = """
static TensorMap boxes(void* from, int tokens, int heads, int rows) {
  return {(char*)from, tokens, heads * HEAD_DIM, 2 * heads * HEAD_DIM, rows, 64, 128};
}
"""


def on_cpu(name: str, run: str, resident: str = "q") -> str:
    """Return the text of a kernel with the stand-ins for its headers.

    run       launches it; `boxes` makes its tensor maps
    resident  what stays in shared memory beside the ring: the prefix of its barriers
    """
    fixed = FIXED.replace("RESIDENT", resident)
    device = cuda_source("wgmma.cuh")
    start = device.index("__device__ __forceinline__ u64 smem_descriptor")
    descriptor = device[start : device.index("__device__", start + 1)]
    header = cuda_source("warpgroup.cuh")
    stores = header[header.index("template <int WIDTH>") :]  # it has no PTX
    walk = re.sub("#pragma once", "", cuda_source("walk.cuh"))
    text = stores + cuda_source(name).replace('#include "walk.cuh"', walk)
    text = re.sub(r"#include .*", "", text)
    text = re.sub(r"extern __shared__.*", "char* const shared = dynamic_shared();", text)
    text = text.replace("__shared__ u64 full[SLOTS], empty[SLOTS];", BARRIERS)
    text = re.sub(r"__shared__ int notes[^;]*;", fixed, text)
    text = re.sub(r"__shared__ u64 full[^;]*;", "", text)
    assert "asm" not in text
    return '#include "warpgroup_on_cpu.h"\n' + ring() + descriptor + text + BOXES + run
