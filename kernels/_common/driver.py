"""Call CUDA's driver through ctypes: the structures of cuLaunchKernelEx, and its errors."""

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: its number, and a value of 64 bytes, of which three words are used."""

    _fields_ = [
        *(("number", ctypes.c_int), ("padding", ctypes.c_int)),
        *(("words", ctypes.c_uint * 3), ("rest", ctypes.c_uint * 13)),
    ]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: grid, block, shared memory, stream and attributes."""

    _fields_ = [
        *((f"grid_{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block_{axis}", ctypes.c_uint) for axis in "xyz"),
        *(("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p)),
        *(("attributes", ctypes.POINTER(LaunchAttribute)), ("number", ctypes.c_uint)),
    ]


COOPERATIVE, CLUSTER_DIMENSION, EARLY = 2, 4, 6  # CUlaunchAttributeID


@cache
def set_device() -> Callable[[int], None]:
    from cupy.cuda import runtime

    call: Callable[[int], None] = runtime.setDevice
    return call


@lru_cache(4096)
def launch_config(
    grid: int, threads: int, shared_bytes: int, stream: int, together: bool, early: bool
) -> Any:
    """Return a pointer to a LaunchConfig; to make one takes 2 µs."""
    chosen = [number for number, on in ((COOPERATIVE, together), (EARLY, early)) if on]
    attributes = (LaunchAttribute * 2)(*[LaunchAttribute(number, 0, (1,)) for number in chosen])
    shape = grid, 1, 1, threads, 1, 1, shared_bytes
    first = ctypes.cast(attributes, ctypes.POINTER(LaunchAttribute))
    return ctypes.byref(LaunchConfig(*shape, stream, first, len(chosen)))


@cache
def driver() -> ctypes.CDLL:
    library, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p
    library.cuLaunchKernelEx.argtypes = pointer, pointer, pointer, pointer
    return library


def require_success(result: int, what: str) -> None:
    """Raise RuntimeError unless the driver's call succeeded."""
    if result:
        error = ctypes.c_char_p()
        driver().cuGetErrorName(result, ctypes.byref(error))
        raise RuntimeError(f"{what}: {(error.value or b'?').decode()}")
