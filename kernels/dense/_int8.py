"""int8 products in two launches: int32 sums, and then their scaled and rounded values.

torch returns only int32 sums. cuBLASLt also writes int8 in one launch (_cublaslt.py); _gemm.py
times both ways.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

FEWEST = 32  # tokens; torch refuses up to 16, so fewer are padded


def sums_of(out: Tensor) -> Tensor:
    """Return a buffer for the int32 sums of `out`, of at least FEWEST rows."""
    rows, columns = out.shape
    return out.new_empty(max(rows, FEWEST), columns, dtype=torch.int32)


def torch_sums(a: Tensor, b: Tensor, sums: Tensor) -> Tensor:
    """Write the sums by torch, with fewer than FEWEST tokens padded by rows of zeros."""
    if len(a) < FEWEST:
        a = torch.nn.functional.pad(a, (0, 0, 0, FEWEST - len(a)))
    return torch._int_mm(a, b, out=sums)


def with_rounding(
    multiply: Callable[[], object], sums: Tensor, out: Tensor, scale: float
) -> Callable[[], Tensor]:
    """Return a call that writes the sums, and then `out`."""
    if out.is_cuda:
        from sparsebench.kernels._common.elementwise import rounded_sums  # needs Triton

        finish: Callable[[], Tensor] = rounded_sums(sums, out, scale)
    else:
        finish = partial(_round, sums, out, scale)

    def run() -> Tensor:
        multiply()
        return finish()

    return run


def _round(sums: Tensor, out: Tensor, scale: float) -> Tensor:
    limits = torch.iinfo(out.dtype)
    return out.copy_((sums * scale).round_().clamp_(limits.min, limits.max))
