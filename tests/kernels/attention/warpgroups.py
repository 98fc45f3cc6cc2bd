"""The text of a kernel of warpgroups, for emulation on a CPU (warpgroup_on_cpu.h)."""

import re

import torch

from tests.tools.paths import cuda_source

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def on_cpu(name: str, fixed: str, run: str) -> str:
    """Return the text of a kernel with the stand-ins for its headers.

    fixed  places its static shared memory
    run    launches it
    """
    device = cuda_source("hopper.cuh")
    start = device.index("__device__ __forceinline__ u64 smem_descriptor")
    descriptor = device[start : device.index("__device__", start + 1)]
    header = cuda_source("warpgroup.cuh")
    own = header[header.index("template <int WIDTH>") :]  # it has no PTX
    walk = re.sub("#pragma once", "", cuda_source("walk.cuh"))
    text = own + cuda_source(name).replace('#include "walk.cuh"', walk)
    text = re.sub(r"#include .*", "", text)
    text = re.sub(r"extern __shared__.*", "char* const shared = dynamic_shared();", text)
    text = re.sub(r"__shared__ int notes[^;]*;", fixed, text)
    text = re.sub(r"__shared__ u64 full[^;]*;", "", text)
    assert "asm" not in text
    return '#include "warpgroup_on_cpu.h"\n' + descriptor + text + run
