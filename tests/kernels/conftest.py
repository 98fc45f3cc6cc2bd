"""What tests of kernels share: a seed, poisoned memory, plans and front.cpp on this machine."""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.kernels._common import cuda, front, front_extension, requirements
from sparsebench.kernels._common.declarations import arguments_of
from sparsebench.kernels._common.tape import on_tape
from sparsebench.kernels.dense import _decoder
from sparsebench.kernels.peers import _cusparselt, cutlass_sparse, stk
from tests.tools.marks import needs_gxx

COLUMNS = 8
on_a_cpu = [  # front.cpp, connected to functions that launch there
    needs_gxx,
    pytest.mark.exhaustive,  # compiles for 25 s
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver itself is connected there"),
    pytest.mark.usefixtures("recording"),
]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def cublas() -> None:
    """Create cuBLAS's handle of this thread, which a capture cannot create."""
    if torch.cuda.is_available():
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every package, library and checkout be there."""
    monkeypatch.setattr(requirements, "find_spec", lambda package: True)
    monkeypatch.setattr(_cusparselt, "library", lambda: None)
    monkeypatch.setattr(cutlass_sparse, "version", lambda: "4.2.0")
    monkeypatch.setattr(stk, "unavailable", lambda: None)
    monkeypatch.setattr(_decoder, "unsupported", lambda problem, device: None)


# ---- plans without a GPU ----


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let plans on a CPU be those of a Hopper; return the list of (name, macros, target)."""
    properties = SimpleNamespace(
        shared_memory_per_block_optin=227 * 1024, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for place, module in [*sys.modules.items()]:
        if place.startswith("sparsebench.kernels.") and hasattr(module, "multiprocessors"):
            monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    listed: list[Any] = []

    def load(name, function, constants, shared_bytes, device, target=cuda.SM_90A) -> Any:
        assert shared_bytes <= 227 * 1024
        listed.append((name, constants, target))
        layout = arguments_of(name, function, constants)
        return cuda.CudaKernel(SimpleNamespace(ptr=1), "code", layout, device.index, shared_bytes)

    monkeypatch.setattr(cuda, "load", load)
    monkeypatch.setattr(cuda, "target_of", lambda device: "sm_90")
    return listed


# ---- recorded calls on a CPU ----


@ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
def _launch(config: int, count: int, parameters: int, extra: int) -> int:
    """Write twice the first, or the sum of the first, of `count` tensors to the last."""
    size = int(ctypes.cast(config, ctypes.POINTER(ctypes.c_uint32))[0]) * COLUMNS
    *inputs, out = (
        (ctypes.c_float * size).from_address(
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64))[0]
        )
        for pointer in ctypes.cast(parameters, ctypes.POINTER(ctypes.c_uint64))[:count]
    )
    for i, values in enumerate(zip(*inputs, strict=True)):
        out[i] = 2 * values[0] if count == 2 else sum(values)
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))
def _stream(device: int, out: Any) -> int:
    out[0] = 7
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
def _capturing(stream: int, out: Any) -> int:
    out[0] = 0
    return 0


@pytest.fixture(scope="session")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the class of front.cpp, connected to functions that launch on a CPU."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        # All processes of pytest-xdist share it: compiling takes 25 s.
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        file: Path = front_extension._built()
        assert front_extension._built() == file  # the second time from the cache
    module = front_extension._load(file)
    functions = (_launch, _stream, _capturing)
    module.connect(*(ctypes.cast(f, ctypes.c_void_p).value for f in functions))
    return module.Front


@pytest.fixture
def recording(extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Recordings use the extension, and `launch` run on a CPU."""
    monkeypatch.setattr(front, "front_type", lambda: extension)
    monkeypatch.setattr(cuda, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=_launch))
    monkeypatch.setattr(cuda, "set_device", lambda: lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    extension(1, False, [], [], None, None, 0)(torch.ones(1, COLUMNS))  # a thread's first call


def launch(*tensors: torch.Tensor) -> None:
    """Enqueue a kernel that writes twice the only input, or the sum of all, to the last tensor."""
    count = len(tensors)
    addresses = [t.data_ptr() for t in tensors]
    loaded = cuda.Loaded(SimpleNamespace(ptr=count), "", 0, tensors[-1].numel() // COLUMNS, 32, 0)
    loaded.enqueue(cuda.Layout(*"P" * count)(*addresses))


def result_of(*inputs: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Return what a launch with these inputs writes."""
    y = inputs[0].new_empty(shape or inputs[0].shape)
    launch(*inputs, y)
    on_tape(y)
    return y
