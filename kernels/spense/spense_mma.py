"""Linear layer with 2:4 sparse and dense weights in one launch by mma.sp: Y[m, n] = X[m, k] W.T.

For any NVIDIA GPU of compute capability 8.0 or newer. On Hopper spense_wgmma is faster; it reads
the same packed bytes.

    spense_mma.cu     the kernel; draws its two main loops and the registers of mma.sp
    _stream_k.py      which CTA multiplies what, and which work items are cut along k
    this file         chooses configurations and plans

    dtype     fp16 or bf16. fp8 is unsupported, because 8.0 has no mma.sp for it and 9.0 emulates
              it with 16-bit instructions
    sizes     any m; n a multiple of 2, k of 8
    X         row strides of a multiple of 16 bytes
    W         any split
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparsebench.formats.spense import ROW_BYTES, ROWS, VALUE_BYTES, Spense
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_before_ampere
from sparsebench.kernels._common.scratch import counters, workspace
from sparsebench.kernels._common.work_list import uploaded
from sparsebench.kernels.spense._call import SpenseCall, bind, unsupported_sizes
from sparsebench.kernels.spense._stream_k import schedule, tiles_of

TOKENS = 16, 32, 64, 128
W_BYTES = VALUE_BYTES + 512  # stage for a row of tiles: half a tile, and half its metadata
HALF_BYTES = VALUE_BYTES // 2 + 512  # the same if all tiles are sparse: rows are half as long
LEAST_KIB = 99  # shared memory that a CTA may have on compute capability 8.6 and 8.9
RESERVED_KIB = 1  # shared memory that an SM reserves for each CTA
LEAST_STAGES = 3  # fewer would not overlap copies and mma


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


def choices(w: Spense, call: SpenseCall) -> list[Config]:
    """Return the configurations for the call's tokens, the likeliest first."""
    return configurations(call.m, kib_of(w.sparse.device))


def configurations(m: int, kib: int) -> list[Config]:
    """Return at most six configurations for m tokens, the likeliest first.

    kib  shared memory of an SM

    The smallest tile that holds all tokens reads W once. If none does, the largest two are timed.
    """
    fitting = [tokens for tokens in TOKENS if tokens < 2 * m or tokens == TOKENS[0]][:-3:-1]
    ahead = [
        Config(tokens, rows, kib * rows // 4 - RESERVED_KIB, ahead=True)
        for rows in (2, 4)
        for tokens in fitting
        if rows == 2 or tokens >= 64
    ]
    enough = [config for config in ahead if config.stages(dense=True) >= LEAST_STAGES]
    return [*(Config(tokens) for tokens in fitting), *enough]


def workers(device: torch.device, config: Config, shared_bytes: int) -> int:
    """Return how many CTAs the device runs at a time."""
    fitting = kib_of(device) * 1024 // (shared_bytes + RESERVED_KIB * 1024)
    return multiprocessors(device) * max(min(fitting, config.ctas), 1)


def kib_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor) // 1024


def plan(w: Spense, call: SpenseCall, config: Config) -> Product:
    """Schedule the work and upload the list. Reads only the shapes and the device of W's tiles."""
    device, (n, k), tiles, dense = w.sparse.device, call.shape, tiles_of(w), w.dense.numel() > 0
    shared = config.shared_bytes(dense)
    grid = workers(device, config, shared)
    work = schedule(w, call.m, config.tokens, 1, grid, rows_of_cta=config.rows, interleaved=False)
    constants, target = constants_of(config, call.dtype, dense), cuda.target_of(device)
    kernel = cuda.load("spense_mma", "multiply_tiles", constants, shared, device, target)
    loaded = kernel.on(grid, config.threads)
    items, starts = lists = tuple(uploaded(a, device) for a in (work.items, work.starts))
    floats = work.slots * config.rows * ROWS * config.tokens

    @lru_cache(cuda.ADDRESSES)
    def arguments(m: int, x: tuple[int, int], w: tuple[int, int], *rest: int) -> cuda.Arguments:
        y, sums, counts = rest
        addresses = y, items.data_ptr(), starts.data_ptr(), sums, counts
        return kernel.arguments(*x, m, k, *w, *tiles, *addresses, n)

    def run(
        x: Tensor,
        sparse: Tensor,
        dense: Tensor,
        features: Tensor | None = None,
        tokens: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert features is None
        assert tokens is None
        y = x.new_empty(x.shape[0], n) if out is None else out
        scratch = workspace(x, floats), counters(x, work.counters)
        at = [0 if operand is None else operand.data_ptr() for operand in (y, *scratch)]
        of_x = x.data_ptr(), x.stride(0) * x.itemsize
        args = arguments(x.shape[0], of_x, (sparse.data_ptr(), dense.data_ptr()), *at)
        return cuda.launch(loaded, args, y, lists, *(part for part in scratch if part is not None))

    return Product(run, kernel.code)


def constants_of(config: Config, dtype: torch.dtype, dense: bool) -> cuda.Constants:
    """Return the macros of spense_mma.cu; `dense` if W has a dense tile."""
    return (
        *(("TOKENS", config.tokens), ("TILE_ROWS", config.rows)),
        *(("FP16", int(dtype == torch.float16)), ("AHEAD", int(config.ahead))),
        *(("DENSE", int(dense or not config.ahead)), ("THREADS", config.threads)),
        *(("CTAS", config.ctas), ("STAGES", config.stages(dense))),
        *(("W_BYTES", config.w_bytes(dense)), ("ROWS", ROWS), ("ROW_BYTES", ROW_BYTES)),
        ("VALUE_BYTES", VALUE_BYTES),
    )


def unsupported_call(w: Spense, call: SpenseCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    if call.activation is not None:
        return f"expected no activation, which spense_wgmma has, found {call.activation}"
    return unsupported_sizes(call, cuda.HALVES, 2, 2**24)


KERNEL = gpu_engine(
    *("spense_mma", "linear", "spense", Config, choices, plan),
    *(unsupported_before_ampere, bind, unsupported_call),
)
