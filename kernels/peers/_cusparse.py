"""Shared by the cuSPARSE peers: cusparseSpMM, and cusparseSDDMM for gradients of weights.

The library reads and writes dense matrices by rows or by columns, and the slower layout may take 10
times as long (CSR on an H200, 4096³, bf16, a tenth stored: 1.9 ms by rows, 21.6 ms by columns). So
every layout is timed. A launch includes the transpositions:

    Y.T[n, m] = W[n, k] @ X.T[k, m]     cusparseSpMM, with every algorithm of the format

    X.T  columns     X in place: column-major, leading dimension k
         transposed  X in place: op(B) = transpose of row-major X
         rows        X.T row-major, copied by the launch
    Y.T  columns     Y in its final layout: column-major, leading dimension n
         rows        Y.T row-major, transposed back by the launch

    dW[n, k] = dY.T[n, m] @ X[m, k]     cusparseSDDMM, which has one algorithm

    dY.T  columns     dY in place: column-major, leading dimension n
          transposed  dY in place: op(A) = transpose of row-major dY
          rows        dY.T row-major, copied by the launch
    X     rows        X in place: row-major, leading dimension k
          transposed  X in place: op(B) = transpose of column-major X.T
          columns     X column-major, copied by the launch

A first search with few tokens drops settings that are much slower; the rest is timed at full size.
Accumulation is in fp32.
Source: docs.nvidia.com/cuda/cusparse; called through nvmath-python's bindings.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.padding import multiple_of
from sparsebench.kernels._common.requirements import GPU_EXTRA, unsupported_without
from sparsebench.kernels._common.search import search
from sparsebench.kernels._kernel import Launch, Operands, Output
from sparsebench.results.record import Problem

CUDA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # library_types.h
TRANSPOSED = "transposed"
SPMM, SDDMM = ("algorithm", "x_layout", "y_layout"), ("dy_layout", "x_layout")  # settings
SPMM_LAYOUTS = ("columns", TRANSPOSED, "rows"), ("columns", "rows")
SDDMM_LAYOUTS = ("columns", TRANSPOSED, "rows"), ("rows", TRANSPOSED, "columns")
FEW_TOKENS = 128
HOPELESS = 3.0  # times the fastest with few tokens: not timed at full size
ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)

Plan = tuple[dict[str, Any], Callable[[], Output]]


@dataclass(frozen=True)
class CusparseWeight:
    """W in a form that cuSPARSE can describe.

    shape       rows and columns, padded to whole blocks
    algorithms  names in nvmath's SpMMAlg
    describe    returns a new descriptor and keeps its arrays alive
    """

    shape: tuple[int, int]
    algorithms: tuple[str, ...]
    describe: Callable[[], int]


@dataclass(frozen=True)
class GradientPattern:
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


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "fp8":
        return "cuSPARSE's sparse products expected 16 or 32 bits, found fp8"
    if device.type != "cuda":
        return f"cuSPARSE expected an NVIDIA GPU, found device {device}"
    return unsupported_without("nvmath", GPU_EXTRA)


def prepare(w: CusparseWeight, operands: Operands) -> Launch:
    """Return the fastest way to compute Y. Raises Unsupported if the library accepts none."""
    x, n = operands.activations["x"], operands.weights["w"].shape[0]

    def plan(tokens: int | None, *setting: str) -> Plan:
        return spmm(w, x[:tokens], n, *setting)

    return _fastest(plan, SPMM, product(w.algorithms, *SPMM_LAYOUTS), operands)


def prepare_wgrad(pattern: GradientPattern, operands: Operands) -> Launch:
    """Return the fastest way to compute dW. Raises Unsupported if the library accepts none."""
    dy, x = operands.activations["dy"], operands.activations["x"]

    def plan(tokens: int | None, *setting: str) -> Plan:
        return sddmm(pattern, dy[:tokens], x[:tokens], *setting)

    return _fastest(plan, SDDMM, product(*SDDMM_LAYOUTS), operands)


def _fastest(
    plan: Callable[..., Plan],
    names: tuple[str, ...],
    every: Iterable[tuple[str, ...]],
    operands: Operands,
) -> Launch:
    """Return the fastest setting, or the pinned one.

    plan   plans a number of tokens, or all for None, with a setting
    names  of the values of a setting
    """
    from nvmath.bindings import cusparse

    lines: list[dict[str, Any]] = []
    if operands.pinned:
        settings = [tuple(operands.pinned[name] for name in names)]
    else:
        settings, lines = screened(every, partial(plan, FEW_TOKENS), operands.device)
    plans = [plan(None, *setting) for setting in settings]
    result = search([call for _, call in plans], operands.device)
    choice, call = plans[result.best]
    timed = result.lines([choice for choice, _ in plans], of="all tokens")
    version = cusparse.get_version(library_handle())
    return Launch(call, {**choice, "cusparse": version}, candidates=lines + timed)


def spmm(
    w: CusparseWeight, x: Tensor, n: int, algorithm: str, x_layout: str, y_layout: str
) -> Plan:
    """Describe, preprocess and allocate the product of one setting. Raises cuSPARSEError."""
    from nvmath.bindings import cusparse

    handle, stage = library_handle(), stage_for(x, w.shape[1], turned=x_layout == "rows")
    transposed = x_layout == TRANSPOSED  # cusparseOperation_t: 1 is transpose, 0 is not

    def new_y() -> Tensor:  # the closure keeps w, and so the arrays of W, alive
        if y_layout == "columns":
            return x.new_empty(len(x), w.shape[0])
        return x.new_empty(w.shape[0], len(x)).t()

    y = new_y()
    y_descriptor = describe_dense(y.t())
    # Descriptors take some hundred bytes of host memory and are never freed.
    arguments = (
        *(handle, 0, int(transposed), ONE.ctypes.data, w.describe()),
        *(describe_dense(stage if transposed else stage.t()), ZERO.ctypes.data, y_descriptor),
        *(CUDA_TYPES[torch.float32], cusparse.SpMMAlg[algorithm]),
    )
    cusparse.set_stream(handle, torch.cuda.current_stream(x.device).cuda_stream)
    size = cusparse.sp_mm_buffer_size(*arguments)
    workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=x.device)
    # Affects CSR_ALG1 and CSR_ALG3 only; binds W's descriptor to this workspace.
    cusparse.sp_mm_preprocess(*arguments, workspace.data_ptr())

    def run() -> Tensor:
        if stage is not x:
            stage[:, : x.shape[1]].copy_(x)
        y = new_y()
        cusparse.dn_mat_set_values(y_descriptor, y.data_ptr())
        cusparse.set_stream(handle, torch.cuda.current_stream(x.device).cuda_stream)
        cusparse.sp_mm(*arguments, workspace.data_ptr())
        return y[:, :n].contiguous()

    choice = dict(zip(SPMM, (algorithm, x_layout, y_layout), strict=True))
    return {**choice, "workspace_bytes": size}, run


def sddmm(pattern: GradientPattern, dy: Tensor, x: Tensor, dy_layout: str, x_layout: str) -> Plan:
    """Describe, preprocess and allocate the product of one setting. Raises cuSPARSEError."""
    from nvmath.bindings import cusparse

    handle, descriptor = library_handle(), pattern.describe()
    rows = multiple_of(pattern.tokens, len(x))
    staged_dy = stage_for(dy, pattern.shape[0], turned=dy_layout == "rows", rows=rows)
    staged_x = stage_for(x, pattern.shape[1], turned=x_layout == "columns", rows=rows)
    flips = dy_layout == TRANSPOSED, x_layout == TRANSPOSED
    a, b = staged_dy if flips[0] else staged_dy.t(), staged_x.t() if flips[1] else staged_x
    arguments = (
        *(handle, *map(int, flips), ONE.ctypes.data, describe_dense(a), describe_dense(b)),
        *(ZERO.ctypes.data, descriptor, CUDA_TYPES[torch.float32]),
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


def stage_for(x: Tensor, columns: int, *, turned: bool, rows: int | None = None) -> Tensor:
    """Return X, or a buffer [rows, columns] that the launch copies X to, with zeros past m and k.

    The buffer is column-major if `turned`. X is returned only if it has the right layout. `rows`
    are m by default.
    """
    rows = len(x) if rows is None else rows
    if turned:
        return x.new_zeros(columns, rows).t()
    return x if x.shape == (rows, columns) else x.new_zeros(rows, columns)


def describe_dense(matrix: Tensor) -> int:
    """Describe a dense matrix: row-major if it is contiguous, otherwise column-major."""
    from nvmath.bindings import cusparse

    rows, columns = matrix.shape
    row_major = matrix.is_contiguous()
    order = cusparse.Order.ROW if row_major else cusparse.Order.COL
    leading = columns if row_major else rows
    pointer, dtype = matrix.data_ptr(), CUDA_TYPES[matrix.dtype]
    return int(cusparse.create_dn_mat(rows, columns, leading, pointer, dtype, order))


def screened(
    settings: Iterable[tuple[str, ...]], few_tokens: Callable[..., Plan], device: torch.device
) -> tuple[list[tuple[str, ...]], list[dict[str, Any]]]:
    """Return the accepted settings that are not HOPELESS with few tokens, and the candidates.

    Raises Unsupported if the library accepts none.
    """
    from nvmath.bindings import cusparse

    plans, reason = {}, None
    for setting in settings:
        try:
            plans[setting] = few_tokens(*setting)
        except cusparse.cuSPARSEError as error:
            reason = error
    if not plans:
        raise Unsupported(f"cuSPARSE accepts no layout and algorithm: {reason}")
    result = search([call for _, call in plans.values()], device)
    promising = list(plans)
    if result.trials:
        bound = HOPELESS * result.trials[result.best].time_us
        timed = zip(plans, result.trials, strict=True)
        promising = [setting for setting, trial in timed if trial.time_us <= bound]
    return promising, result.lines([choice for choice, _ in plans.values()], of="few tokens")


@cache
def library_handle() -> int:
    from nvmath.bindings import cusparse

    return int(cusparse.create())
