"""Compile CUDA C++ kernels (NVRTC), describe matrices to TMA, load (CuPy) and launch (driver).

    NAME.cu --- NVRTC, constants as macros ---> machine code --- CuPy ---> Loaded: enqueue it

wgmma needs the target sm_90a, but CuPy's RawModule(code=...) compiles for sm_90. So this module
calls NVRTC, and CuPy loads the cubin. Kernels without wgmma are compiled for the target of the
device. Later processes find the cubin in $XDG_CACHE_HOME/sparsebench/cubins (machine_code.py).

A tensor map is 128 bytes that describe a matrix to TMA: address, sizes, strides, and the box that
one instruction copies. A kernel receives it by value (__grid_constant__); in device memory it would
need a fence before its first use.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebench._writing import write_file
from sparsebench.errors import Unsupported
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.declarations import HEADERS as HEADERS
from sparsebench.kernels._common.declarations import MAP_BYTES as MAP_BYTES
from sparsebench.kernels._common.declarations import Arguments as Arguments
from sparsebench.kernels._common.declarations import Constants as Constants
from sparsebench.kernels._common.declarations import Layout as Layout
from sparsebench.kernels._common.declarations import arguments_of
from sparsebench.kernels._common.declarations import source_of as source_of
from sparsebench.kernels._common.device import shared_bytes_of
from sparsebench.kernels._common.driver import (
    CLUSTER_DIMENSION,
    LaunchAttribute,
    LaunchConfig,
    driver,
    launch_config,
    require_success,
    set_device,
)
from sparsebench.kernels._common.machine_code import digest, is_cached, read_or_compile
from sparsebench.kernels._common.tape import MatrixProduct as MatrixProduct
from sparsebench.kernels._common.tape import TransposedCopy as TransposedCopy
from sparsebench.kernels._common.tape import current_tape
from sparsebench.kernels._common.tape import on_tape as on_tape
from sparsebench.kernels._common.tape import taping as taping

SM_90A = "sm_90a"  # the target with wgmma; it runs on compute capability 9.0 only
SHARED_BYTES = 227 * 1024  # that a CTA may have on Hopper
TMA_ALIGNMENT = 16  # bytes: address and strides (CUDA driver API, cuTensorMapEncodeTiled)
MAP_ALIGNMENT = 64
HALVES = torch.float16, torch.bfloat16
MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9, torch.float8_e4m3fn: 0}  # CUtensorMapDataType
SWIZZLES, L2_PROMOTION_128B = {32: 1, 64: 2, 128: 3}, 2  # CUtensorMapSwizzle, ...L2promotion
ADDRESSES = 256  # sets of operands for which a plan keeps the arguments, 1 KB each


@dataclass(frozen=True)
class Loaded:
    """A kernel that is loaded on a device, and its grid.

    code      digest of the machine code
    together  cooperative launch: all CTAs run at the same time, and may wait for each other
    early     programmatic dependent launch: the kernel waits for its predecessor in the stream
              (hopper.cuh)
    """

    kernel: Any
    code: str
    device: int
    grid: int
    threads: int
    shared_bytes: int
    together: bool = False
    early: bool = False

    def enqueue(self, args: Arguments) -> None:
        """Enqueue the kernel on torch's current stream of the device. Raises RuntimeError.

        Calls the driver directly, because CuPy's launch and torch's Stream objects take longer.
        """
        set_device()(self.device)  # a new thread has no context
        stream = torch._C._cuda_getCurrentRawStream(self.device)  # as inductor and Triton do
        sizes = self.grid, self.threads, self.shared_bytes, stream
        config = launch_config(*sizes, self.together, self.early)
        # The driver copies the arguments before it returns.
        if result := driver().cuLaunchKernelEx(config, self.kernel.ptr, args[0], None):
            require_success(result, f"launch of {self.grid} CTAs of {self.threads}")
        if (tape := current_tape()) is not None:
            tape.launches.append((self, args))


class CudaKernel(NamedTuple):
    """A kernel on a device: CuPy's, the digest of its code, and the layout of its parameters."""

    kernel: Any
    code: str
    arguments: Layout
    device: int
    shared_bytes: int

    def on(self, grid: int, threads: int, *, together: bool = False, early: bool = False) -> Loaded:
        """Return the kernel with its grid."""
        sizes = grid, threads, self.shared_bytes
        return Loaded(self.kernel, self.code, self.device, *sizes, together, early)


