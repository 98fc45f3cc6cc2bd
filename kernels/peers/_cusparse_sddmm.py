"""Shared by the cuSPARSE weight gradients: dW[n, k] = dY.T[n, m] @ X[m, k] by cusparseSDDMM.

The library has one algorithm, and reads dense matrices by rows or by columns. Every layout is
timed. A launch includes the transpositions:

    dY.T  columns     dY in place: column-major, leading dimension n
          transposed  dY in place: op(A) = transpose of row-major dY
          rows        dY.T row-major, copied by the launch
    X     rows        X in place: row-major, leading dimension k
          transposed  X in place: op(B) = transpose of column-major X.T
          columns     X column-major, copied by the launch

A first search with few tokens drops settings that are much slower; the rest is timed at full size.
Accumulation is in fp32.
Source: docs.nvidia.com/cuda/cusparse, cusparseSDDMM; called through nvmath-python's bindings.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.kernels.peers import _cusparse
from sparsebench.kernels.peers._cusparse import ONE, ZERO, Plan, describe_dense, stage_for
from sparsebench.kernels.peers._padding import multiple_of

TRANSPOSED = "transposed"
DY_LAYOUTS = "columns", TRANSPOSED, "rows"
X_LAYOUTS = "rows", TRANSPOSED, "columns"
SETTING = "dy_layout", "x_layout"


@dataclass(frozen=True)
class Pattern:
    """The sparsity pattern of the gradient, in a form that cuSPARSE can describe.

    packed    the pattern in our format; keeps its arrays alive
    shape     rows and columns, padded to whole blocks
    describe  returns a new descriptor
    tokens    the number of tokens must be a multiple of this; the launch pads them
    """

    packed: Bsr | Csr
    shape: tuple[int, int]
    describe: Callable[[], int]
    tokens: int = 1


def prepare(pattern: Pattern, operands: Operands) -> Launch:
    dy, x, pinned = operands.activations["dy"], operands.activations["x"], operands.pinned
    lines: list[dict[str, Any]] = []
    if pinned:
        settings = [tuple(pinned[name] for name in SETTING)]
    else:
        few = dy[: _cusparse.FEW_TOKENS], x[: _cusparse.FEW_TOKENS]
        every = product(DY_LAYOUTS, X_LAYOUTS)
        settings, lines = _cusparse.screened(every, partial(plan, pattern, *few), x.device)
    plans = [plan(pattern, dy, x, *setting) for setting in settings]
    return _cusparse.fastest_plan(plans, lines, x.device)


def plan(pattern: Pattern, dy: Tensor, x: Tensor, dy_layout: str, x_layout: str) -> Plan:
    """Describe, preprocess and allocate the product of one setting. Raises cuSPARSEError."""
    from nvmath.bindings import cusparse

    handle, descriptor = _cusparse.library_handle(), pattern.describe()
    rows = multiple_of(pattern.tokens, len(x))
    staged_dy = stage_for(dy, pattern.shape[0], turned=dy_layout == "rows", rows=rows)
    staged_x = stage_for(x, pattern.shape[1], turned=x_layout == "columns", rows=rows)
    flips = dy_layout == TRANSPOSED, x_layout == TRANSPOSED
    a, b = staged_dy if flips[0] else staged_dy.t(), staged_x.t() if flips[1] else staged_x
    arguments = (
        *(handle, *map(int, flips), ONE.ctypes.data, describe_dense(a), describe_dense(b)),
        *(ZERO.ctypes.data, descriptor, _cusparse.CUDA_TYPES[torch.float32]),
        cusparse.SDDMMAlg.DEFAULT,
    )
    size = np.zeros(1, np.uint64)
    cusparse.set_stream(handle, torch.cuda.current_stream(x.device).cuda_stream)
    cusparse.sddmm_buffer_size(*arguments, size.ctypes.data)
    workspace = torch.empty(max(int(size[0]), 1), dtype=torch.uint8, device=x.device)
    cusparse.sddmm_preprocess(*arguments, workspace.data_ptr())

    def run() -> Bsr | Csr:
        for source, staged in ((dy, staged_dy), (x, staged_x)):
            if staged is not source:
                staged[: len(source), : source.shape[1]].copy_(source)
        values = torch.empty_like(pattern.packed.values)
        cusparse.sp_mat_set_values(descriptor, values.data_ptr())
        cusparse.set_stream(handle, torch.cuda.current_stream(x.device).cuda_stream)
        cusparse.sddmm(*arguments, workspace.data_ptr())
        return replace(pattern.packed, values=values)

    layouts = {"dy_layout": dy_layout, "x_layout": x_layout, "workspace_bytes": int(size[0])}
    return {**layouts, **({"tokens": rows} if rows != len(x) else {})}, run
