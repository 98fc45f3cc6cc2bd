"""Linear layer with weights in CSR in CUDA C++: Y[m, n] = X[m, k] @ W[n, k].T.

csr_cuda.cu is the kernel and draws its panel; _panels.py divides the work. This file chooses a
configuration, packs the non-zeros and launches, on any NVIDIA GPU of compute capability 8.0 or
newer.

    dtype    fp32 (for tf32 too), fp16, bf16; sums in fp32
    sizes    any m, n and k; rows of any length, even empty
    X        contiguous rows of any stride

The ideas are Sputnik's (Gale, Zaharia, Young, Elsen, SC 2020): parts of a warp share a row, loads
are vectors, and rows are dealt by length. Sputnik gathers rows of X[k, m] from the caches. Here X
is [m, k], so a CTA transposes a panel of X in shared memory and gathers from there.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import BITS
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.cuda import (
    ADDRESSES,
    Arguments,
    BoundKernel,
    Constants,
    Layout,
    Loaded,
    compile_ahead,
    load,
    on_tape,
    target_of,
)
from sparsebench.kernels._common.requirements import unsupported_before_ampere
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.transposed import dgrad_of
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.tuned_table import Sizes, Tuned, choose
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.csr._panels import Shape, Work, bounds_of, parts_of, work_of
from sparsebench.results.record import Problem

DTYPES = torch.float32, torch.float16, torch.bfloat16
RESERVED_BYTES = 1024  # shared memory that an SM reserves for each CTA
VECTOR_BYTES = 16
SHARES = 2  # least pieces for each way, if rows are long enough
COLUMNS = (  # bytes of a column of the panel; threads; CTAS
    *((32, 512, 1), (128, 1024, 1), (64, 1024, 1), (32, 256, 4)),
    *((64, 512, 2), (32, 1024, 1), (256, 512, 1), (64, 256, 1)),
)
LARGEST = 2**31 - 1  # an int32
# x, its stride, m, k; packed, teams, starts, pieces, bounds; sizes; y, n.
ARGUMENTS = Layout(*"PqiiPPPPPiiiiPi")


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens   tokens of a CTA
    threads  threads of a CTA
    ctas     CTAs that an SM runs at a time
    spare    further tokens that the rows are divided for: fewer groups of rows, which may balance
             better than as many as fill the SMs
    """

    tokens: int
    threads: int
    ctas: int
    spare: int = 0

    def ways(self, dtype: torch.dtype) -> int:
        """Return how many non-zeros a warp processes at a time."""
        return 32 // min(8, self.column_bytes(dtype) // VECTOR_BYTES)

    def column_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a column of X's panel."""
        return self.tokens * dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Return the bytes of the sums of a row of W."""
        return 4 * (self.tokens + 4)


def space(dtype: torch.dtype) -> list[Config]:
    """Return the configurations to time: of 24, eight within 1 % of the best (NOTES.md)."""
    return [Config(column // dtype.itemsize, *rest) for column, *rest in COLUMNS]


def groups_of(config: Config, m: int, n: int, workers: int) -> int:
    """Return how many groups of rows fill the SMs, with a row for each warp."""
    slots = workers * config.ctas
    return max(1, min(slots // -(-m // config.tokens), -(-n // (config.threads // 32))))


def room_of(device: torch.device, ctas: int) -> int:
    """Return the bytes of shared memory per CTA if an SM runs `ctas` CTAs."""
    gpu = torch.cuda.get_device_properties(device)
    return gpu.shared_memory_per_multiprocessor // ctas - RESERVED_BYTES


def is_aligned(x: Tensor) -> bool:
    """Return whether four columns of a token can be read at a time in all rows."""
    return not (x.shape[1] % 4 or x.stride(0) % 4 or x.data_ptr() % (4 * x.itemsize))


def divided(w: Csr, m: int, config: Config, device: torch.device) -> tuple[Shape, int]:
    """Return the division of work and the bytes of shared memory of a CTA. Raises Unsupported."""
    (n, k), dtype, room = w.shape, w.values.dtype, room_of(device, config.ctas)
    column, ways, warps = config.column_bytes(dtype), config.ways(dtype), config.threads // 32
    groups, lengths = groups_of(config, m, n, multiprocessors(device)), w.offsets.diff().long()
    while True:  # until the sums of whole rows leave half of the room for the panel
        bounds = bounds_of(lengths, groups)
        left = room - (int(bounds.diff().max()) + 1) * config.row_bytes
        if 2 * left >= room or groups == n:
            break
        groups = min(n, groups + groups // 4 + 1)
    most = (left // column - 1) // 4 * 4
    if most < 4:
        raise Unsupported(
            f"expected {room - left + 5 * column} bytes of shared memory, found {room}"
        )
    chunk = -(-k // -(-k // most) // 4) * 4
    cuts = min(SHARES * warps * ways, (left - (chunk + 1) * column) // config.row_bytes)
    parts = parts_of(lengths, bounds, max(cuts, 1))
    ends = torch.cat([parts.new_zeros(1), parts.cumsum(0)])
    sums = (int(ends[bounds].diff().max()) + 1) * config.row_bytes
    shape = Shape(bounds, parts, chunk, warps, ways, max(1, 128 // column))
    return shape, (chunk + 1) * column + sums


def packed(w: Csr, work: Work, chunk: int, column: int) -> Tensor:
    """Return the steps, places in the panel and values, in the layout of csr_cuda.cu."""
    bits = w.values.view(BITS[w.values.itemsize]).int()
    places = (work.places * column).int()
    if w.values.dtype == torch.float32:
        steps = bits.new_zeros(work.size, 2)
        steps[:, 0] = chunk * column  # zeros
        steps[work.targets] = torch.stack([places, bits], 1)
        return steps
    steps = bits.new_full((work.size,), chunk * column // VECTOR_BYTES)
    steps[work.targets] = bits << 16 | places // VECTOR_BYTES
    return steps


def launch(x: Tensor, w: Csr, config: Config) -> BoundKernel:
    """Return the kernel of X @ W.T [m, n]. Raises Unsupported."""
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    product, m = Product(w, len(x), config, aligned=is_aligned(x)), len(x)
    y = x.new_empty(m, w.shape[0])
    args = product.arguments(m, x.data_ptr(), x.stride(0), y.data_ptr())
    return BoundKernel(product.loaded(m), args, (x, *product.lists), y)


class Product:
    """A configuration for up to `tokens` to call: a new Y of X and of this W (selection.Product).

    aligned  the columns of X can be read in fours
    """

    pack = order = None

    def __init__(self, w: Csr, tokens: int, config: Config, *, aligned: bool) -> None:
        """Divide the work and pack the non-zeros. Raises Unsupported."""
        (n, k), dtype, device = w.shape, w.values.dtype, w.values.device
        shape, self.shared = divided(w, tokens + config.spare, config, device)
        work = work_of(w, shape)
        if work.size > LARGEST:
            raise Unsupported(f"expected less than 2^31 non-zeros in steps, found {work.size}")
        steps = packed(w, work, shape.chunk, config.column_bytes(dtype))
        self.config, self.shape, self.dtype, self.device = config, (n, k), dtype, device
        self.aligned, bounds = aligned, shape.bounds.to(torch.int32)
        self.lists = steps, work.teams, work.starts, work.pieces, bounds
        self.groups, self.chunk = len(bounds) - 1, shape.chunk
        self.arguments = lru_cache(ADDRESSES)(self._arguments)
        self.loaded = lru_cache(ADDRESSES)(self._loaded)
        self.code = self.loaded(tokens).code

    def run(self, x: Tensor) -> Tensor:
        """Multiply; the caller checks the operands. A graph keeps the packed non-zeros alive."""
        m = x.shape[0]
        y = x.new_empty((m, self.shape[0]))
        self.loaded(m).enqueue(self.arguments(m, x.data_ptr(), x.stride(0), y.data_ptr()))
        on_tape(y, owners=(self,))
        if is_capturing(x):
            keep(self)
        return y

    def _loaded(self, m: int) -> Loaded:
        constants, target = (
            constants_of(self.config, self.dtype, self.aligned),
            target_of(self.device),
        )
        at = "csr_cuda", "multiply_rows", constants, self.shared, self.device, target
        kernel, code = load(*at)
        grid = -(-m // self.config.tokens) * self.groups
        return Loaded(kernel, code, self.device.index, grid, self.config.threads, self.shared)

    def _arguments(self, m: int, x: int, stride: int, y: int) -> Arguments:
        (n, k), chunk = self.shape, self.chunk
        sums = self.shared - chunk * self.config.column_bytes(self.dtype)
        sizes = self.groups, -(-k // chunk), chunk, sums
        return ARGUMENTS(x, stride, m, k, *(a.data_ptr() for a in self.lists), *sizes, y, n)


def constants_of(config: Config, dtype: torch.dtype, aligned: bool) -> Constants:
    return (
        ("FP32", int(dtype == torch.float32)),
        ("FP16", int(dtype == torch.float16)),
        ("TOKENS", config.tokens),
        ("THREADS", config.threads),
        ("CTAS", config.ctas),
        ("ALIGNED", int(aligned)),
    )


def unsupported_operands(x: Tensor, w: Csr) -> str | None:
    n, k = w.shape
    if x.dtype != w.values.dtype or x.dtype not in DTYPES:
        actual = f"{x.dtype} and {w.values.dtype}"
        return f"expected fp32, fp16 or bf16 operands of one dtype, found {actual}"
    if x.dim() != 2 or x.shape[1] != k:
        return f"expected activations of {k} columns, found shape {list(x.shape)}"
    if x.stride(1) != 1:
        return f"expected contiguous rows of X, found strides {list(x.stride())}"
    if min(n, k, len(x)) < 1 or max(n, k, len(x)) > LARGEST // 2:
        return f"expected 1 to 2^30 tokens, rows and columns, found {len(x)}, {n} and {k}"
    return None


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    w, x = operands.weights["w"], operands.activations["x"]
    assert isinstance(w, Csr)
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    (n, k), stored = w.shape, max(len(w.values), 1)
    sizes = Sizes(len(x), n, k, operands.problem["dtype"], None, stored / (n * k))
    configs, by = choose("csr_cuda", Config, operands, sizes, tuned, space(x.dtype))
    constants = (constants_of(config, x.dtype, is_aligned(x)) for config in configs)
    compile_ahead("csr_cuda", constants, target_of(x.device))
    candidates = [launch(x, w, config) for config in configs]
    return fastest_launch(configs, candidates, by, x.device)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    return unsupported_before_ampere(problem, device, ("fp16", "bf16", "fp32", "tf32"))


KERNEL = Kernel("linear", "csr", "cuda", prepare, unsupported, tunes=True)

DGRAD = dgrad_of(KERNEL)
"""Input gradient with weights in CSR. Entries of a tuned table are those of csr_cuda, for W.T."""
