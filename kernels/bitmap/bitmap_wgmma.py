"""Linear layer with zeros anywhere in W, for 17 to 128 tokens on Hopper: Y[m, n] = X[m, k] W.T.

bitmap_wgmma.cu is the kernel and draws its layout. It decodes records into the registers of a
warpgroup, which reads X once for 64 features. The records are those of W with pairs of columns
exchanged (`exchanged`), a copy beside the format's. This file chooses a configuration and launches.
It supports what bitmap_mma supports, in 16 bits, if a CTA can have all its rows at once.
"""

from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.errors import Unsupported
from sparsebench.formats.bitmap import COLUMNS, ROWS, Bitmap
from sparsebench.kernels._common.cuda import (
    Arguments,
    BoundKernel,
    Constants,
    Layout,
    compile_ahead,
    Loaded,
    load,
    tensor_map,
)
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.tuned_table import Sizes, Tuned, choose
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bitmap import bitmap_mma
from sparsebench.kernels.bitmap.bitmap_mma import BEYOND, SHARED_BYTES, TABLE_BYTES, at_once
from sparsebench.results.record import Problem

TOKENS = 32, 48, 64, 96, 128  # of X at a time
LEAST_TOKENS = 17  # below, X takes little of bitmap_mma's time
GROUP_ROWS = 4  # tiles of 16 rows of a warpgroup
WARPS = {32: 24, 48: 24, 64: 24, 96: 16, 128: 12}  # most that multiply, by tokens
STAGES, X_STAGES = (1, 2), (8, 6, 4, 3, 2)  # of the rings; of X, the first that fits
X_COLUMNS = 64  # of a stage of X
TRIED = 12  # configurations of a short search
STRIP, EXCHANGED = 32, "_sparsebench_exchanged"  # columns; an attribute of W
# The map of x; Weights: records, offsets, tiles, workers; y, m, n, room.
ARGUMENTS = Layout("128s", "PPiii", "P", *"iii")


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens      tokens of X at a time, one of TOKENS
    row_groups  warpgroups along the rows of W
    parts       warpgroups along k
    stages      stages of a warp's ring of records
    x_stages    stages of the ring of X of each part
    table       whether a table in shared memory turns bits into selectors, or byte permutes do
    """

    tokens: int
    row_groups: int
    parts: int
    stages: int
    x_stages: int
    table: bool = True

    split = 1

    @property
    def rows(self) -> int:
        """Return the rows of tiles of a CTA."""
        return GROUP_ROWS * self.row_groups

    @property
    def warps(self) -> int:
        """Return the warps of a CTA that multiply."""
        return self.rows * self.parts

    @property
    def threads(self) -> int:
        """Return the threads of a CTA."""
        return 32 * (self.warps + 1)

    def shared_bytes(self, room: int, m: int, size: int) -> int:
        """Return the bytes of shared memory; `room` bytes of a record, `size` of an element."""
        buffers = self.parts * self.x_stages
        barriers = -(-8 * (self.warps * self.stages + 2 * buffers) // 16) * 16
        x = buffers * self.tokens * X_COLUMNS * size
        stages = x + TABLE_BYTES + barriers + self.warps * self.stages * room + BEYOND
        sums = (self.parts - 1) * self.rows * self.tokens // 8 * 512
        return max(stages, sums)

    def constants(self, dtype: torch.dtype) -> Constants:
        """Return the macros of bitmap_wgmma.cu."""
        return (
            *(("TOKENS", self.tokens), ("ROW_GROUPS", self.row_groups), ("ROW_WARPS", self.rows)),
            *(("GROUP", 1), ("PARTS", self.parts), ("STAGES", self.stages), ("SPLIT", 1)),
            *(("X_STAGES", self.x_stages), ("TABLE", int(self.table)), ("VALUE_BYTES", 2)),
            ("FP16", int(dtype == torch.float16)),
        )


def configurations(n: int, k: int, m: int, room: int, workers: int) -> list[Config]:
    """Return the configurations to time, those with the most warps first; none if none fits."""
    tokens = next((each for each in TOKENS if each >= m), TOKENS[-1])
    rows, tiles = -(-n // ROWS), -(-k // COLUMNS)
    of_worker = -(-rows // min(workers, rows))
    groups = -(-of_worker // GROUP_ROWS)
    found = []
    for row_groups in (groups, groups + 1):
        most = min(tiles, WARPS[tokens] // (GROUP_ROWS * row_groups))
        for parts in range(most, 0, -1):
            for stages in STAGES:
                rings = (Config(tokens, row_groups, parts, stages, each) for each in X_STAGES)
                fitting = (c for c in rings if c.shared_bytes(room, m, 2) <= SHARED_BYTES)
                found += [*islice(fitting, 1)]
    return [replace(config, table=table) for config in found for table in (False, True)]


def launch(x: Tensor, w: Bitmap, config: Config) -> BoundKernel:
    """Return the kernel, bound to these operands, that computes Y [m, n]. Raises Unsupported."""
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    m, product = len(x), Product(w, config, x.device)
    product.require(m)
    y = x.new_empty(m, w.shape[0])
    args = product.arguments(m, x.data_ptr(), x.stride(0), y.data_ptr())
    return BoundKernel(product.loaded(m), args, (x, product.w.records, product.w.offsets), y)


def exchanged(w: Bitmap) -> Bitmap:
    """Return W with the pairs of columns of each strip of 32 transposed, 4 x 4; made once."""
    versions = [-1 if a.is_inference() else a._version for a in w.arrays().values()]
    before, made = w.__dict__.get(EXCHANGED, (None, None))
    if made is None or before != versions:
        dense = pad(w.to_dense(), (0, -w.shape[1] % STRIP))
        pairs = dense.view(w.shape[0], -1, 4, 4, 2).transpose(2, 3)
        made = Bitmap.from_dense(pairs.reshape(dense.shape))
        object.__setattr__(w, EXCHANGED, (versions, made))
    return cast(Bitmap, made)


class Product(bitmap_mma.Product):
    """A configuration to call: a new Y of X and of W, whose columns it exchanges."""

    def __init__(self, w: Bitmap, config: Config, device: torch.device) -> None:
        """Make the records, unless they are there, and load the kernel."""
        super().__init__(exchanged(w), config, device)
        self.columns = w.shape[1]

    def require(self, m: int) -> None:
        """Raise Unsupported if m tokens or the rows of a CTA do not fit."""
        super().require(m)
        rows = -(-self.w.shape[0] // (ROWS * self.workers))
        if m > self.config.tokens or rows > self.config.rows:
            most = f"at most {self.config.tokens} tokens and {self.config.rows} rows of tiles"
            raise Unsupported(f"expected {most}, found {m} and {rows}")

    def _loaded(self, m: int) -> Loaded:
        config, shared = self.config, self._shared(m)
        constants = config.constants(self.w.dtype)
        kernel, code = load("bitmap_wgmma", "multiply_records", constants, shared, self.device)
        return Loaded(kernel, code, self.device.index, self.workers, config.threads, shared)

    def _arguments(self, m: int, x: int, stride: int, y: int) -> Arguments:
        (n, k), w, box = self.w.shape, self.w, (m, X_COLUMNS)
        of_x = tensor_map(x, (m, self.columns), (stride, 1), w.dtype, box)
        tiles = -(-n // ROWS), -(-k // COLUMNS)
        weights = w.records.data_ptr(), w.offsets.data_ptr(), *tiles, self.workers
        return ARGUMENTS(of_x, *weights, y, m, n, self.room)


def unsupported_operands(x: Tensor, w: Bitmap) -> str | None:
    """Return why the kernel cannot read these operands, or None."""
    if x.dtype.itemsize != 2:
        return f"expected fp16 or bf16, found {x.dtype}"
    if len(x) > TOKENS[-1]:
        return f"expected at most {TOKENS[-1]} tokens, found {len(x)}"
    return bitmap_mma.unsupported_operands(x, w)


def offered(m: int, w: Bitmap, device: torch.device) -> list[Config]:
    """Return the likeliest configurations for m tokens."""
    return configurations(*w.shape, m, w.room, at_once(1, device))[:TRIED]


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Take the configuration of a table, or the fastest of a few. Raises Unsupported."""
    w, x = operands.weights["w"], operands.activations["x"]
    assert isinstance(w, Bitmap)
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    density = w.stored_bytes / (w.shape[0] * w.shape[1] * x.itemsize)
    sizes = Sizes(len(x), *w.shape, operands.problem["dtype"], None, density)
    possible: list[Config] = [] if operands.pinned else offered(len(x), w, x.device)
    if not possible and not operands.pinned:
        raise Unsupported(f"expected fewer rows of W for a CTA, found {w.shape[0]}")
    configs, by = choose("bitmap_wgmma", Config, operands, sizes, tuned, possible)
    compile_ahead("bitmap_wgmma", [config.constants(w.dtype) for config in configs])
    return fastest_launch(configs, [launch(x, w, config) for config in configs], by, x.device)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run the problem here, or None."""
    if problem["m"] > TOKENS[-1]:
        return f"expected at most {TOKENS[-1]} tokens, found {problem['m']}"
    return unsupported_on_hopper(problem, device)


KERNEL = Kernel("linear", "bitmap", "cuda", prepare, unsupported, tunes=True)
