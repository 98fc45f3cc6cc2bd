"""Gated feed-forward layer, dense, as two GEMMs: the fastest dense layer that libraries allow.

    fp8 only        X in e4m3                    Triton (_common/elementwise.py)
    G | U = X @ [Wg, Wu].T                       cuBLAS or cuBLASLt, one GEMM of 2 n features
    H = act(G) * U, in e4m3 in fp8               Triton
    Y = H @ Wd.T                                 cuBLAS or cuBLASLt

cublas.py computes the definition step by step. Here X is read by one GEMM, G and U are read once,
and act(G) is never written. Inference servers run such a layer this way.

`prepare` times all ways of each GEMM: both libraries and both layouts of the weights (W, or a copy
of W.T); in fp8 both accumulations. Only cuBLASLt has fp8, and on Hopper only the layout of W.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from sparsebench.formats.dense import Dense
from sparsebench.kernels._common.elementwise import hidden, quantised, scale_of
from sparsebench.kernels._common.triton import unsupported as triton_unsupported
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, Kernel, Launch, Operands
from sparsebench.kernels.dense import cublas
from sparsebench.results.record import Problem

Layout = Literal["rows", "columns"]
LAYOUTS: tuple[Layout, ...] = "rows", "columns"


@dataclass(frozen=True)
class Way:
    """One way to multiply: a library, the layout of the weights, and in fp8 the accumulation."""

    library: str
    weights: Layout
    use_fast_accum: bool | None = None


def ways(dtype: torch.dtype) -> list[Way]:
    """Return the ways to time."""
    if dtype == DTYPES["fp8"]:
        return [Way("cublaslt", "rows", fast) for fast in (True, False)]
    return [Way(library, weights) for weights in LAYOUTS for library in cublas.LIBRARIES]


def laid_out(w: Tensor, weights: Layout) -> Tensor:
    """Return W.T [k, n] of W [n, k], a view of it or a copy."""
    return w.t() if weights == "rows" else w.t().contiguous()


def multiply(w_t: Tensor, x: Tensor, way: Way, scale: float) -> Callable[[], Tensor]:
    """Return a call that computes X @ W.T [m, n], times `scale` in fp8, into its own output."""
    fast = way.use_fast_accum
    y = x.new_empty(len(x), w_t.shape[1], dtype=x.dtype if fast is None else OUTPUTS["fp8"])
    if fast is not None:
        scales = cublas.scales_on(x.device, scale)
        return partial(cublas.scaled_product, w_t.t(), x, fast, y, scales)

    def run() -> Tensor:
        with cublas.preferred(way.library):
            return torch.mm(x, w_t, out=y)

    return run


def prepare(operands: Operands) -> Launch:
    """Choose the fastest way of each GEMM."""
    wg, wu, wd = (_values(operands, name) for name in ("wg", "wu", "wd"))
    problem, x, (n, k) = operands.problem, operands.activations["x"], wg.shape
    first = [quantised(x)] if problem["dtype"] == "fp8" else []
    x = first[0]() if first else x
    pinned = operands.pinned or {}
    gate_up, by_one = _fastest(torch.cat((wg, wu)), x, 1.0, pinned.get("gate_up"))
    how = problem["activation"], x.dtype, scale_of(problem, k)
    between = hidden(gate_up(), *how)
    down, by_other = _fastest(wd, between(), scale_of(problem, n), pinned.get("down"))

    before: list[Callable[[], object]] = [*first, gate_up, between]

    def run() -> Tensor:
        for step in before:
            step()
        return down()

    return Launch(run, {"gate_up": by_one, "down": by_other}, between.code)


def _fastest(
    w: Tensor, x: Tensor, scale: float, pinned: Mapping[str, Any] | None
) -> tuple[Callable[[], Tensor], dict[str, Any]]:
    """Return the fastest call, and its way."""
    every = [Way(**pinned)] if pinned else ways(x.dtype)
    laid = {weights: laid_out(w, weights) for weights in {way.weights for way in every}}
    calls = [multiply(laid[way.weights], x, way, scale) for way in every]
    best = cublas.fastest_product(calls, x.device)
    return calls[best], asdict(every[best])


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Say why the libraries or Triton cannot run the problem here, or None."""
    fp8 = problem["dtype"] == "fp8"
    return cublas.unsupported(problem, device) or (
        None if fp8 else triton_unsupported(problem, device)
    )


def _values(operands: Operands, name: str) -> Tensor:
    weight = operands.weights[name]
    assert isinstance(weight, Dense)
    return weight.values


KERNEL = Kernel("ffn", "dense", "cuda", prepare, unsupported)
