"""Unstructured weights for one token by MACKO's authors: deltas of 4 bits, and a warp per row.

    y = W x     values of 16 bits, the number of zeros before each in 4 bits, starts of rows

If more than 15 zeros follow each other, the format stores one of them. nvcc builds their code once.
Their compressor takes half a second for 14336 x 4096 on one CPU core. The kernel has no parameters
to choose.

    needs   --peers DIR with a checkout (_builds.py), nvcc, an NVIDIA GPU
    dtype   fp16 with fp32 accumulation
    sizes   m 1; n padded to a multiple of 32 by empty rows, because the last warps would otherwise
            read past the row index

Source: Macko, Boza, arXiv 2511.13061; github.com/vlejd/macko_spmv, MIT licence.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.kernels._common import foreign_code
from sparsebench.kernels._common.padding import multiple_of
from sparsebench.kernels._common.requirements import unsupported_dtype
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem
from sparsebench_authors import _builds

REPOSITORY = "github.com/vlejd/macko_spmv"
MARKER = "src/macko_spmv/cuda/kernels.cuh"
ROWS = 32  # rows of a CTA


def prepare(operands: Operands) -> Launch:
    """Build or load the authors' code, and compress the weight with it."""
    x = operands.activations["x"]
    code, digest = _builds.compiled("macko", MARKER, x.device)
    w = operands.weights["w"].to_dense().cpu().contiguous()
    (n, k), rows = w.shape, multiple_of(ROWS, len(w))
    arrays = [array.to(x.device) for array in compressed(code, pad(w, (0, 0, 0, rows - n)))]
    out = x.new_empty(1, rows)

    def run() -> Tensor:
        pointers = map(foreign_code.pointer, (*arrays, x, out))
        stream = foreign_code.stream_of(x.device)
        _builds.require_success(code.multiply(stream, *pointers, rows, k))
        return out[:, :n]

    choice = {"stored_bytes": sum(array.nbytes for array in arrays), "digest": digest}
    return Launch(run, {**choice, **({"n": rows} if rows != n else {})})


def compressed(code: ctypes.CDLL, w: Tensor) -> list[Tensor]:
    """Return values and deltas, in whole groups of 8 (a lane reads one), and starts of rows."""
    values, deltas, rows = arrays = [ctypes.c_void_p() for _ in range(3)]
    padded = ctypes.c_int()
    ends = *map(ctypes.byref, arrays), ctypes.byref(padded)
    code.compress(foreign_code.pointer(w), *w.shape, *ends)
    copies = [
        _builds.copied(values, padded.value, torch.float16),
        _builds.copied(deltas, padded.value // 2, torch.uint8),
        _builds.copied(rows, len(w) + 1, torch.int32),
    ]
    for array in arrays:
        code.release(array)
    return copies


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, found {device}"
    if problem["m"] != 1:
        return f"expected m 1, found {problem['m']}"
    return unsupported_dtype(problem, "fp16") or _builds.missing(MARKER, REPOSITORY)


KERNEL = Kernel("linear", "csr", "cuda", prepare, unsupported)
