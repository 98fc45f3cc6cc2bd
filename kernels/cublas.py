"""Dense baseline on an NVIDIA GPU: the op's definition in torch, in the problem's dtype.

For `linear` that is one GEMM. torch reaches two libraries, cuBLAS and cuBLASLt, whose heuristics
pick different kernels for one shape: both are timed in `prepare` and the faster is kept, because
the baseline deserves its best. Accumulation is in fp32 (torch's default, in cuBLAS too).

fp32 means fp32: where torch is told to use TF32 (10 bits of mantissa), the case is refused. In a
tf32 problem each call tells torch so, and takes it back.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels._tune import fastest
from sparsebench.results.record import Problem

LIBRARIES = "cublas", "cublaslt"  # as torch.backends.cuda.preferred_blas_library names them


def supports(problem: Problem, device: torch.device) -> str | None:
    """Refuse fp32 problems in a process that trades precision for speed."""
    precision = torch.backends.cuda.matmul.fp32_precision
    if problem["dtype"] == "fp32" and precision == "tf32":
        return "expected fp32 products, found torch.backends.cuda.matmul.fp32_precision = 'tf32'"
    return None


def prepare(operands: Operands) -> Launch:
    """Keep the faster of the two libraries."""
    weights = {name: weight.to_dense() for name, weight in operands.weights.items()}
    arguments = {**weights, **operands.activations}
    tf32 = operands.problem["dtype"] == "tf32"

    def call(library: str) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with _preferred(library), tf32_products(tf32):
                return operands.definition(**arguments)

        return run

    libraries = [operands.settled["library"]] if operands.settled else LIBRARIES
    calls = [call(library) for library in libraries]
    with warnings.catch_warnings():
        # torch says once in a process that choosing the library is experimental.
        warnings.filterwarnings("ignore", message=".*preferred_blas_library is an experimental")
        best = fastest(calls, operands.device)
    choice: dict[str, Any] = {"library": libraries[best]}
    return Launch(calls[best], choice | ({"fp32_precision": "tf32"} if tf32 else {}))


@contextmanager
def tf32_products(wanted: bool) -> Iterator[None]:
    """Let torch multiply fp32 in TF32 on a GPU, if wanted; as before afterwards."""
    if not wanted:
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextmanager
def _preferred(library: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


KERNEL = Kernel(op="any", consumes="dense", device="cuda", prepare=prepare, supports=supports)
