"""Load code of other authors that is not a package, from a checkout below --peers DIR.

A checkout is recognised by a file in it, its marker (sparsebench/kernels/_common/foreign_code.py).
Its files are never copied, and rows have their digest.
"""

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from sparsebench._writing import write_file
from sparsebench.errors import Unsupported
from sparsebench.kernels._common.cuda import target_of
from sparsebench.kernels._common.foreign_code import VARIABLE, build_root, checkout, library


def missing(marker: str, repository: str) -> str | None:
    """Return what a peer needs and cannot find, or None."""
    if checkout(marker):
        return None
    folder = os.environ.get(VARIABLE)
    where = f"found none with {marker} in {folder}" if folder else "found no --peers"
    return f"needs a checkout of {repository} below --peers DIR; {where}"


def imported(file: Path, name: str = "") -> Any:
    """Import a file once per process: Python code, or an extension, which needs its own `name`."""
    name = name or f"_authors_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
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
    """Return a digest of the names and contents of a folder's source files."""
    kinds = (".py", ".cu", ".cuh", ".cpp", ".h")
    content = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in kinds):
        content.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return content.hexdigest()[:16]


def built_library(folder: Path, build: Callable[[], Any]) -> Any:
    """Return the extension that `build` makes of a checkout's files, and build it only once.

    A copy is stored under the digest of the files, of torch and of Python, and imported directly.
    torch's own loader runs ninja in every process, and builds again if a path has changed, such as
    after the folder was copied to another machine.
    """
    of = f"{digest(folder)} {torch.__version__} {sys.implementation.cache_tag}"
    cached = build_root() / f"{folder.name}-{hashlib.sha256(of.encode()).hexdigest()[:16]}"
    for file in cached.glob("*.so"):
        return imported(file, file.stem)
    module = build()
    built = Path(module.__file__)
    cached.mkdir(parents=True, exist_ok=True)
    write_file(cached / built.name, built.read_bytes())
    return module


def prebuilt(name: str, marker: str, variable: str = "") -> Path | None:
    """Return the library NAME.so that the authors' own code has built, or None.

    It is the file that the environment variable names, or one in the folder `build` of a checkout
    or beside the marker's file in it, or in torch's folder of extensions, or an installed module.
    """
    if named := os.environ.get(variable):
        return Path(named) if Path(named).is_file() else None
    folder, extensions = checkout(marker), build_root().parent
    file_name = f"{name}.*so"  # setuptools adds Python's version
    roots = [(folder / marker).parent, folder] if folder else []
    places = [root.glob(f"build/*/{file_name}") for root in roots]
    places += [extensions.glob(f"{name}/{file_name}"), extensions.glob(f"*/{name}/{file_name}")]
    if file := next((file for place in places for file in sorted(place)), None):
        return file
    module = find_spec(name)
    return Path(module.origin) if module and module.origin else None


def not_built(name: str, marker: str, loader: str, variable: str = "") -> str | None:
    """Return that a library of the authors is missing, or None."""
    if prebuilt(name, marker, variable):
        return None
    if named := os.environ.get(variable):
        return f"needs the authors' {name}.so; found no file {named}, which {variable} names"
    places = [f"${variable}"] if variable else []
    where = ", ".join([*places, "--peers DIR", str(build_root().parent), "installed packages"])
    return f"needs the authors' {name}.so, which their {loader} builds; found none in {where}"


def built_by_authors(name: str, marker: str, loader: str, variable: str = "") -> Path:
    """Return the library that the authors' own code has built. Raises Unsupported."""
    file = prebuilt(name, marker, variable)
    if file is None:
        raise Unsupported(str(not_built(name, marker, loader, variable)))
    return file


def compiled(name: str, marker: str, device: torch.device) -> tuple[ctypes.CDLL, str]:
    """Build NAME.cu with the headers beside the marker; return it and the headers' digest."""
    folder = checkout(marker)
    assert folder
    sources = (folder / marker).parent
    version = digest(sources)
    source = Path(__file__).with_name(f"{name}.cu")
    return library(source, version, target_of(device), f"-I{sources}"), version


def copied(memory: ctypes.c_void_p, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of an array that C code allocated."""
    if not count:
        return torch.empty(0, dtype=dtype)
    data = bytearray(ctypes.string_at(memory, count * dtype.itemsize))
    return torch.frombuffer(data, dtype=dtype)


def require_success(error: int) -> None:
    """Raise RuntimeError if the authors' code returned a CUDA error."""
    if error:
        raise RuntimeError(f"the authors' kernel ended with CUDA error {error}")
