"""Code of other authors that is no package: from a folder that the user names.

    sparsebench run SUITE --peers DIR          or $SPARSEBENCH_PEERS

DIR is a checkout, or a folder with checkouts of any name. A peer knows its own by a file in it. It
runs with the user's rights, as any installed package does: name a folder that you trust. Its files
are never copied, and a row has their digest.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sparsebench.errors import Unsupported

NVCC = "nvcc", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"
VARIABLE = "SPARSEBENCH_PEERS"


def checkout(marker: str) -> Path | None:
    """Return the checkout that has this file, the first by name; None where there is none."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = Path(named)
    return next((at for at in (folder, *sorted(folder.glob("*"))) if (at / marker).is_file()), None)


def missing(marker: str, repository: str) -> str | None:
    """Say what a peer needs and does not find, or None."""
    if checkout(marker):
        return None
    found = os.environ.get(VARIABLE)
    where = f"found none with {marker} in {found}" if found else "found no --peers"
    return f"needs a checkout of {repository} below --peers DIR; {where}"


def imported(file: Path) -> Any:
    """Import a Python file of a checkout, once in a process."""
    name = f"_authors_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, file)
        assert spec
        assert spec.loader
        module = module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def digest(folder: Path) -> str:
    """Return a digest of the names and the bytes of a folder's source files."""
    kinds = (".py", ".cu", ".cuh", ".cpp", ".h")
    known = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in kinds):
        known.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return known.hexdigest()[:16]


def build_root() -> Path:
    """Return where libraries are kept: $TORCH_EXTENSIONS_DIR, or beside torch's extensions."""
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named) / "sparsebench"
    from torch.utils.cpp_extension import get_default_build_root  # takes a second, and setuptools

    return Path(get_default_build_root()) / "sparsebench"


def built_library(folder: Path, build: Callable[[], Any]) -> Any:
    """Return the extension that `build` makes of a checkout's files; build it once.

    A copy is kept under the digest of the files, of torch and of Python. It is imported as it is:
    torch's own loader asks ninja in every process, and builds again where a path has changed, as on
    another machine that the folder was carried to.
    """
    of = f"{digest(folder)} {torch.__version__} {sys.implementation.cache_tag}"
    there = build_root() / f"{folder.name}-{hashlib.sha256(of.encode()).hexdigest()[:16]}"
    for file in there.glob("*.so"):
        return _loaded(file.stem, file)
    module = build()
    built = Path(module.__file__)
    there.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(built, there / "new")
    (there / "new").replace(there / built.name)
    return module


def _loaded(name: str, file: Path) -> Any:
    """Import an extension; its name is part of its machine code."""
    if name not in sys.modules:
        spec = spec_from_file_location(name, file)
        assert spec
        assert spec.loader
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def library(name: str, folder: Path, target: str) -> ctypes.CDLL:
    """Build kernels/peers/NAME.cu with headers of a checkout, and load it; Unsupported if it fails.

    It is kept beside torch's extensions, under the digest of all that it is made from.
    """
    source = Path(__file__).with_name(f"{name}.cu")
    made_from = source.read_bytes() + f"{digest(folder)} {target}".encode()
    known = hashlib.sha256(made_from).hexdigest()[:16]
    file = build_root() / f"{name}-{known}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=file.parent) as fresh:
            made = Path(fresh) / file.name
            given = f"-arch={target}", "-I", folder, source, "-o", made
            try:
                built = subprocess.run([*NVCC, *given], capture_output=True, text=True, check=False)
            except OSError as error:
                raise Unsupported(f"needs nvcc to build {name}; found {error.strerror}") from error
            if built.returncode:
                said = " ".join((built.stderr or built.stdout).split())[-200:]
                raise Unsupported(f"expected nvcc to build {name}; found {said}")
            made.replace(file)
    return ctypes.CDLL(str(file))


def taken(memory: ctypes.c_void_p, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of an array that C code has allocated."""
    if not count:
        return torch.empty(0, dtype=dtype)
    data = bytearray(ctypes.string_at(memory, count * dtype.itemsize))
    return torch.frombuffer(data, dtype=dtype)


def pointer(array: torch.Tensor) -> ctypes.c_void_p:
    """Return where an array is, as C code takes it."""
    return ctypes.c_void_p(array.data_ptr())


def stream_of(device: torch.device) -> ctypes.c_void_p:
    """Return the current stream, as C code takes it."""
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def require_success(error: int) -> None:
    """Raise RuntimeError for an error of CUDA that the authors' code returns."""
    if error:
        raise RuntimeError(f"the authors' kernel ended with CUDA error {error}")
