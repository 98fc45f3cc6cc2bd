"""What tests of kernels share: a seed, poisoned memory, and front.cpp on this machine."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebench.kernels._common import front, requirements
from sparsebench.kernels.dense import _decoder
from sparsebench.kernels.peers import _cusparselt, cutlass_sparse, stk

COLUMNS = 8
DOUBLE, ADD = 2, 3  # a kernel's number of arguments


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


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
    monkeypatch.setattr(_decoder, "unsupported_size", lambda *_: None)


def floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


@pytest.fixture(scope="session")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the class Front, whose launches write 2 A or, with two inputs, A + B."""

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def launch(config: int, function: int, parameters: int, extra: int) -> int:
        count = int(ctypes.cast(config, ctypes.POINTER(ctypes.c_uint32))[0]) * COLUMNS
        *inputs, out = (
            floats(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64))[0], count)
            for pointer in ctypes.cast(parameters, ctypes.POINTER(ctypes.c_uint64))[:function]
        )
        for i, values in enumerate(zip(*inputs, strict=True)):
            out[i] = 2 * values[0] if function == DOUBLE else sum(values)
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))
    def stream(device: int, out: Any) -> int:
        out[0] = 7
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    def capturing(stream: int, out: Any) -> int:
        out[0] = 0
        return 0

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        # All processes of pytest-xdist share it: compiling takes 20 s.
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        file: Path = front._built()
        assert front._built() == file  # the second time from the cache
    module = front._load(file)
    functions = launch, stream, capturing
    module.connect(*(ctypes.cast(f, ctypes.c_void_p).value for f in functions))
    module.functions = functions  # alive as long as the module
    module.Front(0)(torch.randn(1, COLUMNS))  # a thread's first call takes the path in Python
    return module.Front
