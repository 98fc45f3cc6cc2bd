"""Kernels' own CUDA C++ as a library of this machine; cuda_on_cpu.h stands in for the device."""

import ctypes
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def built(
    source: str, constants: Iterable[tuple[str, int]], folder: Path, name: str = "kernel"
) -> Any:
    """Compile C++ with its constants as macros; return the library, loaded."""
    file, library = folder / f"{name}.cpp", folder / f"{name}.so"
    file.write_text(source)
    macros = ["-U_FORTIFY_SOURCE", *(f"-D{macro}={value}" for macro, value in constants)]
    where = ["-I", str(Path(__file__).parent), "-o", str(library), str(file)]
    command = ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", *macros, *where]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[:3000]
    return ctypes.CDLL(str(library))
