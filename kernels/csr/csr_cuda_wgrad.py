"""Weight gradient in CSR in CUDA C++: dW = dY[m, n].T @ X[m, k] where W has non-zeros (SDDMM).

csr_cuda_wgrad.cu is the kernel and draws its items; _items.py divides them. This file chooses a
configuration and plans, on any NVIDIA GPU of compute capability 8.0 or newer. Dtypes and sizes
are those of csr_cuda. Sums over the tokens are fp32 and always added in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.unstructured import UnstructuredCall, bind
from sparsebench.kernels.csr import csr_cuda
from sparsebench.kernels.csr._items import items_of
from sparsebench.kernels.csr.csr_cuda import VECTOR_BYTES, room_of, unsupported

LANES = 8
MOST_PARTS = 16  # parts of the tokens; each writes sums, which the second kernel reads


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    vectors  vectors of 16 bytes that a lane reads from a column: 1 or 2
    threads  threads of a CTA
    ctas     CTAs that an SM runs at a time
    """

    vectors: int
    threads: int
    ctas: int

    def tokens(self, dtype: torch.dtype) -> int:
        """Return the tokens of a tile."""
        return self.vectors * LANES * VECTOR_BYTES // dtype.itemsize


# With more threads, registers would be spilled.
CONFIGS = Config(2, 640, 1), Config(2, 320, 2), Config(1, 896, 1), Config(1, 448, 2)


def choices(w: Csr, call: UnstructuredCall) -> Sequence[Config]:
    """Return all configurations."""
    return CONFIGS


def plan(w: Csr, call: UnstructuredCall, config: Config) -> Product:
    """Divide the non-zeros and the tokens. The values of the pattern are not read."""
    (n, k), dtype, device, stored = w.shape, w.values.dtype, w.values.device, len(w.values)
    tokens, room, threads = config.tokens(dtype), room_of(device, config.ctas), config.threads
    column = tokens * dtype.itemsize
    chunks = -(-k // (2 * room // 3 // column // 4 * 4))
    chunk = -(-k // chunks // 4) * 4
    slots, all_tiles = multiprocessors(device) * config.ctas, -(-call.m // tokens)
    parts = min(all_tiles, slots, MOST_PARTS)
    items = items_of(w, chunk, max(slots // parts, 1), room // column // 4 * 4 - chunk)
    shared, ranges = (chunk + items.most_rows) * column, len(items.ranges)
    if shared > room:
        raise Unsupported(f"expected {shared} bytes of shared memory, found {room}")
    tiles = -(-all_tiles // min(parts, -(-slots // ranges)))  # of a part

    constants = constants_of(config, dtype, aligned=not (n % 4 or k % 4))
    target = cuda.target_of(device)
    multiply = cuda.load("csr_cuda_wgrad", "sum_products", constants, shared, device, target)
    add = cuda.load("csr_cuda_wgrad", "add_parts", constants, 0, device, target)
    adding = add.on(-(-stored // threads), threads)
    places = (items.places * column // VECTOR_BYTES).to(torch.int16)
    lists = items.ranges, places, items.heads

    @lru_cache(cuda.ADDRESSES)
    def products(
        m: int, dy: int, dy_stride: int, x: int, x_stride: int, sums: int, values: int
    ) -> tuple[cuda.Loaded, cuda.Arguments]:
        operands = dy, dy_stride, n, x, x_stride, k, m
        of_items = items.ranges.data_ptr(), ranges, places.data_ptr(), items.heads.data_ptr()
        grid = -(-m // (tiles * tokens)) * ranges
        sizes = chunk, tiles, stored
        args = multiply.arguments(*operands, *of_items, *sizes, sums, values)
        return multiply.on(grid, threads), args

    def run(dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        m, values = x.shape[0], x.new_empty(stored) if out is None else out
        at = m, dy.data_ptr(), dy.stride(0), x.data_ptr(), x.stride(0)
        if all_tiles == 1:
            return cuda.launch(*products(*at, 0, values.data_ptr()), values, lists)
        sums = x.new_empty(-(-m // (tiles * tokens)), stored, dtype=torch.float32)
        cuda.launch(*products(*at, sums.data_ptr(), 0), sums, lists)
        parts = add.arguments(sums.data_ptr(), len(sums), stored, values.data_ptr())
        return cuda.launch(adding, parts, values, lists)

    return Product(run, multiply.code)


def constants_of(config: Config, dtype: torch.dtype, aligned: bool) -> cuda.Constants:
    of_linear = csr_cuda.Config(config.tokens(dtype), config.threads, config.ctas)
    return csr_cuda.constants_of(of_linear, dtype, aligned)


def unsupported_call(w: Csr, call: UnstructuredCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    reason = csr_cuda.unsupported_call(w, call)
    return reason or (None if len(w.values) else "expected a non-zero")


KERNEL = gpu_engine(
    *("csr_cuda_wgrad", "linear_wgrad", "csr", Config, choices, plan),
    *(unsupported, bind, unsupported_call),
)
