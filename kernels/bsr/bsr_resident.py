"""Linear layer with blocks of any even size and few columns: Y[m, n] = X[m, k] @ W[n, k].T.

For any NVIDIA GPU of compute capability 8.0 or newer. bsr_resident.cu is the kernel and draws it: a
tile of X with all of its columns stays in shared memory, and each warp multiplies different block
rows. Only the loads of blocks wait for the index, and a block may start at any even column. This
file chooses configurations and plans. It supports

    blocks    of 2 to 64 rows and columns, even numbers (10 x 10, 8 x 8, 20 x 50), fp16 or bf16;
              edge blocks may extend beyond W, and block rows may be empty
    sizes     k a multiple of 8 such that 16 tokens fit into shared memory (7000 on Hopper); n even;
              any m
    X         rows of any stride that is a multiple of 16 bytes
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.declarations import listed, record
from sparsebench.kernels._common.device import multiprocessors, shared_bytes_of
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_before_ampere
from sparsebench.kernels.bsr._call import LARGEST, BsrCall, bsr_engine

SIDE = 64  # largest side of a block
TOKENS, WARPS, SHARES = (16, 32, 48, 64, 96, 112, 128), (4, 8, 16), (1, 2, 4)
SUMS = 64  # fp32 per lane, at most


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens  of a tile of X
    warps   of a CTA, which share the tile
    share   warps that share a block row: 1, 2 or 4
    """

    tokens: int
    warps: int
    share: int = 1

    @property
    def rows(self) -> int:
        """Return how many block rows a CTA multiplies at a time."""
        return self.warps // self.share

    def shared_bytes(self, block: tuple[int, int], k: int) -> int:
        """Return the bytes of shared memory: the X tile, and the sums of a row's later warps."""
        sums = (self.share - 1) * self.rows * self.tokens // 16 * -(-block[0] // 8) * 512
        return self.tokens * pitch_of(k) + sums


