"""Blocked-ELL by cuSPARSE: BSR whose block rows are padded to the longest, on tensor cores.

    BSR   ## . . ##      columns  0  3      values  ## ##      each [b, b] block row of the
          . . ## .                2 -1              ## 00      values is one [b, width * b] panel

Needs an NVIDIA GPU and nvmath-python; blocks must be square. All block rows are padded to the
longest one, in the worst case to the dense matrix (`padding` in the choice is stored blocks over
needed ones). `prepare` packs the panels. If k is not a multiple of the block, the launch copies X
and pads it with zeros. The library multiplies fp32 in TF32, so fp32 problems are unsupported.
Source: docs.nvidia.com/cuda/cusparse, cusparseSpMM, CUSPARSE_SPMM_BLOCKED_ELL_ALG1.
"""

import dataclasses

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.transposed import dgrad_of
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers import _cusparse
from sparsebench.results.record import Problem


def prepare(operands: Operands) -> Launch:
    from nvmath.bindings import cusparse

    w = operands.weights["w"]
    assert isinstance(w, Bsr)
    b, c = w.block
    if b != c:
        raise Unsupported(f"cuSPARSE expected square blocks, found {b}x{c}")
    columns, values = pack(w)
    padded = len(values), w.shape[1] + -w.shape[1] % b
    types = cusparse.IndexType.INDEX_32I, cusparse.IndexBase.ZERO
    dtype = _cusparse.CUDA_TYPES[values.dtype]

    def describe() -> int:
        arrays = columns.data_ptr(), values.data_ptr()
        sizes = *padded, b, values.shape[1]
        return int(cusparse.create_blocked_ell(*sizes, *arrays, *types, dtype))

    weight = _cusparse.CusparseWeight(padded, ("BLOCKED_ELL_ALG1",), describe)
    launch = _cusparse.prepare(weight, operands)
    padding = columns.numel() / max(len(w.columns), 1)
    return dataclasses.replace(launch, choice={**launch.choice, "padding": padding})


def pack(w: Bsr) -> tuple[Tensor, Tensor]:
    """Return columns int32 [block rows, width] and values [block rows * b, width * b]."""
    counts = w.offsets.diff().long()
    block_rows, width, b = len(counts), max(int(counts.max()), 1), w.block[0]
    rows = torch.arange(block_rows, device=counts.device).repeat_interleave(counts)
    slots = torch.arange(len(rows), device=counts.device) - w.offsets[rows]
    columns = w.columns.new_full((block_rows, width), -1)
    columns[rows, slots] = w.columns
    values = w.values.new_zeros(block_rows, b, width, b)
    values[rows, :, slots] = w.values
    return columns, values.view(block_rows * b, width * b)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why it cannot run; fp32 would run in TF32 (12.6.3, H200: relative error 2.9e-4)."""
    if problem["dtype"] == "fp32":
        return "cuSPARSE multiplies fp32 Blocked-ELL in TF32: expected dtype tf32, found fp32"
    return _cusparse.unsupported(problem, device)


KERNEL = Kernel("linear", "bsr", "cuda", prepare, unsupported)

DGRAD = dgrad_of(KERNEL)
"""Input gradient from Blocked-ELL by cuSPARSE, padded to the longest block column of W."""
