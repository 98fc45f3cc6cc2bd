"""Which operands spense_mma.cu and spense_wgmma.cu can read, and their sizes in a tuned table."""

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.tuned_table import Sizes
from sparsebench.kernels._kernel import Operands

ALIGNMENT = 16  # bytes that one instruction copies at a time, or TMA at least
LARGEST = 2**31 - 1  # an int32


def unsupported(
    x: Tensor,
    w: Spense,
    dtypes: tuple[torch.dtype, ...],
    *,
    most_tokens: int,
    most_columns: int,
    y_step: int,
) -> str | None:
    """Return why a kernel cannot read these operands, or None.

    most_tokens   tokens of the largest tile
    most_columns  largest n and k
    y_step        n must be a multiple of it
    """
    n, k = w.shape
    if x.dtype != w.dtype or x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"expected operands of one dtype of {names}; found {x.dtype} and {w.dtype}"
    if x.dim() != 2 or x.shape[1] != k:
        return f"expected activations of {k} columns, found shape {list(x.shape)}"
    step = ALIGNMENT // x.itemsize
    if k % step or n % y_step:
        return f"expected multiples of {step} columns of X and {y_step} of Y, found {k} and {n}"
    if x.stride(1) != 1 or x.stride(0) % step:
        return f"expected rows of a multiple of {step} elements, found strides {list(x.stride())}"
    if not (w.sparse.is_contiguous() and w.dense.is_contiguous()):
        return f"expected contiguous tiles, found strides {w.sparse.stride()}, {w.dense.stride()}"
    if any(beyond := [a.data_ptr() % ALIGNMENT for a in (x, w.sparse, w.dense)]):
        return f"expected X and tiles at multiples of {ALIGNMENT} bytes, found {beyond} bytes more"
    if not 0 < len(x) <= LARGEST - most_tokens or not 0 < min(n, k) <= max(n, k) <= most_columns:
        most = f"1 to 2^31 tokens and 1 to {most_columns} columns"
        return f"expected {most}, found {len(x)}, {n} and {k}"
    return None


def sizes_of(operands: Operands, x: Tensor, w: Spense) -> Sizes:
    """Return the sizes of a layer; a 2:4 element counts half in the density."""
    (n, k), (rows, columns) = w.shape, w.sparse_shape
    density = 1 - rows * columns / (2 * n * k)
    return Sizes(len(x), n, k, operands.problem["dtype"], None, density)


def weight_of(weights: Mapping[str, Format], name: str) -> Spense:
    weight = weights[name]
    assert isinstance(weight, Spense)
    return weight