def pitch_of(k: int) -> int:
    """Return the bytes between rows of the X tile: an odd multiple of 16."""
    return (k // 8 | 1) * 16


def words_of(block: tuple[int, int]) -> int:
    """Return the words of a packed block per lane: two for 16 of k x 8 features."""
    r, c = block
    return -(-r // 8) * -(-c // 8)


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return what is possible, by a rough model of the busiest SM's time."""
    (_, k), (_, c), m, device = w.shape, w.block, call.m, w.columns.device
    blocks, rows, sms = len(w.columns), len(w.offsets) - 1, multiprocessors(device)

    def cost(config: Config) -> float:
        groups = groups_of(config, rows, m, k, device)
        ctas = -(-groups * -(-m // config.tokens) // sms)  # of the busiest SM
        mine = blocks * ctas / groups  # blocks of all these CTAs
        chain = 600 + 145 * blocks / max(rows, 1) / config.share  # ns for a row (NOTES.md)
        loads = ctas * config.tokens * k * 2 + mine * words_of(w.block) * 128
        turns = -(-rows // (groups * config.rows))
        return loads / 66 + mine * config.tokens * c * 2 / 200 + turns * chain

    return sorted(possible(w.block, k, m, device), key=cost)


def possible(block: tuple[int, int], k: int, m: int, device: torch.device) -> Iterator[Config]:
    """Yield the configurations that fit into shared memory and registers."""
    for tokens, warps, share in product(TOKENS, WARPS, SHARES):
        config = Config(tokens, warps, share)
        fits = config.shared_bytes(block, k) <= shared_bytes_of(device)
        sums = tokens // 16 * -(-block[0] // 8) * 4
        if fits and tokens < m + 16 and sums <= (SUMS if warps < 16 else SUMS // 2):
            yield config


def groups_of(config: Config, rows: int, m: int, k: int, device: torch.device) -> int:
    """Return the number of CTAs that share the block rows of each token tile."""
    held = config.tokens * pitch_of(k) + 1024
    warps = 24 if config.tokens == 16 else 12  # that registers allow: 72 per thread, or 92
    at_once = max(1, min(shared_bytes_of(device) // held, warps // config.warps))
    room = multiprocessors(device) * at_once // -(-m // config.tokens)
    return max(1, min(room, -(-rows // config.rows)))


def plan(w: Bsr, call: BsrCall, config: Config) -> Product:
    """List the block rows. Waits for the device."""
    (n, k), rows, device, size = w.shape, len(w.offsets) - 1, w.columns.device, call.dtype.itemsize
    counts = w.offsets.diff()
    each = int(counts[0]) if bool((counts == counts[0]).all()) else -1
    order = counts.argsort(descending=True, stable=True)
    ends = {"begin": w.offsets[order], "end": w.offsets[order + 1]}
    numbered = listed(record("bsr_resident", "Row"), number=order, **ends)
    lists, shared = (w.columns, numbered), config.shared_bytes(w.block, k)
    groups, target = groups_of(config, rows, call.m, k, device), cuda.target_of(device)
    constants = constants_of(config, w.block, call.dtype)
    kernel = cuda.load("bsr_resident", "multiply_rows", constants, shared, device, target)

    @lru_cache(cuda.ADDRESSES)
    def loaded(m: int) -> cuda.Loaded:
        grid = groups * -(-m // config.tokens)
        return kernel.on(grid, 32 * config.warps)

    @lru_cache(cuda.ADDRESSES)
    def arguments(m: int, x: int, stride: int, values: int, y: int) -> cuda.Arguments:
        weights = values, w.columns.data_ptr(), numbered.data_ptr()
        sizes = rows, groups * config.rows, each
        return kernel.arguments(x, stride * size, *weights, *sizes, y, m, n, k, pitch_of(k))

    def run(x: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
        m, y = len(x), x.new_empty(len(x), n) if out is None else out
        args = arguments(m, x.data_ptr(), x.stride(0), values.data_ptr(), y.data_ptr())
        return cuda.launch(loaded(m), args, y, lists, values)

    return Product(run, kernel.code, pack, "bsr_resident")  # all configurations read the same


def pack(values: Tensor) -> Tensor:
    """Return the blocks in the order of mma's registers: [blocks, 32 lanes, words, 2].

    Lane 4 g + t has columns 2 t and 2 t + 1 of row g of each 8 x 8 part. A lane's parts are in the
    order of the products: for each 16 columns, and each 8 rows in these, the left and the right.
    """
    cuda.on_tape(complete=False)  # torch's own kernels pack
    blocks, r, c = values.shape
    padded = pad(values, (0, -c % 8, 0, -r % 8))
    high, wide = padded.shape[1] // 8, padded.shape[2] // 8
    parts = padded.view(blocks, high, 8, wide, 4, 2).permute(0, 2, 4, 3, 1, 5)
    deep = wide // 2  # parts: [blocks, 8, 4, wide, high, 2]
    pairs = parts[:, :, :, : 2 * deep].reshape(blocks, 8, 4, deep, 2, high, 2).transpose(4, 5)
    rest = parts[:, :, :, 2 * deep :]
    both = [half.flatten(3, -2).flatten(1, 2) for half in (pairs, rest)]
    packed = torch.cat(both, 2)
    return packed if blocks else packed.new_zeros(1, *packed.shape[1:])


def constants_of(config: Config, block: tuple[int, int], dtype: torch.dtype) -> cuda.Constants:
    return (
        *(("R", block[0]), ("C", block[1])),
        *(("TOKENS", config.tokens), ("WARPS", config.warps), ("SHARE", config.share)),
        ("FP16", int(dtype == torch.float16)),
    )


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    (r, c), (n, k), device = w.block, w.shape, w.columns.device
    step = cuda.TMA_ALIGNMENT // call.dtype.itemsize
    if call.dtype not in cuda.HALVES:
        return f"expected fp16 or bf16 operands of one dtype, found {call.dtype}"
    if r % 2 or c % 2 or not 0 < min(r, c) <= max(r, c) <= SIDE:
        return f"expected blocks of 2 to {SIDE} rows and columns, even numbers, found {r}x{c}"
    if k % step or n % 2:
        return f"expected columns of X a multiple of {step} and of Y of 2, found {k} and {n}"
    if device.type == "cuda" and TOKENS[0] * pitch_of(k) > (most := shared_bytes_of(device)):
        return f"expected {TOKENS[0]} rows of X in {most} bytes of shared memory, found {k} columns"
    if call.m > LARGEST - TOKENS[-1] or max(n, k, len(w.columns)) > LARGEST - SIDE:
        actual = f"{len(w.columns)} blocks, {call.m} tokens, W of {n}x{k}"
        return f"expected 1 to 2^31 tokens, and fewer columns and blocks, found {actual}"
    return None


KERNEL = bsr_engine(
    "bsr_resident", "linear", choices, plan, unsupported_before_ampere, Config, unsupported_call
)
