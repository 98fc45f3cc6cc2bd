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
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._kernel import Unsupported
from sparsebench.results.record import Problem

HOPPER = (9, 0)
OPTIONS = "-std=c++17", "-arch=sm_90a"
TMA_ALIGNMENT = 16  # bytes: address and strides (CUDA driver API, cuTensorMapEncodeTiled)
MAP_BYTES, MAP_ALIGNMENT = 128, 64
MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
SWIZZLES, L2_PROMOTION_128B = {32: 1, 64: 2, 128: 3}, 2  # CUtensorMapSwizzle, ...L2promotion

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
        """Enqueue the kernel on torch's current stream. Raises RuntimeError.

        By the driver, without CuPy's own launch and its current stream: with that and a way past
        torch's dispatcher (nn/_ops.py) an eager training step took 10 to 35 % less.
        """
        from cupy.cuda import runtime

        device = self.out.device.index
        runtime.setDevice(device)  # a new thread has no context
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        size, shared = (self.grid, 1, 1, self.threads, 1, 1), self.shared_bytes
        kernel, (parameters, _) = ctypes.c_void_p(self.kernel.ptr), self._parameters
        require_success(
            _driver().cuLaunchKernel(kernel, *size, shared, stream, parameters, None),
            f"cuLaunchKernel, {self.grid} CTAs of {self.threads}",
        )
        return self.out

    @cached_property
    def _parameters(self) -> tuple[Any, list[Any]]:
        """Return the addresses of the arguments, and the arguments."""
        args = [np.atleast_1d(arg) for arg in self.args]
        return (ctypes.c_void_p * len(args))(*(arg.ctypes.data for arg in args)), args


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


def refusal(x: Tensor, w: Bsr, transposed: bool) -> str | None:
    """Say what keeps X @ W.T, or X @ W if transposed, from every kernel here, or None.

    TMA has conditions of its own: `tensor_map`.
    """
    (n, k), values = w.shape, w.values
    depth, width = (n, k) if transposed else (k, n)
    if x.dtype != values.dtype or x.dtype not in MAP_TYPES:
        return f"expected fp16 or bf16 operands of one dtype, found {x.dtype} and {values.dtype}"
    if x.dim() != 2 or x.shape[1] != depth:
        return f"expected activations of {depth} columns, found shape {list(x.shape)}"
    if not values.is_contiguous():
        return f"expected contiguous blocks, found strides {list(values.stride())}"
    if width % 8:
        return f"expected a multiple of 8 columns to write, found {width}"
    return None


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
    return kernel.kernel, hashlib.sha256(code).hexdigest()[:16]


def compiled(name: str, constants: Constants) -> bytes:
    """Return the machine code of kernels/NAME.cu; needs no GPU. Raises RuntimeError."""
    from cupy.cuda import nvrtc

    folder = files("sparsebench.kernels")
    source = folder.joinpath(f"{name}.cu").read_text()
    shared = {p.name.encode(): p.read_bytes() for p in folder.iterdir() if p.name.endswith(".cuh")}
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
    """Describe a fp16 or bf16 matrix that is copied in boxes of rows x columns, swizzled.

    A row of a box has 32, 64 or 128 bytes, and the pattern of the swizzle as many (hopper.cuh).
    What a box has outside of the matrix is read as zero and not written. Raises Unsupported.
    """
    size, step = matrix.element_size(), matrix.stride(0) * matrix.element_size()
    if matrix.stride(1) != 1 or step % TMA_ALIGNMENT or matrix.data_ptr() % TMA_ALIGNMENT:
        raise Unsupported(
            f"TMA expected contiguous rows of a multiple of {TMA_ALIGNMENT} bytes at a multiple of "
            f"{TMA_ALIGNMENT}, found {list(matrix.shape)} with strides {list(matrix.stride())} of "
            f"{size} bytes at address {matrix.data_ptr() % TMA_ALIGNMENT} modulo {TMA_ALIGNMENT}"
        )
    sizes = (matrix.shape[0], matrix.shape[1], step)
    return _encoded(matrix.data_ptr(), *sizes, matrix.dtype, rows, columns)


@lru_cache(4096)  # the allocator hands out the same addresses again: three maps a launch
def _encoded(
    address: int, height: int, width: int, step: int, dtype: torch.dtype, rows: int, columns: int
) -> bytes:
    driver = _driver()
    space = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    place = -(-ctypes.addressof(space) // MAP_ALIGNMENT) * MAP_ALIGNMENT
    sizes = (ctypes.c_uint64 * 2)(width, height)
    box, every = (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1)
    result = driver.cuTensorMapEncodeTiled(
        *(ctypes.c_void_p(place), MAP_TYPES[dtype], 2),
        *(ctypes.c_void_p(address), sizes, (ctypes.c_uint64 * 1)(step), box, every),
        *(0, SWIZZLES[columns * dtype.itemsize], L2_PROMOTION_128B, 0),
    )
    what = f"[{height}, {width}] with rows of {step} bytes, in boxes of {rows} x {columns}"
    require_success(result, f"cuTensorMapEncodeTiled, {what}")
    return ctypes.string_at(place, MAP_BYTES)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def require_success(result: int, what: str) -> None:
    """Raise RuntimeError unless the driver's call succeeded."""
    if result:
        error = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(error))
        raise RuntimeError(f"{what}: {(error.value or b'?').decode()}")


def by_value(*structs: bytes) -> Any:
    """Return a kernel argument that is the bytes themselves: a launch copies them."""
    data = b"".join(structs)
    return np.frombuffer(data, dtype=np.dtype((np.void, len(data))))
