"""Linear layer with weights in CSR in CUDA C++: Y[m, n] = X[m, k] @ W[n, k].T.

csr_cuda.cu is the kernel and draws its panel; _panels.py divides the work. This file chooses a
configuration, packs the non-zeros and plans, on any NVIDIA GPU of compute capability 8.0 or
newer.

    dtype    fp32 (for tf32 too), fp16, bf16; sums in fp32
    sizes    any m, n and k; rows of any length, even empty
    X        contiguous rows of any stride

The ideas are Sputnik's (Gale, Zaharia, Young, Elsen, SC 2020): parts of a warp share a row, loads
are vectors, and rows are dealt by length. Sputnik gathers rows of X[k, m] from the caches. Here X
is [m, k], so a CTA transposes a panel of X in shared memory and gathers from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import BITS
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_before_ampere
from sparsebench.kernels._common.unstructured import UnstructuredCall, bind
from sparsebench.kernels.csr._panels import PanelLists, PanelShape, bounds_of, parts_of, work_of
from sparsebench.results.record import Problem

DTYPES = torch.float32, torch.float16, torch.bfloat16
RESERVED_BYTES = 1024  # shared memory that an SM reserves for each CTA
VECTOR_BYTES = 16
SHARES = 2  # least pieces for each way, if rows are long enough
COLUMNS = (  # bytes of a column of the panel; threads; CTAS
    *((32, 512, 1), (128, 1024, 1), (64, 1024, 1), (32, 256, 4)),
    *((64, 512, 2), (32, 1024, 1), (256, 512, 1), (64, 256, 1)),
)
# With more than MANY tokens, rows are also divided as for SPARE more, by the two configurations
# with 32 tokens and most threads.
MANY, LIKELY, SPARE = 128, (2, 4), (64, 128)
LARGEST = 2**31 - 1  # an int32


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


def choices(w: Csr, call: UnstructuredCall) -> Sequence[Config]:
    """Return the configurations to time: of 24, eight within 1 % of the best (NOTES.md)."""
    configs = [Config(column // w.values.itemsize, *rest) for column, *rest in COLUMNS]
    if call.m > MANY:
        configs += [replace(configs[i], spare=spare) for i in LIKELY for spare in SPARE]
    return configs


def plan(w: Csr, call: UnstructuredCall, config: Config) -> Product:
    """Divide the work and pack the non-zeros."""
    (n, k), dtype, device = w.shape, w.values.dtype, w.values.device
    shape, shared = divided(w, call.m + config.spare, config)
    work = work_of(w, shape)
    if work.size > LARGEST:
        raise Unsupported(f"expected less than 2^31 non-zeros in steps, found {work.size}")
    chunk, column, groups = shape.chunk, config.column_bytes(dtype), len(shape.bounds) - 1
    bounds = shape.bounds.to(torch.int32)
    lists = packed(w, work, chunk, column), work.teams, work.starts, work.pieces, bounds
    sizes = groups, -(-k // chunk), chunk, shared - chunk * column
    constants, target = constants_of(config, dtype, aligned=not k % 4), cuda.target_of(device)
    kernel = cuda.load("csr_cuda", "multiply_rows", constants, shared, device, target)

    @lru_cache(cuda.ADDRESSES)
    def at(m: int, x: int, stride: int, y: int) -> tuple[cuda.Loaded, cuda.Arguments]:
        grid = -(-m // config.tokens) * groups
        lists_at = (a.data_ptr() for a in lists)
        args = kernel.arguments(x, stride, m, k, *lists_at, *sizes, y, n)
        return kernel.on(grid, config.threads), args

    def run(x: Tensor, out: Tensor | None = None) -> Tensor:
        y = x.new_empty(x.shape[0], n) if out is None else out
        return cuda.launch(*at(x.shape[0], x.data_ptr(), x.stride(0), y.data_ptr()), y, lists)

    return Product(run, kernel.code)


def groups_of(config: Config, m: int, n: int, workers: int) -> int:
    """Return how many groups of rows fill the SMs, with a row for each warp."""
    slots = workers * config.ctas
    return max(1, min(slots // -(-m // config.tokens), -(-n // (config.threads // 32))))


def room_of(device: torch.device, ctas: int) -> int:
    """Return the bytes of shared memory per CTA if an SM runs `ctas` CTAs."""
    gpu = torch.cuda.get_device_properties(device)
    return gpu.shared_memory_per_multiprocessor // ctas - RESERVED_BYTES


def divided(w: Csr, m: int, config: Config) -> tuple[PanelShape, int]:
    """Return the division of work and the bytes of shared memory of a CTA. Raises Unsupported."""
    (n, k), dtype, device = w.shape, w.values.dtype, w.values.device
    column, ways, warps = config.column_bytes(dtype), config.ways(dtype), config.threads // 32
    room = room_of(device, config.ctas)
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
    shape = PanelShape(bounds, parts, chunk, warps, ways, max(1, 128 // column))
    return shape, (chunk + 1) * column + sums


def packed(w: Csr, work: PanelLists, chunk: int, column: int) -> Tensor:
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


def constants_of(config: Config, dtype: torch.dtype, aligned: bool) -> cuda.Constants:
    """Return the macros of csr_cuda.cu.

    aligned  it reads four columns of X at a time. Rows of X follow one another, or begin at
             multiples of 16 bytes, so only the number of columns decides
    """
    return (
        *(("FP32", int(dtype == torch.float32)), ("FP16", int(dtype == torch.float16))),
        *(("TOKENS", config.tokens), ("THREADS", config.threads), ("CTAS", config.ctas)),
        ("ALIGNED", int(aligned)),
    )


def unsupported_call(w: Csr, call: UnstructuredCall) -> str | None:
    """Return why no kernel of the family can run a call, or None."""
    (n, k), m, dtype = w.shape, call.m, w.values.dtype
    if dtype not in DTYPES:
        return f"expected fp32, fp16 or bf16 operands, found {dtype}"
    if min(n, k, m) < 1 or max(n, k, m) > LARGEST // 2:
        return f"expected 1 to 2^30 tokens, rows and columns, found {m}, {n} and {k}"
    return None


def unsupported(problem: Problem, device: torch.device) -> str | None:
    return unsupported_before_ampere(problem, device, ("fp16", "bf16", "fp32", "tf32"))


KERNEL = gpu_engine(
    *("csr_cuda", "linear", "csr", Config, choices, plan), *(unsupported, bind, unsupported_call)
)

DGRAD = replace(KERNEL, op="linear_dgrad")
"""Input gradient with weights in CSR: the linear layer of W.T, which the operator transposes."""
