"""Linear layer with 2:4 sparse and dense weights in one launch by mma.sp: Y[m, n] = X[m, k] W.T.

For any NVIDIA GPU of compute capability 8.0 or newer. On Hopper spense_wgmma is faster; it reads
the same packed bytes.

    spense_mma.cu     the kernel; draws its two main loops and the registers of mma.sp
    _stream_k.py      which CTA multiplies what, and which work items are cut along k
    this file         the choice of a configuration, the launch, and what is unsupported

    dtype     fp16 or bf16. fp8 is unsupported: 8.0 has no mma.sp of fp8, and 9.0 emulates it with
              16-bit instructions
    sizes     any m; n a multiple of 2, k of 8
    X         any row stride of a multiple of 16 bytes
    W         any split
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import ROW_BYTES, ROWS, VALUE_BYTES, Spense
from sparsebench.kernels._common.cuda import (
    BoundKernel,
    Constants,
    Layout,
    Loaded,
    load,
    target_of,
    unsupported_before_ampere,
)
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.tuned_table import Sizes, Tuned, choose, multiprocessors
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.spense._stream_k import schedule, tiles_of
from sparsebench.results.record import Problem

DTYPES = torch.float16, torch.bfloat16
TOKENS = 16, 32, 64, 128
W_BYTES = VALUE_BYTES + 512  # of a stage, each row of tiles: half a tile, and half its metadata
HALF_BYTES = (
    VALUE_BYTES // 2 + 512
)  # where all tiles are sparse and their rows lie half as far apart
LEAST_KIB = 99  # of shared memory that a CTA may have on compute capability 8.6 and 8.9
RESERVED_KIB = 1  # of an SM's shared memory, for each CTA
LEAST_STAGES = 3  # fewer would not overlap copies and mma
ALIGNMENT = 16  # bytes that cp.async copies at a time
# Activations: x, bytes of a row, m, k; Weights; y, work items, starts, workspace, counters; n.
ARGUMENTS = Layout("PQii", "PPiiiiii", *"PPPPPi")
LARGEST = 2**31 - 1  # an int32


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens  of X in a work item: one of TOKENS
    rows    of W's tiles in a work item: 2 (two CTAs an SM) or, from 64 tokens on, 4 (one CTA)
    kib     of shared memory that a CTA takes, at most: as many stages as fit
    ahead   what the next products need is loaded during the ones before, across boxes
    """

    tokens: int
    rows: int = 2
    kib: int = LEAST_KIB
    ahead: bool = False

    @property
    def threads(self) -> int:
        """Return the threads of a CTA: two warps for each row of tiles."""
        return 64 * self.rows

    @property
    def ctas(self) -> int:
        """Return how many CTAs share an SM: registers are the limit."""
        return 4 // self.rows

    def w_bytes(self, dense: bool) -> int:
        """Return the bytes of a row of tiles in a stage; `dense`: if W has a dense tile."""
        return (VALUE_BYTES if dense else HALF_BYTES) if self.ahead else W_BYTES

    def stages(self, dense: bool) -> int:
        """Return how many stages the pipeline has: all that shared memory has room for."""
        return self.kib * 1024 // self._stage_bytes(dense)

    def shared_bytes(self, dense: bool) -> int:
        """Return the bytes of all stages."""
        return self.stages(dense) * self._stage_bytes(dense)

    def _stage_bytes(self, dense: bool) -> int:
        return self.tokens * ROW_BYTES + self.rows * self.w_bytes(dense)


def configurations(m: int, kib: int) -> list[Config]:
    """Return the configurations to time for m tokens, the default first: at most five.

    kib  of an SM's shared memory

    The smallest tile that holds all tokens reads W once. If none does, the largest two are timed.
    """
    fitting = [tokens for tokens in TOKENS if tokens < 2 * m or tokens == TOKENS[0]][:-3:-1]
    return [Config(tokens) for tokens in fitting] + _ahead(fitting, kib)


def space(kib: int) -> list[Config]:
    """Return the configurations of a wide search, with `kib` of an SM's shared memory: all."""
    return [Config(tokens) for tokens in TOKENS] + _ahead(TOKENS, kib)


