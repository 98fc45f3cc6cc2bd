"""Compile front.cpp, once per machine for this torch and Python, with $CXX or c++, in about 25 s.

It is kept in $XDG_CACHE_HOME/sparsebench/front/KEY/. Without a compiler, which is said once, or
with SPARSEBENCH_FRONT=0, all calls take the path in Python.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sparsebench._writing import cache_folder
from sparsebench.kernels._common.driver import driver

NAME = "sparsebench_front"
SOURCE = Path(__file__).with_name("front.cpp")


def front_type() -> Any:
    """Return the class Front, or None if there is none; waits until it is compiled."""
    if os.environ.get("SPARSEBENCH_FRONT", "1") == "0":
        return None
    return compiled_type()


@cache
def compiled_type() -> Any:
    """Return the class Front, compiled once, or None with a warning that says why."""
    try:
        file = _built()
        try:
            module = _load(file)
        except ImportError:  # a damaged file
            file.unlink()
            module = _load(_built())
    except (OSError, subprocess.SubprocessError, ImportError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip().splitlines()[:1]
        warnings.warn(
            f"layers are called in Python, which takes 15 to 30 µs longer: no front.cpp: {reason}",
            stacklevel=2,
        )
        return None
    module.connect(*_functions())
    return module.Front


def _functions() -> tuple[int, int, int]:
    """Return the addresses of cuLaunchKernelEx, of torch's current stream, and of its capture."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    functions = (
        driver().cuLaunchKernelEx,
        library.aoti_torch_get_current_cuda_stream,
        driver().cuStreamIsCapturing,
    )
    launch, stream, capturing = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions)
    return launch, stream, capturing


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(NAME, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file}: expected a Python extension")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _built() -> Path:
    """Return the extension, compiled now if this torch and Python have none. Raises OSError."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise OSError("expected a C++ compiler ($CXX, c++ or g++), found none")
    code = [path.read_text("utf-8") for path in sorted(SOURCE.parent.glob("front*.?pp"))]
    versions = *code, torch.__version__, torch.__file__, sys.version, compiler
    key = hashlib.sha256("\n".join(versions).encode()).hexdigest()[:16]
    folder = cache_folder("front") / key
    file = folder / f"{NAME}.so"
    if file.exists():
        return file
    from torch.utils import cpp_extension  # imports setuptools, 0.15 s

    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    library = Path(torch.__file__).parent / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as beside:
        fresh = Path(beside) / file.name
        command = [compiler, "-O2", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(fresh)]
        command += [f"-I{include}" for include in includes]
        command += [f"-L{library}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
        fresh.replace(file)  # several processes may compile it at the same time
    return file
