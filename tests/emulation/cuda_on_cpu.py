"""Compile the CUDA C++ of kernels into a CPU library; cuda_on_cpu.h emulates the device."""

import ctypes
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.declarations import arguments_of
from tests.tools.paths import cuda_source

FUNCTION = re.compile(
    r"^(?:template <.*>[ \n])?__device__ (?:.*\}\n|[^;{]*\{(?s:.*?)^\}\n)", re.MULTILINE
)
"""A function of device code at the top level: it ends on its line, or at a } in column 0."""

HERE = Path(__file__).parent
STANDARD = re.compile(r"^#include <.*>\n", re.MULTILINE)
PTX_HEADERS = "hopper.cuh", "mma.cuh", "wgmma.cuh"
MOST_BYTES = 227 * 1024  # of shared memory of a CTA on Hopper


def without_ptx(code: str, *replaced: str) -> str:
    """Drop the device functions that have PTX, or a name in `replaced`: stand-ins replace them."""
    dropped = re.compile(rf"\basm\b|__cvta|^[^({{]*\b(?:{'|'.join(replaced) or '$'})\(")
    code = FUNCTION.sub(lambda function: "" if dropped.search(function[0]) else function[0], code)
    assert not re.search(r"\basm[ (]", code)
    return code


def device_code(name: str, *replaced: str) -> str:
    """Return a CUDA C++ file of kernels/ with its headers and without PTX, for this machine."""

    def header(include: re.Match[str]) -> str:
        return "" if include[1] in PTX_HEADERS else device_code(include[1], *replaced)

    code = re.sub(r'#include "(.*)"\n', header, cuda_source(name).replace("#pragma once", ""))
    code = re.sub("extern __shared__.*", "#define shared dynamic_shared()", code)
    return without_ptx(code, *replaced)


def ring() -> str:
    """Return the text of ring.cuh, for a kernel whose other headers have stand-ins."""
    return re.sub("#(include|pragma) .*", "", cuda_source("ring.cuh"))


def entry_point(call: str, threads: str = "THREADS", split: str = "1", name: str = "call") -> str:
    """Return C++ of `name(args, grid, shared bytes)`, which launches a kernel by its arguments.

    `call` is C++ that calls the kernel, in which at<T>(i) is argument i.
    """
    return f"""
      namespace of_{name} {{
      static void** a;
      static size_t shared_bytes;
      template <class T> T& at(int i) {{ return *(T*)a[i]; }}
      static void run() {{ {call} }}
      extern "C" void {name}(void** args, int grid, size_t bytes) {{
        a = args, shared_bytes = bytes;
        launch(grid, {threads}, {split}, bytes, run);
      }}
      }}
    """


def run_here(
    patch: pytest.MonkeyPatch,
    build: Callable[[str, cuda.Constants], Any],
    most_bytes: int = MOST_BYTES,
) -> None:
    """Let the kernels that are loaded run on this machine.

    build       (function, constants) -> the C function that `entry_point` makes for the kernel
    most_bytes  of shared memory that a CTA may have
    """

    def load(name: str, function: str, constants: cuda.Constants, shared: int, *_: Any) -> Any:
        assert shared <= most_bytes
        layout = arguments_of(name, function, constants)
        return cuda.CudaKernel(build(function, constants), "code", layout, 0, shared)

    def enqueue(loaded: cuda.Loaded, args: cuda.Arguments) -> None:
        loaded.kernel(args[0], loaded.grid, ctypes.c_size_t(loaded.shared_bytes))

    patch.setattr(cuda, "load", load)
    patch.setattr(cuda.Loaded, "enqueue", enqueue)


def library_of(
    source: str, constants: tuple[tuple[str, int], ...], late: bool = False
) -> ctypes.CDLL:
    """Compile C++ with its constants as macros; return the library, loaded.

    late  copies land, and products read their operands, when they are waited for
    """
    library = _compiled(source, constants)
    ctypes.c_int.in_dll(library, "late").value = late
    return library


@cache
def _compiled(source: str, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    macros = [f"-D{macro}={value}" for macro, value in constants]
    common = Path(_common().name)
    with TemporaryDirectory() as folder:
        file, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        file.write_text(source)
        options = "-shared", "-Wl,-Bsymbolic", "-include", f"{common}/std.h", *macros
        _compile(*options, "-o", str(library), str(file), f"{common}/threads.o")
        return ctypes.CDLL(str(library))


@cache
def _common() -> TemporaryDirectory[str]:
    """Compile what all kernels share: the standard headers, and the emulation of threads."""
    folder = TemporaryDirectory()
    names = {name for file in HERE.glob("*.h") for name in STANDARD.findall(file.read_text())}
    header = Path(folder.name) / "std.h"
    header.write_text("".join(sorted(names)))
    _compile("-x", "c++-header", "-o", f"{header}.gch", str(header))
    _compile("-c", "-DFP16=0", "-o", f"{folder.name}/threads.o", str(HERE / "threads_on_cpu.cpp"))
    return folder


def _compile(*arguments: str) -> None:
    options = "-std=c++17", "-O1", "-w", "-fPIC", "-U_FORTIFY_SOURCE", "-I", str(HERE)
    run = subprocess.run(["g++", *options, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[:3000]
