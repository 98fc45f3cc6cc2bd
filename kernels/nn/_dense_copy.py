"""A dense product with a copy of a frozen weight, which a search times beside our kernels.

    bitmap  any layer: torch's product, or that of X padded to whole tiles, because cuBLAS can be
            slower for fewer tokens (NOTES.md); or a direct call of cuBLASLt, for which a search
            times what the dense baseline times (dense/_gemm.py)
    csr     the same, unless the copy has more than MOST_BYTES and COPY times the bytes of W
    blocks  small layers, in which launches and loads of X take more time than W: torch's product,
            or a direct call

The copy stays beside the packed weight. It is stored row by row, or column by column, which cuBLAS
often prefers. That of blocks has MOST_BYTES at most. The kernels of blocks reached these parts of
the searched cuBLAS' speed on an H200:

    1000 x 1000, blocks of 10, 80 % zeros, 64, 100 and 1,024 tokens    0.86, 0.79, 0.69    2 MB
    5000 x 3000, blocks of 8, 90 %, 300 tokens                         0.74               30 MB
    512 x 2048, blocks of 4, fp32, 90 % zeros anywhere, 1,024 tokens   0.04               4 MB

In fp32 torch's setting of TF32 applies, as to nn.Linear. csr_cuda took 85 µs for one token with
14336 x 4096 at 50 % zeros, cuBLAS 31 (H200); for 1,024 tokens at 70 % 2,345 and 150 (H100).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from operator import itemgetter

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.capture import is_capturing, keep, make_lasting
from sparsebench.kernels._common.cuda import HALVES
from sparsebench.kernels._common.operator import Engine, fewest
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.stamp import by_stamp
from sparsebench.kernels._common.tape import on_tape
from sparsebench.kernels._common.transforms import ALIGNMENT
from sparsebench.kernels._common.unstructured import UnstructuredCall, bind
from sparsebench.kernels._kernel import DTYPES, poison, refuse
from sparsebench.kernels.bsr import _call
from sparsebench.kernels.bsr._call import BsrCall
from sparsebench.kernels.dense import _cublaslt
from sparsebench.kernels.dense._cublaslt import Algorithm
from sparsebench.kernels.dense._gemm import DenseProduct, agrees, fastest_way, runs

ATTRIBUTE = "_sparsebench_dense"  # of a weight in bitmap or CSR: its copy
TILE = 128  # tokens of a tile of cuBLAS, above which X may be padded
MOST_BYTES = 32 * 2**20  # of the copy of a weight in blocks; CSR takes every copy up to it
COPY = 2  # most bytes of a larger copy, relative to those of CSR
DIRECT = 3  # direct calls for one number of tokens that are timed beside our kernels
FLOATS = *HALVES, torch.float32


@dataclass(frozen=True)
class DenseConfig:
    """The configuration of a dense product.

    padded     torch's product of X padded to so many tokens; 0: as it is
    algorithm  of a direct call of cuBLASLt; None: torch's product
    columns    whether the copy is stored column by column; False only for blocks, which are never
               padded
    """

    padded: int = 0
    algorithm: Algorithm | None = None
    columns: bool = True

    def __post_init__(self) -> None:
        """Take an algorithm as a list has it: its fields."""
        if isinstance(self.algorithm, Mapping):
            object.__setattr__(self, "algorithm", Algorithm(**self.algorithm))


def copy_of(w: Bitmap | Bsr | Csr, *, columns: bool) -> Tensor:
    """Return W [n, k] as a dense matrix, by columns or by rows."""
    return with_layout(w.to_dense(), columns=columns)


def with_layout(dense: Tensor, *, columns: bool) -> Tensor:
    """Return a matrix [n, k] that is stored by rows as it is, or a copy by columns."""
    return dense.T.contiguous().T if columns else dense


def multiply(x: Tensor, dense: Tensor, out: Tensor | None = None, *, padded: int = 0) -> Tensor:
    """Return torch's product X @ W.T with the copy, of X padded to so many tokens."""
    if padded <= (m := x.shape[0]):
        on_tape(dense=dense)
        return torch.mm(x, dense.T, out=out)
    on_tape(complete=False)
    rows = x.new_empty(padded, x.shape[1])  # the other rows of Y are dropped
    rows[:m] = x
    y = torch.mm(rows, dense.T)[:m]
    return y if out is None else out.copy_(y)


