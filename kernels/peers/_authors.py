"""Build and load code of other authors that is not a package, from a folder that the user names.

    sparsebench run SUITE --peers DIR          or $SPARSEBENCH_PEERS

DIR is a checkout, or a folder with checkouts of any name. A peer recognises its checkout by a file
in it. The code runs with the user's rights, like any installed package, so name only folders that
you trust. Its files are never copied, and rows have their digest.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sparsebench._writing import write_file
from sparsebench.errors import Unsupported
from sparsebench.kernels._common.cuda import target_of

NVCC = "nvcc", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"
VARIABLE = "SPARSEBENCH_PEERS"


def checkout(marker: str) -> Path | None:
    """Return the first checkout by name that has this file, or None."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = Path(named)
    return next((at for at in (folder, *sorted(folder.glob("*"))) if (at / marker).is_file()), None)


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


def build_root() -> Path:
    """Return the folder of built libraries: in $TORCH_EXTENSIONS_DIR or beside torch's own."""
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named) / "sparsebench"
    from torch.utils.cpp_extension import get_default_build_root  # takes a second

    return Path(get_default_build_root()) / "sparsebench"


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
    return library(name, version, target_of(device), f"-I{sources}"), version


def library(name: str, version: str, target: str, *flags: str) -> ctypes.CDLL:
    """Build kernels/peers/NAME.cu with nvcc and these flags, and load it. Raises Unsupported.

    The library is stored beside torch's extensions, under the digest of the file, of the `version`
    of the headers that it includes, and of the macros in the flags.
    """
    source = Path(__file__).with_name(f"{name}.cu")
    macros = "".join(flag for flag in flags if flag.startswith("-D"))
    sources = source.read_bytes() + f"{version} {target}{macros}".encode()
    file = build_root() / f"{name}-{hashlib.sha256(sources).hexdigest()[:16]}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=file.parent) as fresh:
            fresh_file = Path(fresh) / file.name
            command = [*NVCC, f"-arch={target}", *flags, str(source), "-o", str(fresh_file)]
            try:
                built = subprocess.run(
                    command, capture_output=True, check=False, encoding="utf-8", errors="replace"
                )
            except OSError as error:
                raise Unsupported(f"needs nvcc to build {name}; found {error.strerror}") from error
            if built.returncode:
                log = " ".join((built.stderr or built.stdout).split())[-200:]
                raise Unsupported(f"expected nvcc to build {name}; found {log}")
            fresh_file.replace(file)
    return ctypes.CDLL(str(file))


def copied(memory: ctypes.c_void_p, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of an array that C code allocated."""
    if not count:
        return torch.empty(0, dtype=dtype)
    data = bytearray(ctypes.string_at(memory, count * dtype.itemsize))
    return torch.frombuffer(data, dtype=dtype)


def pointer(array: torch.Tensor) -> ctypes.c_void_p:
    """Return the address of an array for C code."""
    return ctypes.c_void_p(array.data_ptr())


def stream_of(device: torch.device) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def require_success(error: int) -> None:
    """Raise RuntimeError if the authors' code returned a CUDA error."""
    if error:
        raise RuntimeError(f"the authors' kernel ended with CUDA error {error}")
