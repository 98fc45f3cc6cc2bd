"""Marlin and Sparse-Marlin: the authors' library, its two functions, and its layouts of int4.

    library     marlin_cuda, which the setup of their checkout builds and installs. A peer finds it
                among the installed packages, in the folder `build` of a checkout below --peers DIR,
                or in torch's folder of extensions, and calls its C++ functions. Nothing is built
                here, and a library without these functions is another version
    codes       4 bits, -8 to 7 plus 8; 16 x 16 tiles of k x n, four of them side by side. Each of
                32 lanes owns 8 codes of a tile, as mma.sync reads them, in an int32
    scales      fp16 [k / 128, n], in groups of 64 columns, in the order of a lane's results
    workspace   int32 zeros, locks between the CTAs that add up parts of k

Source: Frantar et al., arXiv 2408.11743; github.com/IST-DASLab/Sparse-Marlin at commit c2ffa23,
Apache-2.0, marlin/marlin_cuda_kernel.cu and marlin_cuda_kernel_nm.cu.
"""

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import foreign_code
from sparsebench.kernels._common.requirements import WEIGHT_BITS, unsupported_in_4_bits
from sparsebench.kernels._common.search import fastest_choice
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.results.record import Problem
from sparsebench_authors import _builds

LIBRARY, MARKER = "marlin_cuda", "marlin/marlin_cuda_kernel_nm.cu"
LOADER = "setup (github.com/IST-DASLab/Sparse-Marlin)"
GROUP, COLUMNS, TILE = 128, 256, 16
PARALLEL = 16  # most products of 64 tokens at once, their `max_par`
AUTOMATIC = -1

DENSE = "_ZN6marlin11marlin_cudaEPKvS1_PvS2_iiiS2_iiP11CUstream_stiiii"
SPARSE = "_ZN6marlin15marlin_cuda_2_4EPKvS1_S1_PvS2_iiiS2_iiP11CUstream_stiiii"


@cache
def function(symbol: str) -> tuple[Callable[..., int], str]:
    """Return a function of the authors' library, and the library's digest. Raises Unsupported."""
    file = _builds.built_by_authors(LIBRARY, MARKER, LOADER)
    try:
        called = getattr(ctypes.CDLL(str(file)), symbol)
    except (OSError, AttributeError) as error:
        raise Unsupported(f"{file}: expected a library with {symbol}; found {error}") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    arrays = [pointer] * (5 if symbol == SPARSE else 4)
    called.argtypes = [*arrays, *[number] * 3, pointer, number, number, pointer, *[number] * 4]
    return called, hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def tiled(codes: Tensor, *, four_columns: bool) -> Tensor:
    """Return codes [k, n] in the library's order, int32 [k / 16, 2 n].

    Lane i and number r give the row of a tile: 2 (i % 4) + r % 2 + 8 (r // 2), r from 0 to 3.

    dense   word j is of tile j of four; lane i has columns i // 4 and i // 4 + 8
    sparse  a lane's words are of one tile, i // 8, and of columns 8 (i // 4 % 2) + j and + 4
    """
    lane, word, block, number = torch.meshgrid(
        *(torch.arange(size) for size in (32, 4, 2, 4)), indexing="ij"
    )
    row = 2 * (lane % 4) + number % 2 + 8 * (number // 2)
    if four_columns:
        column = TILE * (lane // 8) + 8 * (lane // 4 % 2) + 4 * block + word
    else:
        column = TILE * word + lane // 4 + 8 * block
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # nibbles: the even ones first
    places = (row * 4 * TILE + column).flatten(2)[..., order].flatten().to(codes.device)
    k, n = codes.shape
    quads = codes.view(k // TILE, TILE, n // (4 * TILE), 4 * TILE).transpose(1, 2).flatten(2)
    nibbles = quads[..., places].to(torch.int64).unflatten(2, (-1, 8))
    words: Tensor = (nibbles << 4 * torch.arange(8, device=codes.device)).sum(3)
    return words.view(k // TILE, 2 * n).to(torch.int32)


def prepared(
    operands: Operands, symbol: str, arrays: Sequence[Tensor], tiles: Sequence[tuple[int, int]]
) -> Launch:
    """Return the launch with the fastest of these tiles, unless one is pinned. Raises Unsupported.

    tiles  k and n of a CTA's tile, the authors' choice first
    """
    call, digest = function(symbol)
    x, n = operands.activations["x"], operands.weights["w"].shape[0]
    (m, k), (*weights, scales) = x.shape, arrays
    locks = torch.zeros(n // (COLUMNS // 2) * PARALLEL, dtype=torch.int32, device=x.device)
    out = x.new_empty(m, n)
    dense = len(weights) == 1
    sizes = (m, n, k) if dense else (n, m, k)
    group = GROUP if dense else GROUP // 2  # of stored weights

    def run(thread_k: int, thread_n: int) -> Tensor:
        error = call(
            *map(foreign_code.pointer, (x, *weights, out, scales)),
            *(*sizes, foreign_code.pointer(locks), group),
            *(x.device.index or 0, foreign_code.stream_of(x.device)),
            *(thread_k, thread_n, AUTOMATIC, PARALLEL),
        )
        if error:
            raise RuntimeError(f"the authors have no kernel of {thread_k} x {thread_n} for {sizes}")
        return out

    choices = [{"thread_k": k, "thread_n": n} for k, n in tiles]
    stored = sum(array.nbytes for array in arrays)
    facts = {"weight_bits": WEIGHT_BITS, "stored_bytes": stored, "digest": digest}
    return fastest_choice(run, choices, operands, **facts)


def tiles_of(m: int) -> list[tuple[int, int]]:
    """Return the tiles of the authors' kernels for m tokens: their automatic choice first."""
    return [(128, 128), (64, 256)] if m <= TILE else [(64, 256)]


def require_groups(group: int) -> None:
    """Raise Unsupported unless the weights have the library's groups."""
    if group != GROUP:
        raise Unsupported(f"expected a group of {GROUP}, found {group}")


def unsupported(problem: Problem, device: torch.device) -> str | None:
    reason = unsupported_in_4_bits(problem, device, "fp16", COLUMNS, GROUP)
    return reason or _builds.not_built(LIBRARY, MARKER, LOADER)
