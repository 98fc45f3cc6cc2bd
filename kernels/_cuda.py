"""What the CUDA C++ kernels share: NVRTC, tensor maps for the copy engine, a launch through CuPy.

    NAME.cu --- NVRTC, constants as macros ---> machine code --- CuPy ---> Program: call it

CuPy's own RawModule(code=...) compiles for sm_90; wgmma needs sm_90a, and NVRTC takes one target
alone. So NVRTC is called here, and CuPy loads what it gave.

A tensor map is 128 bytes that describe a matrix to the copy engine (TMA): address, sizes, strides,
and the box that one instruction copies. Maps go into a kernel by value (__grid_constant__): in
device memory they would need a fence before their first use.
"""

import ctypes
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench.kernels._kernel import Unsupported
from sparsebench.results.record import Problem

HOPPER = (9, 0)
OPTIONS = "-std=c++17", "-arch=sm_90a"
TMA_ALIGNMENT = 16  # bytes: address and strides (CUDA driver API, cuTensorMapEncodeTiled)
MAP_BYTES, MAP_ALIGNMENT = 128, 64
MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
SWIZZLE_128B, L2_PROMOTION_128B = 3, 2  # CUtensorMapSwizzle, CUtensorMapL2promotion

Constants = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Program:
    """A kernel, its grid and its arguments: call it to compute `out`, into the same buffer.

    `args` are the kernel's; `kept` are the tensors whose addresses are in them.
    """

    kernel: Any
    grid: int
    threads: int
    shared_bytes: int
    args: tuple[Any, ...]
    kept: tuple[Tensor, ...]
    out: Tensor
    code: str

    def __call__(self) -> Tensor:
        """Enqueue the kernel on torch's current stream."""
        import cupy

        stream = torch.cuda.current_stream(self.out.device)
        with cupy.cuda.Stream.from_external(stream):
            self.kernel((self.grid,), (self.threads,), self.args, shared_mem=self.shared_bytes)
        return self.out


def supports_hopper(problem: Problem, device: torch.device) -> str | None:
    """Say why a kernel of Hopper's own instructions cannot run the problem here, or None."""
    wanted = "an NVIDIA GPU of compute capability 9.0"
    if device.type != "cuda":
        return f"needs {wanted}, found {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found != HOPPER:
        return f"needs {wanted}, found {found[0]}.{found[1]}"
    if problem["dtype"] not in ("fp16", "bf16"):
        return f"expected fp16 or bf16, found {problem['dtype']}"
    return None if find_spec("cupy") else "needs CuPy: pip install 'sparsebench[gpu]'"


@cache
def load(
    name: str, function: str, constants: Constants, shared_bytes: int, device: torch.device
) -> tuple[Any, str]:
    """Return a kernel of kernels/NAME.cu, ready on the device, and the digest of its code."""
    import cupy

    code = compiled(name, constants)
    with TemporaryDirectory() as folder, torch.cuda.device(device):
        path = Path(folder) / f"{name}.cubin"
        path.write_bytes(code)
        kernel = cupy.RawModule(path=str(path)).get_function(function)
        kernel.max_dynamic_shared_size_bytes = shared_bytes  # also loads it
    return kernel, hashlib.sha256(code).hexdigest()[:16]


def compiled(name: str, constants: Constants) -> bytes:
    """Return the machine code of kernels/NAME.cu; needs no GPU. Raises RuntimeError."""
    from cupy.cuda import nvrtc

    folder = files("sparsebench.kernels")
    source = folder.joinpath(f"{name}.cu").read_text()
    shared = {p.name: p.read_text() for p in folder.iterdir() if p.name.endswith(".cuh")}
    macros = tuple(f"-D{macro}={value}" for macro, value in constants)
    program = nvrtc.createProgram(source, f"{name}.cu", (*shared.values(),), (*shared,))
    try:
        nvrtc.compileProgram(program, OPTIONS + macros)
        code: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip().splitlines() or [str(error)]
        what = next((line for line in log if "error" in line), log[0])
        raise RuntimeError(f"NVRTC, {name}.cu {' '.join(macros)}: {what}") from error
    finally:
        nvrtc.destroyProgram(program)
    return code


def tensor_map(matrix: Tensor, rows: int, columns: int) -> bytes:
    """Describe a fp16 or bf16 matrix that is copied in boxes of rows x columns, swizzled by 128.

    What a box has outside of the matrix is read as zero and not written. Raises Unsupported.
    """
    size, step = matrix.element_size(), matrix.stride(0) * matrix.element_size()
    if matrix.stride(1) != 1 or step % TMA_ALIGNMENT or matrix.data_ptr() % TMA_ALIGNMENT:
        raise Unsupported(
            f"TMA expected contiguous rows of a multiple of {TMA_ALIGNMENT} bytes at a multiple of "
            f"{TMA_ALIGNMENT}, found {list(matrix.shape)} with strides {list(matrix.stride())} of "
            f"{size} bytes at address {matrix.data_ptr() % TMA_ALIGNMENT} modulo {TMA_ALIGNMENT}"
        )
    driver = ctypes.CDLL("libcuda.so.1")
    space = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    place = -(-ctypes.addressof(space) // MAP_ALIGNMENT) * MAP_ALIGNMENT
    sizes = (ctypes.c_uint64 * 2)(matrix.shape[1], matrix.shape[0])
    box, every = (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1)
    result = driver.cuTensorMapEncodeTiled(
        *(ctypes.c_void_p(place), MAP_TYPES[matrix.dtype], 2),
        *(ctypes.c_void_p(matrix.data_ptr()), sizes, (ctypes.c_uint64 * 1)(step), box, every),
        *(0, SWIZZLE_128B, L2_PROMOTION_128B, 0),
    )
    if result:
        error = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(error))
        what = f"{list(matrix.shape)} with rows of {step} bytes, in boxes of {rows} x {columns}"
        raise RuntimeError(f"cuTensorMapEncodeTiled, {what}: {(error.value or b'?').decode()}")
    return ctypes.string_at(place, MAP_BYTES)


def by_value(*structs: bytes) -> Any:
    """Return a kernel argument that is the bytes themselves: CuPy passes arrays of size 1 so."""
    data = b"".join(structs)
    return np.frombuffer(data, dtype=np.dtype((np.void, len(data))))
