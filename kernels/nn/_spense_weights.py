"""Weights on their way into a Spense layer: rounded to fp8 if needed, and packed.

Each FormatError names the weight.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import FormatError
from sparsebench.formats._format import require, require_matrix
from sparsebench.formats.spense import Spense
from sparsebench.kernels.nn._spense_op import E4M3, round_rows
from sparsebench.kernels.spense._call import NAMES

DTYPES = "fp16, bf16 or fp8 (float8_e4m3fn)"


def pack_weight(name: str, weight: Tensor, dense_fraction: float, split: str) -> Spense:
    """Return a packed weight. Raises FormatError, which names the weight."""
    pack = partial(Spense.from_dense, dense_fraction=dense_fraction, split=split)
    w: Spense = with_name(name, pack, weight.contiguous())
    return w


def round_weight(
    name: str, weight: Tensor, dtype: torch.dtype | None, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return a weight [n, k] in `dtype` (None keeps its own), and in fp8 the scales [n] of rows."""
    is_tensor = isinstance(weight, Tensor)
    require(is_tensor, f"{name}: expected a torch.Tensor, found {type(weight).__name__}")
    weight, n, current = weight.detach(), len(weight), weight.dtype
    dtype = dtype or current
    require(dtype in NAMES, f"{name}: expected {DTYPES}, found {dtype}")
    require(dtype in (E4M3, current), f"{name}: expected {dtype}, found {current}")
    unscaled = scale is None or current == E4M3
    require(unscaled, f"{name}: expected no scale with {current}, found one")
    if dtype != E4M3:
        return weight, None
    with_name(name, require_matrix, weight)
    if current != E4M3:
        return round_rows(weight)
    scales = weight.new_ones(n, dtype=torch.float32) if scale is None else scale.detach().float()
    fits = scales.numel() == 1 or scales.shape in ((n,), (n, 1))
    require(fits, f"{name}: expected a scale of [{n}] or one, found {list(scales.shape)}")
    return weight, scales.flatten().expand(n).to(weight.device).contiguous()


def with_name(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, and name the weight in its FormatError."""
    try:
        return function(*args)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from error