def launch(loaded: Loaded, args: Arguments, out: Tensor, owner: Any, *others: Tensor) -> Tensor:
    """Enqueue a kernel that writes `out`, and return it. Raises RuntimeError.

    owner, others  of the other memory that the kernel reads; a graph that captures the launch keeps
                   `owner`, the same object in each launch, alive
    """
    loaded.enqueue(args)
    on_tape(out, owners=(owner, *others))
    if is_capturing(out):
        keep(owner)
    return out


def target_of(device: torch.device) -> str:
    """Return the device's target, such as sm_80, without architecture-specific features."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


_may_compile: ContextVar[bool] = ContextVar("may_compile", default=True)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let `load` raise Unsupported in this thread for a kernel that would be compiled now."""
    token = _may_compile.set(False)
    try:
        yield
    finally:
        _may_compile.reset(token)


def require_compiled(name: str, is_compiled: Callable[[], bool]) -> None:
    """Raise Unsupported if a kernel would be compiled `without_compiler`."""
    if not _may_compile.get() and not is_compiled():
        raise Unsupported(f"{name}: expected a kernel that is compiled, found none")


def load(
    name: str,
    function: str,
    constants: Constants,
    shared_bytes: int,
    device: torch.device,
    target: str = SM_90A,
) -> CudaKernel:
    """Return the kernel `function` of NAME.cu, loaded on the device.

    With SPARSEBENCH_WATCHDOG=1, a kernel that hangs stops and prints where it waited; it runs a
    little slower. Raises Unsupported if a CTA cannot have so much shared memory, as with a listed
    configuration of a weight with smaller records; RuntimeError if the driver refuses it.
    """
    if shared_bytes > (most := shared_bytes_of(device)):
        expected = f"expected at most {most} bytes of shared memory"
        raise Unsupported(f"{name}: {expected}, found {shared_bytes}")
    if os.environ.get("SPARSEBENCH_WATCHDOG", "0") != "0":
        constants += (("WATCHDOG", 1),)
    key = name, function, constants, shared_bytes, device, target
    if key not in _KERNELS:
        require_compiled(name, lambda: is_cached(_key(name, constants, target)))
        layout = arguments_of(name, function, constants)
        _KERNELS[key] = CudaKernel(*_loaded(*key), layout, device.index, shared_bytes)
    return _KERNELS[key]


_KERNELS: dict[tuple[Any, ...], CudaKernel] = {}
"""Kernels that are loaded, by what they depend on."""


def _loaded(
    name: str,
    function: str,
    constants: Constants,
    shared_bytes: int,
    device: torch.device,
    target: str,
) -> tuple[Any, str]:
    import cupy

    make = partial(compiled, name, constants, target)
    code = read_or_compile(_key(name, constants, target), make)
    with TemporaryDirectory() as folder, torch.cuda.device(device):
        path = Path(folder) / f"{name}.cubin"
        write_file(path, code)
        try:
            kernel = cupy.RawModule(path=str(path)).get_function(function)
            kernel.max_dynamic_shared_size_bytes = shared_bytes  # also loads it
        except cupy.cuda.driver.CUDADriverError as error:
            what = f"{name} with {shared_bytes} bytes of shared memory and {dict(constants)}"
            raise RuntimeError(f"{what}: {error}") from error
    return kernel.kernel, digest(code)


@cache
def clusters_at_once(ctas: int, threads: int, shared_bytes: int, device: torch.device) -> int:
    """Return how many clusters of such CTAs the device runs at a time (clusters.cu)."""
    kernel = load("clusters", "nothing", (("CTAS", ctas),), shared_bytes, device).kernel
    of_cluster = LaunchAttribute(CLUSTER_DIMENSION, 0, (ctas, 1, 1))
    shape = (ctas, 1, 1, threads, 1, 1, shared_bytes)
    config = LaunchConfig(*shape, None, ctypes.pointer(of_cluster), 1)
    clusters = ctypes.c_int()
    pointer, reference = ctypes.c_void_p(kernel.ptr), ctypes.byref(config)
    result = driver().cuOccupancyMaxActiveClusters(ctypes.byref(clusters), pointer, reference)
    require_success(result, f"clusters of {ctas} CTAs of {threads}")
    return clusters.value


