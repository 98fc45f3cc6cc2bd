"""Linear layer with block-sparse weights in CUDA C++ for Hopper: Y[m, n] = X[m, k] @ W[n, k].T.

bsr_wgmma.cu is the kernel and draws its pipeline: two producer warps load by TMA, and two consumer
warpgroups share each X tile. _wgmma_lists.py decides which 64 rows of W go together, and
assigns the work to CTAs. This file chooses a configuration and launches. It supports

    blocks    multiples of 64 rows and 64 columns, fp16, bf16 or fp8 (e4m3); edge blocks may extend
              beyond W, and block rows may be empty
    sizes     n a multiple of 8; k of 8, or of 16 in fp8 (TMA's rows of 16 bytes); any m
    X         rows of any stride that is a multiple of 16 bytes

In fp8, Y is bf16. The tensor cores sum in fewer bits than fp32, like torch._scaled_mm with
use_fast_accum.

It is slow for few tokens: a block row is not split along k, so n = 4096 and m = 64 make 32 items
for 132 SMs. It is also slow for single long rows (_wgmma_lists.py).

`DGRAD` is the same kernel over the transposed pattern, in 16 bits: the host transposes the index,
and wgmma reads a tile of W MN-major. No value is copied.

    W, stored by block rows      what an item multiplies: block columns
      ## .. ##                     ##        ..  ##
      .. ## ##                     ..   ->   ##  ##      dX's 64 features of a slice
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.made_once import made_once
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.work_list import WORKERS, first_of, uploaded
from sparsebench.kernels._kernel import output_dtype
from sparsebench.kernels.bsr._call import LARGEST, BsrCall, bsr_engine
from sparsebench.kernels.bsr._launch import product_of, unsupported_product
from sparsebench.kernels.bsr._wgmma_lists import NO_SLICE, SIDE, groups_of, schedule, span_of

TOKENS = 256, 128, 64
FEW_ITEMS = 132  # one per SM of an H200
THREADS = 384
RING_BYTES = 192 * 1024  # bytes of all stages
# The ring, two 64 x 64 chunks of Y for each warpgroup, and 1024 for alignment.
SHARED_BYTES = RING_BYTES + 4 * 8 * 1024 + 1024
DTYPES = *cuda.HALVES, torch.float8_e4m3fn


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens   of a work item, for each CTA: 256, 128 or 64
    cluster  CTAs that share the tiles of W, each with different tokens: 1 or 2
    """

    tokens: int
    cluster: int


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return what is worth trying: at most four.

    Items of more tokens load fewer bytes. If they are fewer than the SMs, the next smaller size
    comes first (m = 256 or 1024 and 4096 columns: up to 1.3 times as fast).
    """
    m = call.m
    tiles = [tokens for tokens in TOKENS if tokens < 2 * m or tokens == TOKENS[-1]][:2]
    if -(-m // tiles[0]) * -(-call.width // (2 * SIDE)) <= FEW_ITEMS:
        tiles.reverse()
    return [Config(tokens, ctas) for tokens in tiles for ctas in (1, 2) if ctas == 1 or m > tokens]


def plan(w: Bsr, call: BsrCall, config: Config) -> Product:
    """Pair the rows, assign the work and upload the lists. Reads the index on the host."""
    groups, device, dtype = groups_of(w, call.transposed), w.columns.device, call.dtype
    workers = multiprocessors(device) // config.cluster
    work = schedule(groups, call.m, config.tokens * config.cluster, workers)
    lists = _steps(w, call.transposed), uploaded(work.items, device)
    first, span = first_of(work.items, work.starts), span_of(w)
    constants = constants_of(config, dtype, call.transposed, span)
    kernel = cuda.load("bsr_wgmma", "multiply_blocks", constants, SHARED_BYTES, device)
    grid = (len(work.starts) - 1) * config.cluster
    (r, c), blocks, depth, width = w.block, len(w.columns), call.depth, call.width
    rows = max(blocks, 1) * r, c  # a tensor map needs a row
    kind, no_scales = output_dtype(dtype), (0, 0)

    @lru_cache(cuda.ADDRESSES)
    def arguments(
        tokens: int, x: int, strides: tuple[int, int], values: int, y: int
    ) -> cuda.Arguments:
        x_map = cuda.tensor_map(x, (tokens, depth), strides, dtype, (config.tokens, span))
        w_map = cuda.tensor_map(values, rows, (c, 1), dtype, (SIDE // config.cluster, span))
        y_map = cuda.tensor_map(y, (tokens, width), (width, 1), kind, (SIDE, SIDE))
        box = tokens % config.tokens or config.tokens, span
        tail = cuda.tensor_map(x, (tokens, depth), strides, dtype, box)
        maps, (steps, items) = (x_map, w_map, y_map, tail), (a.data_ptr() for a in lists)
        scales = (*no_scales, width, tokens) if dtype.itemsize == 1 else ()
        return kernel.arguments(*maps, *first, steps, items, tokens, *scales)

    loaded = kernel.on(grid, THREADS, early=True)
    return product_of(call, loaded, arguments, lists, blocks)


@made_once
def _steps(w: Bsr, transposed: bool) -> Tensor:
    """Return the steps of the groups, on the device."""
    return uploaded(groups_of(w, transposed).steps, w.columns.device)


def constants_of(
    config: Config, dtype: torch.dtype, transposed: bool, span: int = SIDE
) -> cuda.Constants:
    """Return the macros of bsr_wgmma.cu; `span` columns of X are a step."""
    return (
        *(("TOKENS", config.tokens), ("CLUSTER", config.cluster), ("TRANSPOSED", int(transposed))),
        *(("FP16", int(dtype == torch.float16)), ("FP8", int(dtype.itemsize == 1))),
        ("ROW_BYTES", span * dtype.itemsize),
        *(("THREADS", THREADS), ("RING_BYTES", RING_BYTES), ("WORKERS", WORKERS)),
        *(("SIDE", SIDE), ("NO_SLICE", NO_SLICE)),
    )


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    r, c = w.block
    if r % SIDE or c % SIDE or not r or not c:
        return f"expected blocks of a multiple of {SIDE} rows and columns, found {r}x{c}"
    rows = max(len(w.columns) * r, call.m)
    if c > NO_SLICE or -(-call.width // SIDE) > NO_SLICE or rows > LARGEST - r:
        actual = f"{len(w.columns)} blocks of {r}x{c}, {call.m} tokens, {call.width} columns"
        return f"expected less than 2^31 rows of blocks and of tokens, found {actual}"
    return unsupported_product(call, 0, cuda.HALVES if call.transposed else DTYPES)


KERNEL = bsr_engine(
    "bsr_wgmma",
    "linear",
    choices,
    plan,
    partial(unsupported_on_hopper, dtypes=("fp16", "bf16", "fp8")),
    Config,
    unsupported_call,
)

DGRAD = replace(KERNEL, op="linear_dgrad", unsupported=unsupported_on_hopper)
"""Input gradient in CUDA C++ for Hopper: dX = dY @ W; wgmma reads the stored blocks MN-major."""
