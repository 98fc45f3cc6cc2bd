"""Spense by two libraries, as in its paper: cuSPARSELt for the 2:4 part, cuBLAS for the dense part.

    split rows       Y[:, :s] = X @ Ws.T             Y[:, s:]  = X @ Wd.T
    split columns    Y        = X[:, :s] @ Ws.T      Y        += X[:, s:] @ Wd.T

Both libraries read X in place and write to Y in place.

    rows       each library writes its columns of Y
    columns    the second product adds: cuBLAS to the 2:4 part, or cuSPARSELt to the dense part. In
               fp8 torch's cuBLASLt cannot add, so a kernel of torch does

`prepare` first chooses the way of the 2:4 part alone (cusparselt.py), and then, with all of Y, that
of the dense part and of the addition.
Source: arXiv:2606.10445, section 3.
"""

from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.requirements import unsupported_dtype
from sparsebench.kernels._common.search import search as search_calls
from sparsebench.kernels._kernel import DTYPES, Kernel, Launch, Lossy, Operands
from sparsebench.kernels.dense._gemm import LIBRARIES, preferred, scaled_product
from sparsebench.kernels.peers import cusparselt
from sparsebench.kernels.peers._cusparselt import CusparseLtError
from sparsebench.results.record import Problem

Join = Literal["in place", "dense adds", "sparse adds"]


@dataclass(frozen=True)
class DenseCall:
    """One way to multiply the dense part and join it to Y; `use_fast_accum` is for fp8 only."""

    library: str
    join: Join
    use_fast_accum: bool | None = None


@dataclass(frozen=True)
class Parts:
    """The two products: the 2:4 part writes `columns` of Y [m, width], the dense part the rest.

    If W is split by columns, both have all columns of Y; `adding` is the 2:4 product that adds to
    them, or None if the library refuses it.
    """

    sparse: cusparselt.HalfSparse
    adding: cusparselt.HalfSparse | None
    w: Tensor
    x: Tensor
    width: int
    columns: int


def prepare(operands: Operands, *, search: bool = True) -> Launch:
    """Choose the ways of both parts; `search: false` takes cuSPARSELt's default.

    Raises Unsupported.
    """
    w, x, pinned = operands.weights["w"], operands.activations["x"], operands.pinned
    assert isinstance(w, Spense)
    rows, columns = w.sparse_shape
    if w.sparse_shape == w.shape or not rows * columns:
        split = f"{list(w.sparse_shape)} of {list(w.shape)} sparse"
        raise Unsupported(f"the hybrid expected a sparse and a dense part of W, found {split}")
    matrix, by_rows = w.to_dense(), w.split == "rows"
    front = matrix[:rows, :columns].contiguous()
    back = matrix[rows:] if by_rows else matrix[:, columns:]
    back = back.clone(memory_format=torch.contiguous_format)  # frees the rest of W
    target = cusparselt.Call(cusparselt.compressed(front), x[:, :columns], w.shape[0])
    of_sparse = pinned and pinned["sparse"], operands.timed
    sparse, choice, candidates = cusparselt.choose(target, rows, search, *of_sparse)
    adding = None if by_rows else _adding(target, sparse)
    x_back = x if by_rows else x[:, columns:]
    parts = Parts(sparse, adding, back, x_back, w.shape[0], rows)
    every = [DenseCall(**pinned["dense"])] if pinned else ways(parts)
    calls = [partial(multiply, parts, way) for way in every]
    result = search_calls(calls, x.device)
    dense = result.lines([asdict(way) for way in every], of="dense part")
    choice = {"sparse": choice, "dense": asdict(every[result.best])}
    return Launch(calls[result.best], choice, candidates=[*candidates, *dense])


def ways(parts: Parts) -> list[DenseCall]:
    """Return the ways to time: both libraries; in fp8 both accumulations of cuBLASLt."""
    fp8 = parts.x.dtype == DTYPES["fp8"]
    joins: tuple[Join, ...] = ("in place",)
    if parts.columns == parts.width:
        joins = ("dense adds", "sparse adds") if parts.adding else ("dense adds",)
    if fp8:
        return [DenseCall("cublaslt", join, fast) for join, fast in product(joins, (True, False))]
    return [DenseCall(library, join) for library, join in product(LIBRARIES, joins)]


def multiply(parts: Parts, way: DenseCall) -> Tensor:
    """Return Y [m, width]."""
    dtype = torch.bfloat16 if parts.x.dtype == DTYPES["fp8"] else parts.x.dtype
    whole = parts.x.new_empty(parts.sparse.rows, parts.width, dtype=dtype)
    y = whole[: len(parts.x)]
    with preferred(way.library) if way.use_fast_accum is None else nullcontext():
        if way.join == "sparse adds":
            assert parts.adding
            _dense(parts, way, out=y)
            parts.adding.call(whole)
            return y
        parts.sparse.call(whole[:, : parts.columns])
        if way.join == "in place":
            _dense(parts, way, out=y[:, parts.columns :])
        elif way.use_fast_accum is None:
            y.addmm_(parts.x, parts.w.t())
        else:
            y.add_(_dense(parts, way))
    return y


def _adding(target: cusparselt.Call, sparse: cusparselt.HalfSparse) -> cusparselt.HalfSparse | None:
    """Return the product that adds to Y in its final layout, or None if it is refused."""
    try:
        return cusparselt.planned(replace(target, beta=1.0), sparse.way)
    except CusparseLtError:
        return None


def _dense(parts: Parts, way: DenseCall, out: Tensor | None = None) -> Tensor:
    if way.use_fast_accum is None:
        return torch.mm(parts.x, parts.w.t(), out=out)
    return scaled_product(parts.w, parts.x, way.use_fast_accum, out)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    wrong = unsupported_dtype(problem, "fp16", "bf16", "fp8")  # torch cannot add products of int8
    return wrong or cusparselt.unsupported(problem, device)


LOSSY = Lossy({"fp16": 0.0004, "bf16": 0.003}, "the two products are added in 16 bits")
KERNEL = Kernel("linear", "spense", "cuda", prepare, unsupported, lossy=LOSSY)
