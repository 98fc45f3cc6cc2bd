"""Linear layer with blocks of any even size and few columns: Y[m, n] = X[m, k] @ W[n, k].T.

For any NVIDIA GPU of compute capability 8.0 or newer. bsr_resident.cu is the kernel and draws it: a
tile of X with all of its columns stays in shared memory, and each warp multiplies different block
rows. Only the loads of blocks wait for the index, and a block may start at any even column. This
file chooses a configuration and launches. It supports

    blocks    of 2 to 64 rows and columns, even numbers (10 x 10, 8 x 8, 20 x 50), fp16 or bf16;
              edge blocks may extend beyond W, and block rows may be empty
    sizes     k a multiple of 8 such that 16 tokens fit into shared memory (7000 on Hopper); n even;
              any m
    X         rows of any stride that is a multiple of 16 bytes

`DGRAD` is the same kernel over W.T: the blocks are transposed when they are packed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.errors import Unsupported
from sparsebench.formats._format import offsets_of, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.requirements import unsupported_before_ampere
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.tuned_table import (
    Tuned,
    blocked,
    choose,
    multiprocessors,
    shared_bytes_of,
)
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.kernels.bsr._launch import LARGEST, kernel_of
from sparsebench.kernels.bsr._wgmma_pairs import checked

SIDE = 64  # largest side of a block
TOKENS, WARPS, SHARES = (16, 32, 48, 64, 96, 112, 128), (4, 8, 16), (1, 2, 4)
SUMS = 64  # fp32 per lane, at most
TRIED = 8  # configurations that a short search times
# x, bytes of a row; Weights: blocks, columns, order, rows, slots, each; y; m, n, k, pitch.
ARGUMENTS = cuda.Layout("P", "q", "PPPiii", "P", *"iiii")


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


def configurations(w: Bsr, m: int, device: torch.device) -> list[Config]:
    """Return what is possible for m tokens, by a rough model of the busiest SM's time."""
    (_, k), (_, c), sms = w.shape, w.block, multiprocessors(device)
    blocks, rows = len(w.values), len(w.offsets) - 1

    def cost(config: Config) -> float:
        groups = groups_of(config, rows, m, k, device)
        ctas = -(-groups * -(-m // config.tokens) // sms)  # of the busiest SM
        mine = blocks * ctas / groups  # blocks of all these CTAs
        chain = 600 + 145 * blocks / max(rows, 1) / config.share  # ns for a row (NOTES.md)
        loads = ctas * config.tokens * k * 2 + mine * words_of(w.block) * 128
        turns = -(-rows // (groups * config.rows))
        return loads / 66 + mine * config.tokens * c * 2 / 200 + turns * chain

    return sorted(possible(w, m, device), key=cost)


def possible(w: Bsr, m: int, device: torch.device) -> Iterator[Config]:
    """Yield the configurations that fit into shared memory and registers."""
    for tokens, warps, share in product(TOKENS, WARPS, SHARES):
        config = Config(tokens, warps, share)
        fits = config.shared_bytes(w.block, w.shape[1]) <= shared_bytes_of(device)
        sums = tokens // 16 * -(-w.block[0] // 8) * 4
        if fits and tokens < m + 16 and sums <= (SUMS if warps < 16 else SUMS // 2):
            yield config


def groups_of(config: Config, rows: int, m: int, k: int, device: torch.device) -> int:
    """Return the number of CTAs that share the block rows of each token tile."""
    held = config.tokens * pitch_of(k) + 1024
    warps = 24 if config.tokens == 16 else 12  # that registers allow: 72 per thread, or 92
    at_once = max(1, min(shared_bytes_of(device) // held, warps // config.warps))
    room = multiprocessors(device) * at_once // -(-m // config.tokens)
    return max(1, min(room, -(-rows // config.rows)))


def launch(x: Tensor, w: Bsr, config: Config) -> cuda.BoundKernel:
    """Return the kernel of X @ W.T [m, n]. Raises Unsupported."""
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    product, packed, m = Product(w, len(x), config), pack(w.values), len(x)
    y = x.new_empty(m, w.shape[0])
    args = product.arguments(m, x.data_ptr(), x.stride(0), packed.data_ptr(), y.data_ptr())
    return cuda.BoundKernel(product.loaded(m), args, (x, packed, *product.lists), y)


class Product:
    """A configuration for up to `tokens` to call: a new Y of X and packed W (selection.Product)."""

    order = "bsr_resident"  # every configuration reads the same

    def __init__(self, w: Bsr, tokens: int, config: Config) -> None:
        """List the block rows. Waits for the device."""
        self.config, self.shape, self.block, self.dtype = config, w.shape, w.block, w.values.dtype
        self.device, self.rows = w.columns.device, len(w.offsets) - 1
        counts = w.offsets.diff()
        self.each = int(counts[0]) if bool((counts == counts[0]).all()) else -1
        order = counts.argsort(descending=True, stable=True)
        listed = torch.stack([order, w.offsets[order], w.offsets[order + 1], order], 1).int()
        self.lists = w.columns, listed
        self.groups = groups_of(config, self.rows, tokens, w.shape[1], self.device)
        self.arguments = lru_cache(cuda.ADDRESSES)(self._arguments)
        self.loaded = lru_cache(cuda.ADDRESSES)(self._loaded)
        self.code = self.loaded(tokens).code

    def pack(self, values: Tensor) -> Tensor:
        """Return the blocks as `run` reads them."""
        cuda.on_tape(complete=False)  # torch's own kernels pack
        return pack(values)

    def run(self, x: Tensor, w: Tensor) -> Tensor:
        """Multiply; the caller checks the operands. A graph keeps the lists alive."""
        m = x.shape[0]
        y = x.new_empty(m, self.shape[0])
        addresses = x.data_ptr(), x.stride(0), w.data_ptr(), y.data_ptr()
        self.loaded(m).enqueue(self.arguments(m, *addresses))
        cuda.on_tape(y, owners=(self, w))
        if is_capturing(x):
            keep(self)
        return y

    def _loaded(self, m: int) -> cuda.Loaded:
        constants = constants_of(self.config, self.block, self.dtype)
        shared = self.config.shared_bytes(self.block, self.shape[1])
        at = constants, shared, self.device, cuda.target_of(self.device)
        kernel, code = cuda.load("bsr_resident", "multiply_rows", *at)
        grid = self.groups * -(-m // self.config.tokens)
        return cuda.Loaded(kernel, code, self.device.index, grid, 32 * self.config.warps, shared)

    def _arguments(self, m: int, x: int, stride: int, w: int, y: int) -> cuda.Arguments:
        (n, k), (columns, listed) = self.shape, self.lists
        weights = w, columns.data_ptr(), listed.data_ptr()
        sizes = self.rows, self.groups * self.config.rows, self.each
        return ARGUMENTS(x, stride * self.dtype.itemsize, *weights, *sizes, y, m, n, k, pitch_of(k))


def pack(values: Tensor) -> Tensor:
    """Return the blocks in the order of mma's registers: [blocks, 32 lanes, words, 2].

    Lane 4 g + t has columns 2 t and 2 t + 1 of row g of each 8 x 8 part. A lane's parts are in the
    order of the products: for each 16 columns, and each 8 rows in these, the left and the right.
    """
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


def turned(w: Bsr) -> Bsr:
    """Return W.T: its block rows are the block columns of W."""
    rows, columns = rows_of(w.offsets), w.columns.long()
    order = (columns * len(w.offsets) + rows).argsort()
    return Bsr(
        shape=(w.shape[1], w.shape[0]),
        offsets=offsets_of(columns[order], -(-w.shape[1] // w.block[1])),
        columns=rows[order].int(),
        values=w.values[order].transpose(1, 2).contiguous(),
    )


def constants_of(config: Config, block: tuple[int, int], dtype: torch.dtype) -> cuda.Constants:
    return (
        *(("R", block[0]), ("C", block[1])),
        *(("TOKENS", config.tokens), ("WARPS", config.warps), ("SHARE", config.share)),
        ("FP16", int(dtype == torch.float16)),
    )


def unsupported_operands(x: Tensor, w: Bsr) -> str | None:
    (n, k), (r, c), values = w.shape, w.block, w.values
    step = cuda.TMA_ALIGNMENT // x.itemsize
    if x.dtype != values.dtype or x.dtype not in cuda.HALVES:
        return f"expected fp16 or bf16 operands of one dtype, found {x.dtype} and {values.dtype}"
    if x.dim() != 2 or x.shape[1] != k:
        return f"expected activations of {k} columns, found shape {list(x.shape)}"
    if r % 2 or c % 2 or not 0 < min(r, c) <= max(r, c) <= SIDE:
        return f"expected blocks of 2 to {SIDE} rows and columns, even numbers, found {r}x{c}"
    if k % step or n % 2:
        return f"expected columns of X a multiple of {step} and of Y of 2, found {k} and {n}"
    if x.stride(1) != 1 or x.stride(0) % step or x.data_ptr() % cuda.TMA_ALIGNMENT:
        at = x.data_ptr() % cuda.TMA_ALIGNMENT
        return (
            f"expected rows of a multiple of {step} elements at a multiple of 16 bytes, "
            f"found strides {list(x.stride())} at {at} modulo 16"
        )
    if x.is_cuda and TOKENS[0] * pitch_of(k) > (most := shared_bytes_of(x.device)):
        return f"expected {TOKENS[0]} rows of X in {most} bytes of shared memory, found {k} columns"
    if not 0 < len(x) <= LARGEST - TOKENS[-1] or max(n, k, len(values)) > LARGEST - SIDE:
        actual = f"{len(values)} blocks, {len(x)} tokens, W of {n}x{k}"
        return f"expected 1 to 2^31 tokens, and fewer columns and blocks, found {actual}"
    return None


def prepare(operands: Operands, w: Bsr, x: Tensor, tuned: Tuned, *, transposed: bool) -> Launch:
    """Pack the blocks; take a table's configuration, or time a few."""
    checked(w)
    sizes = blocked(len(x), *w.shape, operands.problem["dtype"], w.block, len(w.values))
    w = turned(w) if transposed else w
    if reason := unsupported_operands(x, w):
        raise Unsupported(reason)
    name = "bsr_resident_dgrad" if transposed else "bsr_resident"
    searched = configurations(w, len(x), x.device)
    searched = searched if tuned == "wide" else searched[:TRIED]
    configs, by = choose(name, Config, operands, sizes, tuned, searched)
    constants = [constants_of(config, w.block, x.dtype) for config in configs]
    cuda.compile_ahead("bsr_resident", constants, cuda.target_of(x.device))
    candidates = [launch(x, w, config) for config in configs]
    return fastest_launch(configs, candidates, by, x.device)


KERNEL = kernel_of("linear", prepare, unsupported_before_ampere)

DGRAD = kernel_of("linear_dgrad", prepare, unsupported_before_ampere)
"""Input gradient with blocks of any even size and few rows: dX = dY @ W, with turned blocks."""
