"""Dense baseline: the op's definition compiled by torch.compile, in the problem's dtype.

In fp8, it compiles the function that cublas.py runs, with fast accumulation.

Inductor fuses the steps between the products and leaves the products to cuBLAS. In the mode
max-autotune-no-cudagraphs it also times Triton products, whose epilogues can include the next step.
`prepare` compiles for these shapes only. A definition that cannot be compiled as one graph is
unsupported, with the compiler's reason; nothing runs eagerly instead.
"""

import warnings
from contextlib import nullcontext
from functools import partial
from types import FunctionType

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense import cublas
from sparsebench.kernels.dense._gemm import in_tf32
from sparsebench.results.record import Problem

MODES = "default", "max-autotune-no-cudagraphs"


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why cublas.py cannot run an fp8 problem, or None; the definition of int8 is fp64."""
    if problem["dtype"] == "int8":
        return "expected 16 or 32 bits or fp8, found int8"
    return cublas.unsupported(problem, device) if problem["dtype"] == "fp8" else None


def prepare(operands: Operands, *, mode: str = "default") -> Launch:
    if mode not in MODES:
        raise Unsupported(f"option mode: expected one of {', '.join(MODES)}, found {mode!r}")
    weights = {name: weight.to_dense() for name, weight in operands.weights.items()}
    arguments = {**weights, **operands.activations}
    fp8 = operands.problem["dtype"] == "fp8"
    definition = cublas.in_fp8(operands, fast=True) if fp8 else operands.definition

    def eager(**arguments: Tensor) -> Tensor:
        return definition(**arguments)

    # The compiler counts how often it compiles a code object and gives up at eight, so each problem
    # gets a copy.
    code = FunctionType(eager.__code__.replace(), globals(), closure=eager.__closure__)
    compiled = torch.compile(code, fullgraph=True, dynamic=False, mode=mode)
    call = partial(compiled, **arguments)
    tf32 = operands.problem["dtype"] == "tf32"

    def run() -> Tensor:
        with in_tf32() if tf32 else nullcontext():
            out: Tensor = call()
            return out

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the compiler's code
            run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise Unsupported(f"torch.compile, mode {mode}: {reason}") from error
    return Launch(run, {"mode": mode} | ({"use_fast_accum": True} if fp8 else {}))


KERNEL = Kernel(op="any", consumes="dense", device="any", prepare=prepare, unsupported=unsupported)
