"""Linear layer with zeros anywhere in W, for few tokens: Y[m, n] = X[m, k] @ W[n, k].T.

W is loaded sparse and multiplied dense by the tensor cores, because with few tokens the bytes of W
take the time. bitmap_mma.cu is the kernel and draws its pipeline and its decode. This file chooses
a configuration and plans.

    dtype     fp16, bf16, or fp8 (e4m3) with Y in bf16
    sizes     up to 256 tokens, in passes over W of up to 64; k a multiple of 8 (fp8: 16), any n
    X         row strides of a multiple of 16 bytes

Beyond 256 tokens the products take longer than reading a dense W, so a dense kernel is faster.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bitmap import COLUMNS, ROWS, Bitmap
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.unstructured import UnstructuredCall, bind
from sparsebench.kernels._kernel import output_dtype
from sparsebench.results.record import Problem

MOST_TOKENS = 256
TOKENS = 8, 16, 32, 64
# Stages of the two rings; the first that fits. Four stages of X instead of two took 1 to 4 % less,
# because warps drift.
STAGES = (3, 2), (2, 4), (2, 2), (1, 4), (1, 2), (2, 1), (1, 1)
MOST_WARPS = 28  # and one that loads X: 64 registers per thread
WARPS = {8: 28, 16: 28, 32: 15, 64: 15}  # most by tokens; more would spill registers
ALONE = 0.75  # fraction of the rate if X has one stage: 16 tokens took 1.3 to 1.4 times as long
SPLITS, FEW_ROWS = (1, 2, 4, 8), 4
DTYPES = torch.float16, torch.bfloat16, torch.float8_e4m3fn
TABLE_BYTES = 128
BEYOND = 384  # bytes that lanes may read past a stream: three words each
ALIGNMENT = 16


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens     tokens of X at a time: 8, 16, 32 or 64
    row_warps  warps along the rows of W, each with a row of tiles at a time
    parts      warps along k
    stages     stages of a warp's ring of records
    x_stages   stages of the ring of X
    table      whether a table in shared memory turns bits into selectors, or byte permutes do
    split      CTAs of a cluster, which divide k before the parts do: 1, 2, 4 or 8
    """

    tokens: int
    row_warps: int
    parts: int
    stages: int
    x_stages: int
    table: bool = True
    split: int = 1

    @property
    def warps(self) -> int:
        """Return the warps of a CTA that multiply."""
        return self.row_warps * self.parts

    def shared_bytes(self, room: int, m: int, size: int) -> int:
        """Return the bytes of shared memory.

        room  bytes of a record
        size  bytes of an element
        """
        barriers = -(-8 * (self.warps * self.stages + 2 * self.x_stages + 1) // 16) * 16
        sums = (self.parts + self.split - 2) * self.row_warps * self.tokens // 8 * 512
        x = self.x_stages * self.parts * min(m, self.tokens) * (COLUMNS + 32) * size
        rings = self.warps * self.stages * room
        return TABLE_BYTES + barriers + sums + x + rings + BEYOND


def choices(w: Bitmap, call: UnstructuredCall) -> Sequence[Config]:
    """Return what is possible, the configurations that keep most warps busy first."""
    workers = {split: at_once(split, w.records.device) for split in SPLITS}
    return configurations(*w.shape, call.m, w.room, w.dtype.itemsize, workers)


def plan(w: Bitmap, call: UnstructuredCall, config: Config) -> Product:
    """Load the kernel. Raises Unsupported if the records need more shared memory than there is."""
    (n, k), room, size, device = w.shape, w.room, w.dtype.itemsize, w.records.device
    row_tiles, owner = -(-n // ROWS), (w.records, w.offsets)
    workers = min(at_once(config.split, device), row_tiles)
    if config.split > 1 and (rows := -(-row_tiles // workers)) > config.row_warps:
        limit = f"expected {config.row_warps} rows of tiles for a cluster"
        raise Unsupported(f"{limit}, found {rows}")
    shared, threads = config.shared_bytes(room, call.m, size), 32 * (config.warps + 1)
    constants, kind = constants_of(config, w.dtype), output_dtype(w.dtype)
    kernel = cuda.load("bitmap_mma", "multiply_records", constants, shared, device)

    @lru_cache(cuda.ADDRESSES)
    def at(m: int, x: int, stride: int, y: int) -> tuple[cuda.Loaded, cuda.Arguments]:
        grid = workers * config.split * -(-m // config.tokens)
        weights = *(a.data_ptr() for a in owner), row_tiles, -(-k // COLUMNS), workers
        args = kernel.arguments(x, stride * size, m, k, *weights, y, n, room)
        return kernel.on(grid, threads), args

    def run(x: Tensor, out: Tensor | None = None) -> Tensor:
        y = x.new_empty(x.shape[0], n, dtype=kind) if out is None else out
        return cuda.launch(*at(x.shape[0], x.data_ptr(), x.stride(0), y.data_ptr()), y, owner)

    return Product(run, kernel.code)


def constants_of(config: Config, dtype: torch.dtype) -> cuda.Constants:
    return (
        *(("TOKENS", config.tokens), ("ROW_WARPS", config.row_warps), ("PARTS", config.parts)),
        *(("STAGES", config.stages), ("X_STAGES", config.x_stages)),
        *(("SPLIT", config.split), ("TABLE", int(config.table))),
        *(("VALUE_BYTES", dtype.itemsize), ("FP16", int(dtype != torch.bfloat16))),
    )


def unsupported_call(w: Bitmap, call: UnstructuredCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    (n, k), m, step = w.shape, call.m, ALIGNMENT // w.dtype.itemsize
    if w.dtype not in DTYPES:
        return f"expected fp16, bf16 or fp8, found {w.dtype}"
    if not 0 < m <= MOST_TOKENS:
        return f"expected 1 to {MOST_TOKENS} tokens, found {m}; dense is faster beyond"
    if k % step or not n or not k:
        return f"expected a multiple of {step} columns of X, found {k} and {n} rows of W"
    return None


def at_once(split: int, device: torch.device) -> int:
    """Return how many CTAs, or clusters of `split` CTAs, run at a time."""
    if split == 1 or device.type != "cuda":
        return max(multiprocessors(device) // split, 1)
    return cuda.clusters_at_once(split, 32 * (MOST_WARPS + 1), cuda.SHARED_BYTES, device)


def configurations(
    n: int, k: int, m: int, room: int, size: int, workers: Mapping[int, int]
) -> list[Config]:
    """Return the configurations to time for m tokens, those that keep most warps busy first.

    n, k     sizes of W, whose records have `room` bytes and elements `size`
    workers  CTAs, or clusters of CTAs, that run at a time, by their number of CTAs

    Warps divide k if a worker has few rows. Rings are as deep as shared memory allows. Each
    configuration is listed with the table and without. If a single CTA has at most FEW_ROWS rows of
    tiles, and so reads much of X for few rows, clusters are listed, too, alternating with CTAs.
    """
    alone, clusters = _fullest(n, k, m, room, size, workers[1], 1), []
    if -(-n // ROWS) <= FEW_ROWS * workers[1]:
        of_each = [_fullest(n, k, m, room, size, workers[s], s) for s in workers if s > 1]
        clusters = [config for rank in zip_longest(*of_each) for config in rank if config]
    mixed = [config for pair in zip_longest(alone, clusters) for config in pair if config]
    return [replace(config, table=table) for config in mixed for table in (True, False)]


def _fullest(
    n: int, k: int, m: int, room: int, size: int, workers: int, split: int
) -> list[Config]:
    """Return the configurations of one split, with the table, the fullest first."""
    tokens = next((t for t in TOKENS if t >= m), TOKENS[-1])
    rows, tiles = -(-n // ROWS), -(-k // (COLUMNS * split))  # of a CTA
    of_worker, most = -(-rows // min(workers, rows)), WARPS[tokens]
    blocks = -(-of_worker // most)
    row_warps = -(-of_worker // blocks)
    busy: dict[Config, float] = {}
    for parts in range(1, min(tiles, most // row_warps) + 1) if blocks == 1 or split == 1 else ():
        for stages, x_stages in STAGES:
            config = Config(tokens, row_warps, parts, stages, x_stages, split=split)
            if config.shared_bytes(room, m, size) <= cuda.SHARED_BYTES:
                slots = -(-tiles // parts) * parts * blocks * row_warps
                in_flight = min(config.warps * stages, MOST_WARPS)
                waits = 1 if x_stages > 1 else ALONE
                busy[config] = waits * in_flight * tiles * of_worker / slots
                break
    return sorted(busy, key=lambda config: -busy[config])


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if problem["m"] > MOST_TOKENS:
        return f"expected at most {MOST_TOKENS} tokens, found {problem['m']}; dense is faster"
    return unsupported_on_hopper(problem, device, ("fp16", "bf16", "fp8"))


KERNEL = gpu_engine(
    *("bitmap_mma", "linear", "bitmap", Config, choices, plan),
    *(unsupported, bind, unsupported_call),
)
