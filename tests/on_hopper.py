"""What the tests of the CUDA C++ kernels for Hopper share: to compile here, and to run there."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.harness.check import Expected, check
from sparsebench.kernels._common import cuda
from sparsebench.kernels._kernel import DTYPES

CLEAN = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != cuda.HOPPER,
    reason="needs a GPU of compute capability 9.0",
)


def assert_compiles_cleanly(
    name: str, constants: cuda.Constants, folder: Path, allowed: str = "", clean: str = CLEAN
) -> None:
    """Compile NAME.cu by nvcc: no spill, no warning, no serialised product (C75..)."""
    command = ["nvcc", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-cubin"]
    command += [
        "-I",
        str(cuda.HEADERS),
        "-Xptxas",
        "-v",
        "-o",
        str(folder / "kernel.cubin"),
        str(cuda.source_of(name)),
    ]
    command += [f"-D{macro}={value}" for macro, value in constants]
    run = subprocess.run(command, capture_output=True, text=True)
    log = run.stdout + run.stderr
    assert run.returncode == 0, log
    assert clean in log, log
    told = log.replace(allowed, "")
    assert not any(word in told for word in ("warning", "C75", "error")), log


def moved(w: Bsr, dtype: str) -> Bsr:
    """Put a matrix on the GPU, its values in the dtype."""
    arrays = {name: array.cuda() for name, array in w.arrays().items()}
    return replace(w, **{**arrays, "values": arrays["values"].to(DTYPES[dtype])})


def assert_right(y: Tensor, x: Tensor, w: Bsr, transposed: bool, what: Any) -> None:
    """Hold X @ W.T, or X @ W if transposed, against the definition."""
    dense = w.to_dense().double()
    right = dense if transposed else dense.T
    spread = (x.double().square() @ right.square()).sqrt()
    expected = Expected(x.double() @ right, spread, x.dtype, max(w.shape))
    assert (reason := check(y, expected).reason) is None, f"{what}: {reason}"
