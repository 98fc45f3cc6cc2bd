"""What the tests of the CUDA C++ kernels for Hopper share: to compile here, and to run there."""

import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from inspect import getsource
from pathlib import Path

import pytest
import torch

from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.requirements import AMPERE, HOPPER
from sparsebench.kernels._common.source_code import bare_cuda
from tests.compiling.record import in_record

HOPPERS_OWN = "arch=compute_90a,code=sm_90a"
CLEAN = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"

Test = Callable[..., object]

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER,
    reason="needs a GPU of compute capability 9.0",
)

ampere = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < AMPERE,
    reason="needs a GPU of compute capability 8.0 or newer",
)


def hopper(test: Test) -> Test:
    """Mark a test that runs on a GPU of compute capability 9.0."""
    return pytest.mark.gpu(needs_hopper(test))


def by_nvcc(test: Test) -> Test:
    """Mark a test that compiles kernels by nvcc, unless the record knows them."""
    skip = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
    return pytest.mark.compiles(skip(test))


def assert_compiles_cleanly(
    name: str,
    constants: cuda.Constants,
    folder: Path,
    allowed: str = "",
    clean: str = CLEAN,
    look: Callable[[Path, str], None] | None = None,
    target: str = HOPPERS_OWN,
) -> None:
    """Compile NAME.cu by nvcc: no spill, no warning, no serialised product (C75..).

    `look` judges the machine code and what nvcc said. What the record knows is not compiled
    (record.py).
    """
    source = cuda.source_of(name)
    if in_record(
        *(f"{source.parent.name}/{source.name}", "nvcc", target.split(",")[0], nvcc_version()),
        *(sorted(text_of(source).items()), constants, allowed, clean, look and getsource(look)),
    ):
        return
    option = "-gencode" if target.startswith("arch=") else "-arch"
    command = ["nvcc", "-std=c++17", f"{option}={target}", "-cubin"]
    command += ["-I", str(cuda.HEADERS), "-Xptxas", "-v", "-o", str(folder / "kernel.cubin")]
    command += [str(source), *(f"-D{macro}={value}" for macro, value in constants)]
    run = subprocess.run(command, capture_output=True, text=True)
    log = run.stdout + run.stderr
    assert run.returncode == 0, log
    assert clean in log, log
    rest = log.replace(allowed, "")
    assert not any(word in rest for word in ("warning", "C75", "error")), log
    if look:
        look(folder / "kernel.cubin", log)


@cache
def nvcc_version() -> str:
    """Return what nvcc says of itself."""
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout


@cache
def text_of(source: Path) -> dict[str, str]:
    """Return the code of a file and of the headers that it includes, by name, without comments."""
    code = source.read_text()
    texts = {source.name: bare_cuda(code)}
    for header in re.findall(r'#include "([^"]+)"', code):
        places = source.parent / header, cuda.HEADERS / header
        texts |= text_of(next(place for place in places if place.exists()))
    return texts
