"""2:4 sparse weights by NVIDIA's cuSPARSELt, through torch: Y.T[n, m] = W[n, k] @ X.T[k, m].

The library compresses W to values and metadata, in an order of its own. X and Y have two layouts
each, and each pair of layouts has algorithms of its own:

    X.T  columns  X in place                Y.T  columns  Y in its final layout
         rows     X.T, copied by the launch      rows     Y.T, transposed back by the launch

The library searches for each pair. Its results and its default are timed, and the fastest is kept.
On Hopper the search of 0.8.0 fails in fp16 with an internal error. There the algorithms that run
are timed by their numbers. With `search: false` it is the default algorithm with X and Y in place,
as torch.sparse.to_sparse_semi_structured calls it.

The library does not check that a matrix is 2:4; it would return wrong products. So it is given only
matrices that formats/spense.py has checked. Each call makes a new plan, which takes the host 0.4 to
2 ms, and in fp16 up to 0.35 s (0.8.0, suite spense-calls): use it in CUDA graphs.
Source: docs.nvidia.com/cuda/cusparselt; torch's ATen/native/sparse/cuda/cuSPARSELtOps.cpp.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.search import fastest
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, Kernel, Launch, Operands
from sparsebench.kernels.dense.cublas import unsupported_fp8
from sparsebench.results.record import Problem

Layout = Literal["columns", "rows"]
LAYOUTS: tuple[Layout, ...] = "columns", "rows"
MULTIPLES = {"fp16": (8, 16), "bf16": (8, 16), "fp8": (16, 32)}  # of m, and of n and k
FP16_ALGORITHMS = 12, 16, 19, 20  # of 0.8.0: run on Hopper from 16 tokens to 2048


@dataclass(frozen=True)
class Way:
    """One way to call the library; the defaults are the library's."""

    x_layout: Layout = "columns"
    y_layout: Layout = "columns"
    algorithm: int = 0
    split_k: int = 1
    split_k_mode: int = -1


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Say why cuSPARSELt cannot run the problem here, or None."""
    dtype, m, n, k = (problem[field] for field in ("dtype", "m", "n", "k"))
    if dtype not in MULTIPLES:
        return f"cuSPARSELt expected a dtype of {', '.join(MULTIPLES)} for 2:4, found {dtype}"
    tokens, side = MULTIPLES[dtype]
    if m % tokens or n % side or k % side:
        expected = f"m in multiples of {tokens}, n and k of {side} in {dtype}"
        return f"cuSPARSELt expected {expected}, found m {m}, n {n} and k {k}"
    if not torch.backends.cusparselt.is_available():
        return "torch was built without cuSPARSELt"
    return unsupported_fp8(device) if dtype == "fp8" else None


def prepare(operands: Operands, *, search: bool = True) -> Launch:
    """Compress W and keep the fastest way; `search: false` takes the default.

    Raises Unsupported unless all of W is 2:4.
    """
    w = operands.weights["w"]
    assert isinstance(w, Spense)
    if w.sparse_shape != w.shape:
        found = f"{list(w.sparse_shape)} of {list(w.shape)}: the rest is for cusparselt_hybrid"
        raise Unsupported(f"cuSPARSELt expected all of W to be 2:4, found {found}")
    return product_of(w.to_dense(), operands.activations["x"], search, operands.pinned)


def product_of(w: Tensor, x: Tensor, search: bool, pinned: Mapping[str, Any] | None) -> Launch:
    """Return the launch of Y [m, n]; W [n, k] is 2:4 and contiguous, X [m, k] of any row stride."""
    compressed = torch._cslt_compress(w)
    if pinned:
        way = Way(**{name: pinned[name] for name in asdict(Way())})
        return Launch(partial(multiply, compressed, x, way), pinned)
    ways = [Way()]
    if search and w.dtype == torch.float16:
        ways += [Way(*at) for at in product(LAYOUTS, LAYOUTS, FP16_ALGORITHMS)]
    elif search:
        ways += _searched(compressed, x)
    calls = [partial(multiply, compressed, x, way) for way in ways]
    best = fastest(calls, x.device)
    version = {"candidates": len(ways), "cusparselt": torch.backends.cusparselt.version()}
    return Launch(calls[best], asdict(ways[best]) | version)


def multiply(compressed: Tensor, x: Tensor, way: Way) -> Tensor:
    """Return Y [m, n], contiguous."""
    y = torch._cslt_sparse_mm(
        compressed,
        _laid_out(x, way.x_layout),
        out_dtype=_output(x),
        transpose_result=way.y_layout == "columns",
        alg_id=way.algorithm,
        split_k=way.split_k,
        split_k_mode=way.split_k_mode,
    )
    return y if way.y_layout == "columns" else y.t().contiguous()


def _searched(compressed: Tensor, x: Tensor) -> Iterator[Way]:
    """Yield what the library finds for each pair of layouts; nothing where its search fails."""
    for x_layout, y_layout in product(LAYOUTS, LAYOUTS):
        turned = _laid_out(x, x_layout)
        try:
            found = torch._C._cusparselt.mm_search(  # type: ignore[attr-defined]
                compressed, turned, None, None, _output(x), y_layout == "columns"
            )
        except RuntimeError:
            continue
        yield Way(x_layout, y_layout, *found[:3])


def _laid_out(x: Tensor, layout: Layout) -> Tensor:
    """Return X.T [k, m], contiguous in this layout: the library takes no stride."""
    return x.contiguous().t() if layout == "columns" else x.t().contiguous()


def _output(x: Tensor) -> torch.dtype | None:
    """Return the output's dtype for fp8; None for 16 bits, where the library has no choice."""
    return OUTPUTS["fp8"] if x.dtype == DTYPES["fp8"] else None


KERNEL = Kernel("linear", "spense", "cuda", prepare, unsupported)
