"""Read this kernel first: Y[m, n] = X[m, k] @ W[n, k].T in blocks of 16 x 16, packing to launch.

An engine has two parts: `choices` says how it could run a call, the likeliest way first, and `plan`
compiles one of these and returns a Product. The operator (_common/operator.py) chooses, searches
and runs the product for suites and `matmul`. Layers do not try this engine: bsr_small is faster.

    check it on a GPU    sparsebench try bsr_first m=64 n=4096 k=4096 block=16 sparsity=0.9
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_before_ampere
from sparsebench.kernels.bsr._call import BsrCall, bsr_engine

SIDE, WARPS = 16, 4
TOKENS = 8, 16, 32


@dataclass(frozen=True)
class Config:
    """Tokens that a warp multiplies: more of them share each load of W."""

    tokens: int


def choices(w: Bsr, call: BsrCall) -> list[Config]:
    """Return the tiles that are not half empty, the largest first."""
    return [Config(t) for t in reversed(TOKENS) if t < 2 * call.m or t == TOKENS[0]]


def plan(w: Bsr, call: BsrCall, config: Config) -> Product:
    """Compile the kernel; the index is read as it is stored."""
    (n, k), rows, device = w.shape, len(w.offsets) - 1, w.columns.device
    constants, target = constants_of(config, call.dtype), cuda.target_of(device)
    kernel = cuda.load("bsr_first", "multiply_first", constants, 0, device, target)

    @lru_cache(cuda.ADDRESSES)
    def loaded(m: int) -> cuda.Loaded:
        grid = -(-rows // WARPS) * -(-m // config.tokens)
        return kernel.on(grid, 32 * WARPS)

    def run(x: Tensor, packed: Tensor, out: Tensor | None = None) -> Tensor:
        m, y = len(x), x.new_empty(len(x), n) if out is None else out
        index = w.offsets.data_ptr(), w.columns.data_ptr()
        at = x.data_ptr(), x.stride(0), *index, packed.data_ptr(), y.data_ptr()
        return cuda.launch(loaded(m), kernel.arguments(*at, m, n, k, rows), y, w, packed)

    return Product(run, kernel.code, pack, "bsr_first")


def pack(values: Tensor) -> Tensor:
    """Return blocks [blocks, 16, 16] in the order of mma's registers: [blocks, 32 lanes, 8].

    Lane 4 g + t has columns 2 t and 2 t + 1 of row g, of row g + 8, and the same 8 columns on.
    """
    cuda.on_tape(complete=False)  # torch's own kernels pack
    parts = values.view(-1, 2, 8, 2, 4, 2)  # half of the rows, g, half of the columns, t, pair
    packed = parts.permute(0, 2, 4, 3, 1, 5).reshape(-1, 32, 8)
    return packed if len(packed) else values.new_zeros(1, 32, 8)


def constants_of(config: Config, dtype: torch.dtype) -> cuda.Constants:
    """Return the macros of bsr_first.cu."""
    return ("TOKENS", config.tokens), ("WARPS", WARPS), ("FP16", int(dtype == torch.float16))


def unsupported_call(w: Bsr, call: BsrCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    if w.block != (SIDE, SIDE):
        return f"expected blocks of 16x16, found {w.block[0]}x{w.block[1]}"
    if call.dtype not in cuda.HALVES or w.shape[1] % 8:
        return f"expected fp16 or bf16 and k a multiple of 8, found {call.dtype} and {w.shape[1]}"
    return None


KERNEL = bsr_engine(
    "bsr_first", "linear", choices, plan, unsupported_before_ampere, Config, unsupported_call
)
