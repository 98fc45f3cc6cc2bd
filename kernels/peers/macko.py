"""Unstructured weights for one token by MACKO's authors: deltas of 4 bits, and a warp per row.

    y = W x     values of 16 bits, the number of zeros before each in 4 bits, starts of rows

A run of more than 15 zeros stores one of them. nvcc builds their code once. Their compressor takes
half a second for 14336 x 4096 on one CPU core. The kernel has no parameters to choose.

    needs   --peers DIR with a checkout (_authors.py), nvcc, an NVIDIA GPU
    dtype   fp16 with fp32 accumulation
    sizes   m 1; n padded to a multiple of 32 by empty rows, because the last warps would otherwise
            read past the row index

Source: Macko, Boza, arXiv 2511.13061; github.com/vlejd/macko_spmv, MIT licence.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.kernels._common.cuda import target_of
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _authors
from sparsebench.kernels.peers._padding import multiple_of
from sparsebench.results.record import Problem

REPOSITORY = "github.com/vlejd/macko_spmv"
MARKER = "src/macko_spmv/cuda/kernels.cuh"
ROWS = 32  # of a CTA


def prepare(operands: Operands) -> Launch:
    """Compress the weight with their code."""
    product = Product(operands)
    choice = {"stored_bytes": product.stored, "digest": product.digest}
    padding = {"n": product.rows} if product.rows != product.n else {}
    return Launch(product.run, {**choice, **padding})


class Product:
    """A compressed weight with its output."""

    def __init__(self, operands: Operands) -> None:
        """Build or load their code, and compress the weight with it."""
        folder = _authors.checkout(MARKER)
        assert folder
        self._x = operands.activations["x"]
        sources = (folder / MARKER).parent
        self.digest = _authors.digest(sources)
        target = target_of(self._x.device)
        self._code = _authors.library("macko", self.digest, target, f"-I{sources}")
        w = operands.weights["w"].to_dense().cpu().contiguous()
        (self.n, self.k), self.rows = w.shape, multiple_of(ROWS, len(w))
        whole = pad(w, (0, 0, 0, self.rows - self.n))
        self._arrays = [array.to(self._x.device) for array in compressed(self._code, whole)]
        self.stored = sum(array.nbytes for array in self._arrays)
        self._out = self._x.new_empty(1, self.rows)

    def run(self) -> Tensor:
        """Enqueue the product on the current stream."""
        pointers = map(_authors.pointer, (*self._arrays, self._x, self._out))
        stream = _authors.stream_of(self._x.device)
        _authors.require_success(self._code.multiply(stream, *pointers, self.rows, self.k))
        return self._out[:, : self.n]


def compressed(code: ctypes.CDLL, w: Tensor) -> list[Tensor]:
    """Return values and deltas, in whole groups of 8 (a lane reads one), and starts of rows."""
    values, deltas, rows = arrays = [ctypes.c_void_p() for _ in range(3)]
    padded = ctypes.c_int()
    ends = *map(ctypes.byref, arrays), ctypes.byref(padded)
    code.compress(_authors.pointer(w), *w.shape, *ends)
    copies = [
        _authors.copied(values, padded.value, torch.float16),
        _authors.copied(deltas, padded.value // 2, torch.uint8),
        _authors.copied(rows, len(w) + 1, torch.int32),
    ]
    for array in arrays:
        code.release(array)
    return copies


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the authors' kernel cannot run here, or None."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, found {device}"
    if problem["dtype"] != "fp16":
        return f"expected fp16, found {problem['dtype']}"
    if problem["m"] != 1:
        return f"expected m 1, found {problem['m']}"
    return _authors.missing(MARKER, REPOSITORY)


KERNEL = Kernel("linear", "csr", "cuda", prepare, unsupported)