def direct_choices(copies: Mapping[bool, Callable[[], Tensor]], m: int) -> Iterator[DenseConfig]:
    """Yield the fastest direct calls with copies of W, the fastest first; none without nvmath.

    copies  functions that make the copy by columns (True) and by rows (False)

    The baseline's search times them for m tokens, and from 257 on also for the fewest that share a
    plan with m: tiles that hold 300 tokens exactly are not proposed for 320 (5000 x 3000, H200:
    22.2 and 24.6 µs).
    """
    if _cublaslt.unavailable():
        return
    weights = {columns: make() for columns, make in copies.items()}
    sizes = dict.fromkeys([m, fewest(m)] if m > 256 else [m])
    fastest = [_fastest_calls(weights, m, size) for size in sizes]
    yield from dict.fromkeys(filter(None, chain.from_iterable(zip_longest(*fastest))))


def _fastest_calls(weights: Mapping[bool, Tensor], m: int, size: int) -> list[DenseConfig]:
    """Return the fastest calls for the first `size` of m tokens, at most DIRECT.

    They are timed on an X as torch allocates it. Kernels also read an X that begins 16 bytes after
    a multiple of 256; a call that is wrong for m tokens of such an X is left out.
    """
    times_us = dict[DenseConfig, float]()
    for columns, dense in weights.items():
        (n, k), shift = dense.shape, ALIGNMENT // dense.itemsize
        memory = torch.randn(m * k + shift, device=dense.device).to(dense.dtype)
        x, shifted = (memory[start : start + m * k].view(m, k) for start in (0, shift))
        right, out = torch.mm(shifted, dense.T), x.new_empty(m, n)
        product = DenseProduct(x[:size], dense.T, out[:size], weight=False)
        lines = fastest_way(product).candidates
        timed = [line for line in lines if "median_us" in line and "algorithm" in line["choice"]]
        for line in sorted(timed, key=itemgetter("median_us"))[:DIRECT]:
            algorithm = Algorithm(**line["choice"]["algorithm"])
            with suppress(Unsupported):  # for one row: other algorithms may compute it
                direct = _cublaslt.bind_weight(dense, algorithm, m)
                poison(out)
                if runs(partial(direct, shifted, dense, out)) and agrees(out, right):
                    times_us[DenseConfig(algorithm=algorithm, columns=columns)] = line["median_us"]
    return sorted(times_us, key=times_us.__getitem__)[:DIRECT]


def choices_of(products: list[DenseConfig], direct: Iterable[DenseConfig]) -> Iterator[DenseConfig]:
    """Yield torch's product, and then direct calls and torch's other products in turn."""
    yield products[0]
    rest = zip_longest(direct, products[1:])
    yield from filter(None, chain.from_iterable(rest))


# ---- bitmap and CSR ----


def dtype_of(w: Bitmap | Csr) -> torch.dtype:
    return w.values.dtype if isinstance(w, Csr) else w.dtype


def bytes_of_copy(w: Bitmap | Csr) -> int:
    return w.shape[0] * w.shape[1] * dtype_of(w).itemsize


def takes_copy(w: Bitmap | Csr) -> bool:
    """Return whether a weight takes a dense copy: a bitmap always does."""
    if isinstance(w, Bitmap):
        return True
    return bytes_of_copy(w) <= max(MOST_BYTES, COPY * w.stored_bytes)


def dense_copy(w: Bitmap | Csr) -> Tensor:
    """Return the dense copy [n, k] of a weight, by columns, which the first call makes.

    In published searches of cuBLAS with up to 64 tokens, the fastest call had W by columns in 97 %
    of large products, and torch's product took 1.09 to 1.10 of its time by rows, 1.03 by columns.
    """
    make = partial(make_lasting, partial(copy_of, w, columns=True), w.offsets.device)
    dense: Tensor = by_stamp(w, "matmul", ATTRIBUTE, make)
    if is_capturing(dense):
        keep(dense)
    return dense