def _ahead(several: Iterable[int], kib: int) -> list[Config]:
    """Return those that load ahead and have stages enough, whatever W is."""
    found = [
        Config(tokens, rows, kib * rows // 4 - RESERVED_KIB, ahead=True)
        for rows in (2, 4)
        for tokens in several
        if rows == 2 or tokens >= 64
    ]
    return [config for config in found if config.stages(dense=True) >= LEAST_STAGES]


def workers(device: torch.device, config: Config, shared_bytes: int) -> int:
    """Return how many CTAs the device runs at a time."""
    fitting = kib_of(device) * 1024 // (shared_bytes + RESERVED_KIB * 1024)
    return multiprocessors(device) * max(min(fitting, config.ctas), 1)


def kib_of(device: torch.device) -> int:
    """Return the KiB of shared memory of an SM."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor) // 1024


def launch(x: Tensor, w: Spense, config: Config) -> BoundKernel:
    """Return the kernel, bound to these operands, that computes Y [m, n]. Raises Unsupported."""
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    (m, k), (n, _), device, dense = x.shape, w.shape, x.device, w.dense.numel() > 0
    shared = config.shared_bytes(dense)
    grid = workers(device, config, shared)
    work = schedule(w, m, config.tokens, 1, grid, rows_of_cta=config.rows, interleaved=False)
    constants, target = constants_of(config, w.dtype, dense), target_of(device)
    kernel, code = load("spense_mma", "multiply_tiles", constants, shared, device, target)
    items, starts = (torch.from_numpy(a).to(device) for a in (work.items, work.starts))
    workspace = x.new_empty(
        max(work.slots * config.rows * ROWS * config.tokens, 1), dtype=torch.float32
    )
    counters = x.new_zeros(max(work.counters, 1), dtype=torch.int32)  # zero again after each launch
    y, lists = x.new_empty(m, n), (items, starts, workspace, counters)
    activations = x.data_ptr(), x.stride(0) * x.itemsize, m, k
    weights = w.sparse.data_ptr(), w.dense.data_ptr(), *tiles_of(w)
    args = ARGUMENTS(*activations, *weights, y.data_ptr(), *(a.data_ptr() for a in lists), n)
    loaded = Loaded(kernel, code, device.index, grid, config.threads, shared)
    return BoundKernel(loaded, args, (x, w.sparse, w.dense, *lists), y)


def constants_of(config: Config, dtype: torch.dtype, dense: bool) -> Constants:
    """Return the macros that the kernel is compiled with; `dense`: if W has a dense tile."""
    return (
        ("TOKENS", config.tokens),
        ("TILE_ROWS", config.rows),
        ("FP16", int(dtype == torch.float16)),
        ("AHEAD", int(config.ahead)),
        ("DENSE", int(dense or not config.ahead)),
        ("THREADS", config.threads),
        ("CTAS", config.ctas),
        ("STAGES", config.stages(dense)),
        ("W_BYTES", config.w_bytes(dense)),
        ("ROWS", ROWS),
        ("ROW_BYTES", ROW_BYTES),
        ("VALUE_BYTES", VALUE_BYTES),
    )


def unsupported_operands(x: Tensor, w: Spense) -> str | None:
    """Say which of the kernel's conditions fails, if any."""
    n, k = w.shape
    if x.dtype != w.dtype or x.dtype not in DTYPES:
        return f"expected fp16 or bf16 of one dtype, found {x.dtype} and {w.dtype}"
    if x.dim() != 2 or x.shape[1] != k:
        return f"expected activations of {k} columns, found shape {list(x.shape)}"
    step = ALIGNMENT // x.itemsize
    if k % step or n % 2:
        return f"expected columns of X a multiple of {step} and of Y of 2, found {k} and {n}"
    if x.stride(1) != 1 or x.stride(0) % step:
        return f"expected rows of a multiple of {step} elements, found strides {list(x.stride())}"
    if not (w.sparse.is_contiguous() and w.dense.is_contiguous()):
        return f"expected contiguous tiles, found strides {w.sparse.stride()}, {w.dense.stride()}"
    if any(beyond := [a.data_ptr() % ALIGNMENT for a in (x, w.sparse, w.dense)]):
        return f"expected X and tiles at multiples of {ALIGNMENT} bytes, found {beyond} bytes more"
    if not 0 < len(x) <= LARGEST - TOKENS[-1] or not 0 < min(n, k) <= max(n, k) <= 2**24:
        return f"expected 1 to 2^31 tokens and 1 to 2^24 columns, found {len(x)}, {n} and {k}"
    return None


def prepare(operands: Operands, *, tuned: Tuned = True, ahead: bool = True) -> Launch:
    """Take the configuration of a table, or the fastest of a few. Raises Unsupported.

    ahead  whether a search times the configurations that load ahead, too
    """
    w, x = operands.weights["w"], operands.activations["x"]
    assert isinstance(w, Spense)
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    (n, k), (rows, columns) = w.shape, w.sparse_shape
    sizes = Sizes(len(x), n, k, operands.problem["dtype"], None, 1 - rows * columns / (2 * n * k))
    kib = kib_of(x.device)
    found = space(kib) if tuned == "wide" else configurations(len(x), kib)
    searched = [config for config in found if ahead or not config.ahead]
    configs, by = choose("spense_mma", Config, operands, sizes, tuned, searched)
    candidates = [launch(x, w, config) for config in configs]
    return fastest_launch(configs, candidates, by, x.device)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Say why the kernel cannot run the problem here, or None."""
    dtype, wrong = problem["dtype"], None
    if dtype not in ("fp16", "bf16"):
        why = ": 8.0 has no mma.sp for it, 9.0 emulates it" if dtype == "fp8" else ""
        wrong = f"expected fp16 or bf16, found {dtype}{why}"
    return unsupported_before_ampere(device, wrong)


KERNEL = Kernel("linear", "spense", "cuda", prepare, unsupported, tunes=True)
