"""Linear layer with block-sparse weights in exact fp32, few tokens: Y[m, n] = X[m, k] @ W[n, k].T.

For any NVIDIA GPU of compute capability 8.0 or newer. bsr_fp32.cu is the kernel and draws it: each
warp multiplies steps of W with a ring of its own, and a CTA adds its warps' sums in order. This
file chooses configurations and plans. It supports

    blocks    of any size; edge blocks may extend beyond W, and block rows may be empty. A step is
              8, 16 or 32 rows by as many columns, whichever cover a block with the fewest zeros
    sizes     any m, n and k
    X         rows of any stride. X and W are copied in pieces of 4, 2 or 1 columns, whichever
              divide a block, and in X also k

Sums are in fp32, on Hopper in fp64 by the tensor cores, and always in the same order: equal
operands give equal bits.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from math import gcd

import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.declarations import listed, record
from sparsebench.kernels._common.device import multiprocessors, shared_bytes_of
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_before_ampere
from sparsebench.kernels.bsr._call import LARGEST, BsrCall, bsr_engine
from sparsebench.kernels.bsr._launch import product_of

SIDES = 32, 16, 8  # of a step
TOKENS, WARPS = (16, 32), (4, 8)
PIECE = 4  # fp32 in 16 bytes
DOUBLES = "sm_90"  # target whose tensor cores multiply fp64 16 x 8 x 16 at a time


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens  of a tile: 16 or 32
    warps   of a CTA, which share a block row's steps
    stages  of a warp's ring
    """

    tokens: int
    warps: int
    stages: int

    def shared_bytes(self, block: tuple[int, int]) -> int:
        """Return the bytes of all rings."""
        rows, depth = step_of(block)
        return self.warps * self.stages * (rows + self.tokens) * (depth + 4) * 4


def step_of(block: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of W that a warp multiplies at a time: the most, with few zeros."""
    rows, depth = (min(SIDES, key=lambda side: -(-part // side) * side) for part in block)
    return rows, depth


def tiles_of(w: Bsr, m: int, tokens: int) -> int:
    """Return the number of CTAs."""
    rows, _ = step_of(w.block)
    return (len(w.offsets) - 1) * -(-w.block[0] // rows) * -(-m // tokens)


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return what fits into the shared memory of a CTA, the likeliest first."""
    (_, depth), m, device = step_of(w.block), call.m, w.columns.device
    tokens = next((size for size in TOKENS if m <= size), TOKENS[-1])
    warps = WARPS if tiles_of(w, m, tokens) >= multiprocessors(device) else WARPS[::-1]
    configs = [Config(tokens, each, stages) for stages in (64 // depth, 2) for each in warps]
    most = shared_bytes_of(device)
    return [c for c in dict.fromkeys(configs) if c.shared_bytes(w.block) <= most]


def plan(w: Bsr, call: BsrCall, config: Config) -> Product:
    """Sort the block rows, compile and load."""
    (n, k), m, device = w.shape, call.m, w.offsets.device
    index, target = (rows_of(w), w.columns), cuda.target_of(device)
    constants = constants_of(config, w.block, k, target)
    shared = config.shared_bytes(w.block)
    kernel = cuda.load("bsr_fp32", "multiply_fp32", constants, shared, device, target)
    token_tiles, grid = -(-m // config.tokens), tiles_of(w, m, config.tokens)

    @lru_cache(cuda.ADDRESSES)
    def arguments(
        tokens: int, x: int, strides: tuple[int, int], values: int, y: int
    ) -> cuda.Arguments:
        addresses = (array.data_ptr() for array in index)
        return kernel.arguments(x, strides[0], *addresses, values, y, tokens, n, k, token_tiles)

    loaded = kernel.on(grid, 32 * config.warps)
    return product_of(call, loaded, arguments, index, len(w.columns))


def rows_of(w: Bsr) -> Tensor:
    """Return a BlockRow for each block row, int32 [rows, 4].

    The longest come first. SMs take CTAs in turn, so every second turn is reversed: an SM that had
    a long row before then gets a short one.
    """
    counts = w.offsets.diff()
    turns = counts.argsort(descending=True, stable=True).split(multiprocessors(w.offsets.device))
    order = torch.cat([turn.flip(0) if i % 2 else turn for i, turn in enumerate(turns)])
    ends = {"begin": w.offsets[order], "end": w.offsets[order + 1]}
    return listed(record("bsr_fp32", "BlockRow"), row=order, **ends)


def constants_of(config: Config, block: tuple[int, int], k: int, target: str) -> cuda.Constants:
    """Return the macros of bsr_fp32.cu. Hopper's tensor cores multiply fp64 at the rate of FMA."""
    return (
        *zip(("ROWS", "DEPTH"), step_of(block), strict=True),
        *(("R", block[0]), ("C", block[1])),
        *(("W_PIECE", gcd(block[1], PIECE)), ("X_PIECE", gcd(block[1], k, PIECE))),
        ("DOUBLE", int(target == DOUBLES and step_of(block)[1] >= 16)),
        *(("TOKENS", config.tokens), ("WARPS", config.warps), ("STAGES", config.stages)),
    )


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    (n, k), (r, c) = w.shape, w.block
    if call.dtype != torch.float32:
        return f"expected fp32 operands, found {call.dtype}"
    steps = len(w.columns) * -(-c // step_of(w.block)[1])
    tiles = tiles_of(w, call.m, TOKENS[0])
    if max(call.m, n + r, k + c, steps + SIDES[0], tiles) > LARGEST:
        actual = f"{len(w.columns)} blocks of {r}x{c} in {n}x{k}, {call.m} tokens"
        return f"expected 1 to 2^31 tokens, and fewer columns, steps and tiles, found {actual}"
    return None


KERNEL = bsr_engine(
    "bsr_fp32",
    "linear",
    choices,
    plan,
    partial(unsupported_before_ampere, dtypes=("fp32", "tf32")),
    Config,
    unsupported_call,
)
