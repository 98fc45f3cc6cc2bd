"""Spense by two libraries, as in its paper: cuSPARSELt for the 2:4 part, cuBLAS for the dense part.

    split rows       Y[:, :s] = X @ Ws.T             Y[:, s:]  = X @ Wd.T
    split columns    Y        = X[:, :s] @ Ws.T      Y        += X[:, s:] @ Wd.T

torch's cuSPARSELt writes a new tensor, cannot add to one, and takes no stride. Copies are therefore
needed, and timed:

    rows       copy the 2:4 part into Y, where cuBLAS writes its part in place; or copy both parts
    columns    copy X[:, :s]. cuBLAS adds to Y in place; in fp8 torch cannot, and a kernel adds

An H200 copies half of Y in 0.2 ms (8192 tokens, n = 51200, by its bytes). In fp8 the two products
take 2.85 ms there, with k = 5120.

`prepare` chooses the way of the 2:4 part first, alone (cusparselt.py), and then that of the dense
part, with the whole of Y.
Source: arXiv:2606.10445, section 3.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._kernel import DTYPES, Kernel, Launch, Operands
from sparsebench.kernels.dense.cublas import LIBRARIES, fastest_product, preferred, scaled_product
from sparsebench.kernels.peers import cusparselt

Join = Literal["in place", "copied"]


@dataclass(frozen=True)
class Way:
    """One way to multiply the dense part and to join it to Y; `use_fast_accum` for fp8 only."""

    library: str
    join: Join
    use_fast_accum: bool | None = None


def prepare(operands: Operands, *, search: bool = True) -> Launch:
    """Choose the way of both parts; `search: false` takes cuSPARSELt's default.

    Raises Unsupported.
    """
    w, x, pinned = operands.weights["w"], operands.activations["x"], operands.pinned
    assert isinstance(w, Spense)
    rows, columns = w.sparse_shape
    if w.sparse_shape == w.shape or not rows * columns:
        found = f"{list(w.sparse_shape)} of {list(w.shape)} sparse"
        raise Unsupported(f"the hybrid expected a sparse and a dense part of W, found {found}")
    matrix, by_rows = w.to_dense(), w.split == "rows"
    front = matrix[:rows, :columns].contiguous()
    back = matrix[rows:] if by_rows else matrix[:, columns:]
    back = back.clone(memory_format=torch.contiguous_format)  # frees the rest of W
    known = pinned and pinned["sparse"]
    sparse = cusparselt.product_of(front, x[:, :columns], search, known)
    x_back = x if by_rows else x[:, columns:]
    every = ways(x.dtype, by_rows) if not pinned else [Way(**pinned["dense"])]
    calls = [partial(multiply, sparse, back, x_back, by_rows, way) for way in every]
    best = fastest_product(calls, x.device)
    return Launch(calls[best], {"sparse": sparse.choice, "dense": asdict(every[best])})


def ways(dtype: torch.dtype, by_rows: bool) -> list[Way]:
    """Return the ways to time: both libraries; in fp8 both accumulations of cuBLASLt."""
    if dtype != DTYPES["fp8"]:
        return [Way(library, "in place") for library in LIBRARIES]
    joins: tuple[Join, ...] = ("copied", "in place") if by_rows else ("copied",)
    return [Way("cublaslt", join, fast) for join, fast in product(joins, (True, False))]


def multiply(sparse: Callable[[], Any], w: Tensor, x: Tensor, by_rows: bool, way: Way) -> Tensor:
    """Return Y [m, n]: `sparse` computes the 2:4 part; w and x are operands of the dense part."""
    y: Tensor = sparse()
    with preferred(way.library) if way.use_fast_accum is None else nullcontext():
        if not by_rows:
            return y.addmm_(x, w.t()) if way.join == "in place" else y.add_(_dense(w, x, way))
        if way.join == "copied":
            return torch.cat((y, _dense(w, x, way)), dim=1)
        whole = y.new_empty(len(y), y.shape[1] + len(w))
        whole[:, : y.shape[1]] = y
        _dense(w, x, way, out=whole[:, y.shape[1] :])
        return whole


def _dense(w: Tensor, x: Tensor, way: Way, out: Tensor | None = None) -> Tensor:
    if way.use_fast_accum is None:
        return torch.mm(x, w.t(), out=out)
    return scaled_product(w, x, way.use_fast_accum, out)


KERNEL = Kernel("linear", "spense", "cuda", prepare, cusparselt.unsupported)
