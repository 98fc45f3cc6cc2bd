"""Arrays that the judge shares with a guest process, in one block of memory.

    [ w | x | y of set 0 | x of set 0 | ... ]       by name, each at a multiple of ALIGN bytes

    CPU   a file in memory (memfd), which both processes map
    GPU   an allocation of its own, because a CUDA IPC handle opens the whole of one: nothing that
          the guest must not read lies there

Each side makes the arrays from the layout; the handle is JSON.
"""

import ctypes
import fcntl
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.driver import driver, require_success

ALIGN = 512  # bytes; as CUDA allocations
OUT_OF_MEMORY = 2  # CUresult
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # reading what a guest has cut
# off would end the judge by SIGBUS
LAZY_PEER_ACCESS = 1  # the only flag of cuIpcOpenMemHandle
WHAT = "memory shared with the process of code from outside the package"

Layout = Mapping[str, tuple[Sequence[int], str]]
"""Shape and dtype (`float16`) of each array, by name."""


class _IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


@dataclass(frozen=True)
class _DeviceMemory:
    """Memory that torch.as_tensor reads without a copy."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        about = {"shape": (self.size,), "typestr": "|u1", "version": 3}
        return {**about, "data": (self.address, False)}


class Arena:
    """The judge's side: allocates the block, and frees it when closed."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Raises OutOfMemoryError, or Unsupported if the device cannot share memory."""
        self.layout, self._stack = layout, ExitStack()
        size = sum(_aligned_bytes(*entry) for entry in layout.values()) or ALIGN
        if device.type == "cpu":
            file = os.memfd_create("sparsebench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._stack.callback(os.close, file)
            os.ftruncate(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
            self.handle: dict[str, Any] = {"file": f"/proc/{os.getpid()}/fd/{file}", "size": size}
            block = _map(self.handle)
        else:
            address, handle = ctypes.c_uint64(), _IpcHandle()
            result = driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
            if result == OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(f"{WHAT}: {size} bytes")
            require_success(result, WHAT)
            self._stack.callback(driver().cuMemFree_v2, address)
            if driver().cuIpcGetMemHandle(ctypes.byref(handle), address):
                raise Unsupported(f"{WHAT}: expected a device that can share it, found none")
            self.handle = {"ipc": bytes(handle).hex(), "size": size, "device": str(device)}
            block = torch.as_tensor(_DeviceMemory(address.value, size), device=device)
        self.arrays = _views(block, layout)

    def close(self) -> None:
        self.arrays.clear()
        self._stack.close()


def open_arena(handle: Mapping[str, Any], layout: Layout) -> dict[str, Tensor]:
    """Return the arrays of an arena in a guest process."""
    if "file" in handle:
        return _views(_map(handle), layout)
    device = torch.device(handle["device"])
    address = ctypes.c_uint64()
    shared = _IpcHandle.from_buffer_copy(bytes.fromhex(handle["ipc"]))
    open_handle = driver().cuIpcOpenMemHandle_v2
    open_handle.argtypes = ctypes.c_void_p, _IpcHandle, ctypes.c_uint
    require_success(open_handle(ctypes.byref(address), shared, LAZY_PEER_ACCESS), WHAT)
    memory = _DeviceMemory(address.value, handle["size"])
    return _views(torch.as_tensor(memory, device=device), layout)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _map(handle: Mapping[str, Any]) -> Tensor:
    size, dtype = handle["size"], torch.uint8
    return torch.from_file(handle["file"], shared=True, size=size, dtype=dtype)


def _views(block: Tensor, layout: Layout) -> dict[str, Tensor]:
    arrays, start = {}, 0
    for name, (shape, dtype) in layout.items():
        typed = getattr(torch, dtype)
        size = prod(shape) * typed.itemsize
        arrays[name] = block[start : start + size].view(typed).view(*shape)
        start += _aligned_bytes(shape, dtype)
    return arrays


def _aligned_bytes(shape: Sequence[int], dtype: str) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return -(-prod(shape) * itemsize // ALIGN) * ALIGN