def torch_choices(w: Bitmap | Csr, call: UnstructuredCall) -> list[DenseConfig]:
    """Return the product of X as it is, and of X padded to whole tiles."""
    whole = -(-call.m // TILE) * TILE
    return [DenseConfig(), *([DenseConfig(whole)] if TILE < call.m < whole else [])]


def dense_choices(w: Bitmap | Csr, call: UnstructuredCall) -> Iterator[DenseConfig]:
    """Yield torch's products and direct calls."""
    timed = w.offsets.is_cuda and dtype_of(w) in FLOATS
    direct = direct_choices({True: partial(dense_copy, w)}, call.m) if timed else ()
    return choices_of(torch_choices(w, call), direct)


def plan_dense(w: Bitmap | Csr, call: UnstructuredCall, config: DenseConfig) -> Product:
    """Make the dense copy, unless there is one. Raises Unsupported."""
    fp8 = dtype_of(w) == DTYPES["fp8"]
    refuse("dense: expected fp16, bf16 or fp32, because torch multiplies no fp8" if fp8 else None)
    refuse(None if config.columns else "dense: expected columns=True, found False")
    # The nearest choice of a list may be that of a weight of a fourth of the elements.
    expected = f"dense: expected a copy of {MOST_BYTES} bytes or {COPY} times those of W at most"
    refuse(None if takes_copy(w) else f"{expected}, found {bytes_of_copy(w)}")
    dense = dense_copy(w)
    if config.algorithm:
        direct = _cublaslt.bind_weight(dense, config.algorithm, call.m)
        return Product(lambda x, out=None: direct(x, dense, out))

    def run(x: Tensor, out: Tensor | None = None) -> Tensor:
        keep(dense)  # a write to W replaces the copy, which a captured graph still reads
        return multiply(x, dense, out, padded=config.padded)

    return Product(run)


OF_BITMAP = Engine(
    op="linear",
    consumes="bitmap",
    device="any",
    name="dense",
    config=DenseConfig,
    choices=dense_choices,
    closed=torch_choices,
    plan=plan_dense,
    bind=bind,
)
OF_CSR = replace(OF_BITMAP, consumes="csr")


# ---- blocks ----


def unsupported_call(call: BsrCall) -> str | None:
    """Return why a call of a weight in blocks takes no copy, or None."""
    size = call.shape[0] * call.shape[1] * call.dtype.itemsize
    if call.live:
        return "dense copy: expected frozen values, found values that train"
    fits = call.dtype in FLOATS and size <= MOST_BYTES
    expected = f"dense copy: expected 16 bits or fp32, up to {MOST_BYTES} bytes"
    return None if fits else f"{expected}, found {call.dtype} and {size}"


def layouts(w: Bsr, call: BsrCall) -> list[DenseConfig]:
    """Return torch's product with both layouts of the copy. Raises Unsupported."""
    refuse(unsupported_call(call))
    return [DenseConfig(), DenseConfig(columns=False)]


def block_choices(w: Bsr, call: BsrCall) -> Iterator[DenseConfig]:
    """Yield torch's products and direct calls, which are timed on a weight of random values."""
    products = layouts(w, call)

    def random_copy(*, columns: bool) -> Tensor:
        values = torch.randn(call.shape, device=w.offsets.device).to(call.dtype)
        return with_layout(values, columns=columns)

    copies = {columns: partial(random_copy, columns=columns) for columns in (True, False)}
    direct = direct_choices(copies, call.m) if w.offsets.is_cuda else ()
    return choices_of(products, direct)


def plan_blocks(w: Bsr, call: BsrCall, config: DenseConfig) -> Product:
    """Plan a product with the copy that `pack` makes of the values. Raises Unsupported."""
    refuse(unsupported_call(call))
    padded = f"expected padded=0 for a weight in blocks, found {config.padded}"
    refuse(f"dense copy: {padded}" if config.padded else None)

    def pack(values: Tensor) -> Tensor:
        return copy_of(replace(w, values=values), columns=config.columns)

    order = "dense", config.columns
    if config.algorithm is None:
        return Product(multiply, pack=pack, order=order)
    empty = torch.empty(call.shape, dtype=call.dtype, device=w.offsets.device)
    like = with_layout(empty, columns=config.columns)
    direct = _cublaslt.bind_weight(like, config.algorithm, call.m)
    return Product(direct, pack=pack, order=order)


OF_BLOCKS = Engine(
    op="linear",
    consumes="bsr",
    device="any",
    name="dense",
    config=DenseConfig,
    choices=block_choices,
    closed=layouts,
    plan=plan_blocks,
    bind=_call.bind,
)
