"""Weight gradient in CSR in CUDA C++: dW = dY[m, n].T @ X[m, k] where W has non-zeros (SDDMM).

csr_cuda_wgrad.cu is the kernel and draws its items; _items.py divides them. This file chooses a
configuration and launches, on any NVIDIA GPU of compute capability 8.0 or newer. Dtypes and sizes
are those of csr_cuda. Sums over the tokens are fp32 and always added in the same order.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.cuda import BoundKernel, Constants, Layout, Loaded, load, target_of
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.tuned_table import Sizes, Tuned, choose
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.csr import csr_cuda
from sparsebench.kernels.csr._items import items_of
from sparsebench.kernels.csr.csr_cuda import (
    DTYPES,
    LARGEST,
    VECTOR_BYTES,
    is_aligned,
    room_of,
    unsupported,
)

LANES = 8
MOST_PARTS = 16  # parts of the tokens; each writes sums, which the second kernel reads
# dy, its stride, n; x, its stride, k, m; ranges, their count; places, heads; chunk, tiles, nnz;
# sums, values.
PRODUCTS = Layout(*"PqiPqiiPiPPiiiPP")
ADDITION = Layout(*"PiiP")  # sums, parts, non-zeros, values


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


def space() -> list[Config]:
    """Return all configurations: with more threads, registers would be spilled."""
    return [Config(2, 640, 1), Config(2, 320, 2), Config(1, 896, 1), Config(1, 448, 2)]


@dataclass(frozen=True)
class Gradient:
    """The kernel of the products, and the kernel that adds parts of the tokens, if there are any.

    Each call returns dW in the layout of the pattern.
    """

    products: BoundKernel
    addition: BoundKernel | None
    pattern: Csr

    def __call__(self) -> Csr:
        values = self.products()
        if self.addition:
            values = self.addition()
        return replace(self.pattern, values=values)

    @property
    def code(self) -> str:
        return self.products.code


def launch(dy: Tensor, x: Tensor, w: Csr, config: Config) -> Gradient:
    """Return the kernels of dW's values [nnz]. The values of the pattern are not read."""
    if reason := unsupported_operands(dy, x, w):
        raise Unsupported(reason)
    (m, n), (_, k), dtype, device = dy.shape, x.shape, x.dtype, x.device
    tokens, stored = config.tokens(dtype), len(w.values)
    column, room = tokens * dtype.itemsize, room_of(device, config.ctas)
    chunks = -(-k // (2 * room // 3 // column // 4 * 4))
    chunk = -(-k // chunks // 4) * 4
    slots, all_tiles = multiprocessors(device) * config.ctas, -(-m // tokens)
    parts = min(all_tiles, slots, MOST_PARTS)
    items = items_of(w, chunk, max(slots // parts, 1), room // column // 4 * 4 - chunk)
    shared = (chunk + items.most_rows) * column
    if shared > room:
        raise Unsupported(f"expected {shared} bytes of shared memory, found {room}")
    tiles = -(-all_tiles // min(parts, -(-slots // len(items.ranges))))
    parts = -(-all_tiles // tiles)

    constants = constants_of(config, dtype, is_aligned(x) and is_aligned(dy))
    target = target_of(device)
    multiply, code = load("csr_cuda_wgrad", "sum_products", constants, shared, device, target)
    add, _ = load("csr_cuda_wgrad", "add_parts", constants, 0, device, target)
    places = (items.places * column // VECTOR_BYTES).to(torch.int16)
    values, direct = x.new_empty(stored), all_tiles == 1
    sums = x.new_empty(0 if direct else parts, stored, dtype=torch.float32)
    lists = items.ranges, places, items.heads
    products = PRODUCTS(
        *(dy.data_ptr(), dy.stride(0), n, x.data_ptr(), x.stride(0), k, m),
        *(lists[0].data_ptr(), len(lists[0]), places.data_ptr(), items.heads.data_ptr()),
        *(chunk, tiles, stored, sums.data_ptr(), values.data_ptr() if direct else 0),
    )
    grid, threads = parts * len(items.ranges), config.threads
    loaded = Loaded(multiply, code, device.index, grid, threads, shared)
    multiplies = BoundKernel(loaded, products, (dy, x, sums, *lists), values if direct else sums)
    if direct:
        return Gradient(multiplies, None, w)
    adding = Loaded(add, code, device.index, -(-stored // threads), threads, 0)
    addition = ADDITION(sums.data_ptr(), parts, stored, values.data_ptr())
    return Gradient(multiplies, BoundKernel(adding, addition, (sums,), values), w)


def constants_of(config: Config, dtype: torch.dtype, aligned: bool) -> Constants:
    of_linear = csr_cuda.Config(config.tokens(dtype), config.threads, config.ctas)
    return csr_cuda.constants_of(of_linear, dtype, aligned)


def unsupported_operands(dy: Tensor, x: Tensor, w: Csr) -> str | None:
    (n, k), dtype = w.shape, w.values.dtype
    if len({dy.dtype, x.dtype, dtype}) > 1 or dtype not in DTYPES:
        actual = f"{dy.dtype}, {x.dtype} and a pattern of {dtype}"
        return f"expected fp32, fp16 or bf16 operands of one dtype, found {actual}"
    if dy.dim() != 2 or x.dim() != 2 or len(dy) != len(x) or (dy.shape[1], x.shape[1]) != (n, k):
        return f"expected dY [m, {n}] and X [m, {k}], found {list(dy.shape)} and {list(x.shape)}"
    if dy.stride(1) != 1 or x.stride(1) != 1:
        return f"expected contiguous rows, found strides {dy.stride()} and {x.stride()}"
    if min(n, k, len(x), len(w.values)) < 1 or max(n, k, len(x)) > LARGEST // 2:
        actual = f"{len(x)} tokens, {n} rows, {k} columns and {len(w.values)} non-zeros"
        return f"expected 1 to 2^30 tokens, rows and columns and a non-zero, found {actual}"
    return None


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    w, dy, x = operands.pattern, operands.activations["dy"], operands.activations["x"]
    assert isinstance(w, Csr)
    if reason := unsupported_operands(dy, x, w):
        raise Unsupported(reason)
    (n, k), stored = w.shape, len(w.values)
    sizes = Sizes(len(x), n, k, operands.problem["dtype"], None, stored / (n * k))
    configs, by = choose("csr_cuda_wgrad", Config, operands, sizes, tuned, space())
    candidates = [launch(dy, x, w, config) for config in configs]
    return fastest_launch(configs, candidates, by, x.device)


KERNEL = Kernel("linear_wgrad", "csr", "cuda", prepare, unsupported, tunes=True)