def compiled(name: str, constants: Constants, target: str = SM_90A) -> bytes:
    """Return the cubin of NAME.cu. Needs no GPU. Raises RuntimeError."""
    from cupy.cuda import nvrtc

    source, shared = source_of(name).read_text("utf-8"), _headers_of(name)
    macros = tuple(f"-D{macro}={value}" for macro, value in constants)
    program = nvrtc.createProgram(source, f"{name}.cu", (*shared.values(),), (*shared,))
    try:
        nvrtc.compileProgram(program, ("-std=c++17", f"-arch={target}", *macros))
        code: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip().splitlines() or [str(error)]
        what = next((line for line in log if "error" in line), log[0])
        raise RuntimeError(f"NVRTC, {name}.cu {' '.join(macros)}: {what}") from error
    finally:
        nvrtc.destroyProgram(program)
    return code


@cache
def _key(name: str, constants: Constants, target: str) -> tuple[object, ...]:
    """Return everything that the machine code of a kernel depends on."""
    import cupy
    from cupy.cuda import nvrtc

    compiler = cupy.__version__, *nvrtc.getVersion()
    return *compiler, target, constants, source_of(name).read_text("utf-8"), _headers_of(name)


def _headers_of(name: str) -> dict[bytes, bytes]:
    """Return the headers that NAME.cu may include, by name."""
    headers = [*HEADERS.glob("*.cuh"), *source_of(name).parent.glob("*.cuh")]
    return {path.name.encode(): path.read_bytes() for path in sorted(headers)}


@lru_cache(4096)  # the allocator reuses addresses
def tensor_map(
    address: int,
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    box: tuple[int, int],
) -> bytes:
    """Return the tensor map of an fp16, bf16 or fp8 matrix [height, width], for swizzled boxes.

    box  rows x columns. The swizzle is 32, 64 or 128 bytes, the smallest that a row fits into
         (hopper.cuh). It is also the pitch of rows in shared memory; a shorter row leaves a gap

    Outside of the matrix a box reads zeros and writes nothing. Raises Unsupported.
    """
    (height, width), columns, size = shape, box[1], dtype.itemsize
    step = strides[0] * size
    if strides[1] != 1 or step % TMA_ALIGNMENT or address % TMA_ALIGNMENT:
        raise Unsupported(
            f"TMA expected contiguous rows of a multiple of {TMA_ALIGNMENT} bytes at a multiple of "
            f"{TMA_ALIGNMENT}, found [{height}, {width}] with strides {list(strides)} of {size} "
            f"bytes at address {address % TMA_ALIGNMENT} modulo {TMA_ALIGNMENT}"
        )
    swizzle = SWIZZLES[pitch(columns * size)]
    return encoded_map(address, shape, (step,), MAP_TYPES[dtype], box, swizzle)


def encoded_map(
    address: int,
    shape: tuple[int, ...],
    steps: tuple[int, ...],
    kind: int,
    box: tuple[int, ...],
    swizzle: int,
) -> bytes:
    """Return a tensor map of a matrix [..., height, width], whose last dimension is contiguous.

    steps    bytes between rows, and in the dimensions before them
    kind     CUtensorMapDataType
    box      as many sizes as the matrix has
    swizzle  CUtensorMapSwizzle
    """
    rank = len(shape)
    space = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    place = -(-ctypes.addressof(space) // MAP_ALIGNMENT) * MAP_ALIGNMENT
    sizes, strides = (ctypes.c_uint64 * rank)(*shape[::-1]), (ctypes.c_uint64 * rank)(*steps[::-1])
    tile, every = (ctypes.c_uint32 * rank)(*box[::-1]), (ctypes.c_uint32 * rank)(*[1] * rank)
    result = driver().cuTensorMapEncodeTiled(
        *(ctypes.c_void_p(place), kind, rank),
        *(ctypes.c_void_p(address), sizes, strides, tile, every),
        *(0, swizzle, L2_PROMOTION_128B, 0),
    )
    what = f"{list(shape)} with rows of {steps[-1]} bytes, in boxes of {list(box)}"
    require_success(result, f"cuTensorMapEncodeTiled, {what}")
    return ctypes.string_at(place, MAP_BYTES)


def pitch(row_bytes: int) -> int:
    """Return the bytes between rows of a box in shared memory."""
    return next(swizzle for swizzle in SWIZZLES if swizzle >= row_bytes)
