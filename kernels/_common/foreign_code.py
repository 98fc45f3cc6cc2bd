"""Find and build code of others: a checkout that the user names, and C++ that includes headers.

    sparsebench run SUITE --peers DIR          or $SPARSEBENCH_PEERS

DIR is a checkout, or a folder with checkouts of any name. A kernel recognises its checkout by a
file in it. The code runs with the user's rights, like any installed package, so name only folders
that you trust. nvcc builds each source once; the library is stored beside torch's extensions.
"""

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sparsebench.errors import Unsupported

NVCC = "nvcc", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"
VARIABLE = "SPARSEBENCH_PEERS"


def checkout(marker: str) -> Path | None:
    """Return the first checkout by name that has this file, or None."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = Path(named)
    return next((at for at in (folder, *sorted(folder.glob("*"))) if (at / marker).is_file()), None)


def build_root() -> Path:
    """Return the folder of built libraries: in $TORCH_EXTENSIONS_DIR or beside torch's own."""
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named) / "sparsebench"
    from torch.utils.cpp_extension import get_default_build_root  # takes a second

    return Path(get_default_build_root()) / "sparsebench"


def library(source: Path, version: str, target: str, *flags: str) -> ctypes.CDLL:
    """Build a .cu file with nvcc and these flags, and load it. Raises Unsupported.

    The library is stored beside torch's extensions, under the digest of the file, of the `version`
    of the headers that it includes, and of the macros in the flags.
    """
    macros = "".join(flag for flag in flags if flag.startswith("-D"))
    sources = source.read_bytes() + f"{version} {target}{macros}".encode()
    file = build_root() / f"{source.stem}-{hashlib.sha256(sources).hexdigest()[:16]}.so"
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
                raise Unsupported(
                    f"needs nvcc to build {source.stem}; found {error.strerror}"
                ) from error
            if built.returncode:
                log = " ".join((built.stderr or built.stdout).split())[-200:]
                raise Unsupported(f"expected nvcc to build {source.stem}; found {log}")
            fresh_file.replace(file)
    return ctypes.CDLL(str(file))


def pointer(array: torch.Tensor) -> ctypes.c_void_p:
    """Return the address of an array for C code."""
    return ctypes.c_void_p(array.data_ptr())


def stream_of(device: torch.device) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
