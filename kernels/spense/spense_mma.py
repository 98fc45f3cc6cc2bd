"""Linear layer with 2:4 sparse and dense weights in one launch by mma.sp: Y[m, n] = X[m, k] W.T.

For any NVIDIA GPU of compute capability 8.0 or newer. On Hopper spense_wgmma is faster; it reads
the same packed bytes.

    spense_mma.cu     the kernel; draws its two main loops and the registers of mma.sp
    _stream_k.py      which CTA multiplies what, and which work items are cut along k
    this file         chooses a configuration and launches

    dtype     fp16 or bf16. fp8 is unsupported, because 8.0 has no mma.sp for it and 9.0 emulates
              it with 16-bit instructions
    sizes     any m; n a multiple of 2, k of 8
    X         row strides of a multiple of 16 bytes
    W         any split
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import ROW_BYTES, ROWS, VALUE_BYTES, Spense
from sparsebench.kernels._common.cuda import BoundKernel, Constants, Layout, Loaded, load, target_of
from sparsebench.kernels._common.requirements import unsupported_before_ampere
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.tuned_table import Tuned, choose
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.spense import _operands
from sparsebench.kernels.spense._operands import sizes_of, weight_of
from sparsebench.kernels.spense._stream_k import schedule, tiles_of

DTYPES = torch.float16, torch.bfloat16
TOKENS = 16, 32, 64, 128
W_BYTES = VALUE_BYTES + 512  # stage for a row of tiles: half a tile, and half its metadata
HALF_BYTES = VALUE_BYTES // 2 + 512  # the same if all tiles are sparse: rows are half as long
LEAST_KIB = 99  # shared memory that a CTA may have on compute capability 8.6 and 8.9
RESERVED_KIB = 1  # shared memory that an SM reserves for each CTA
LEAST_STAGES = 3  # fewer would not overlap copies and mma
# Activations: x, bytes of a row, m, k; Weights; y, work items, starts, workspace, counters; n.
ARGUMENTS = Layout("PQii", "PPiiiiii", *"PPPPPi")


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens  tokens of X in a work item, one of TOKENS
    rows    rows of tiles of W in a work item: 2 (two CTAs per SM) or, from 64 tokens on, 4 (one)
    kib     most shared memory of a CTA, which has as many stages as fit
    ahead   whether operands are loaded during the previous products, across boxes
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
        """Return how many CTAs share an SM, which registers limit."""
        return 4 // self.rows

    def w_bytes(self, dense: bool) -> int:
        """Return the bytes of a row of tiles in a stage; `dense` if W has a dense tile."""
        return (VALUE_BYTES if dense else HALF_BYTES) if self.ahead else W_BYTES

    def stages(self, dense: bool) -> int:
        """Return the number of stages of the pipeline, as many as fit in shared memory."""
        return self.kib * 1024 // self._stage_bytes(dense)

    def shared_bytes(self, dense: bool) -> int:
        return self.stages(dense) * self._stage_bytes(dense)

    def _stage_bytes(self, dense: bool) -> int:
        return self.tokens * ROW_BYTES + self.rows * self.w_bytes(dense)


def configurations(m: int, kib: int) -> list[Config]:
    """Return at most five configurations to time for m tokens, the default first.

    kib  shared memory of an SM

    The smallest tile that holds all tokens reads W once. If none does, the largest two are timed.
    """
    fitting = [tokens for tokens in TOKENS if tokens < 2 * m or tokens == TOKENS[0]][:-3:-1]
    return [Config(tokens) for tokens in fitting] + _ahead(fitting, kib)


def space(kib: int) -> list[Config]:
    """Return all configurations, for a wide search on SMs with `kib` of shared memory."""
    return [Config(tokens) for tokens in TOKENS] + _ahead(TOKENS, kib)


def _ahead(token_tiles: Iterable[int], kib: int) -> list[Config]:
    """Return the configurations that load ahead and have enough stages for any W."""
    configs = [
        Config(tokens, rows, kib * rows // 4 - RESERVED_KIB, ahead=True)
        for rows in (2, 4)
        for tokens in token_tiles
        if rows == 2 or tokens >= 64
    ]
    return [config for config in configs if config.stages(dense=True) >= LEAST_STAGES]


def workers(device: torch.device, config: Config, shared_bytes: int) -> int:
    """Return how many CTAs the device runs at a time."""
    fitting = kib_of(device) * 1024 // (shared_bytes + RESERVED_KIB * 1024)
    return multiprocessors(device) * max(min(fitting, config.ctas), 1)


def kib_of(device: torch.device) -> int:
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
    """Return the macros of spense_mma.cu; `dense` if W has a dense tile."""
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
    limits = {"most_tokens": TOKENS[-1], "most_columns": 2**24, "y_step": 2}
    return _operands.unsupported(x, w, DTYPES, **limits)


def prepare(operands: Operands, *, tuned: Tuned = True, ahead: bool = True) -> Launch:
    """Take the configuration of a table, or the fastest of a few. Raises Unsupported.

    ahead  whether a search also times the configurations that load ahead
    """
    w, x = weight_of(operands.weights, "w"), operands.activations["x"]
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    kib = kib_of(x.device)
    possible = space(kib) if tuned == "wide" else configurations(len(x), kib)
    searched = [config for config in possible if ahead or not config.ahead]
    sizes = sizes_of(operands, x, w)
    configs, by = choose("spense_mma", Config, operands, sizes, tuned, searched)
    candidates = [launch(x, w, config) for config in configs]
    return fastest_launch(configs, candidates, by, x.device)


KERNEL = Kernel("linear", "spense", "cuda", prepare, unsupported_before_ampere, tunes=True)
