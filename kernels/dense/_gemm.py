"""One dense product by the fastest call that the NVIDIA libraries offer.

    out [m, n] = scale * a [m, k] @ b [k, n]     b is a weight, transposed or not, or an activation

The search times every call that can compute the product, in CUDA graphs and with a cold L2 cache:

    torch's product by cuBLAS and by cuBLASLt         each library chooses an algorithm
  + cuBLASLt called directly (_cublaslt.py)           its proposals for m tokens and for other sizes
  x weights by rows or by columns                     as stored, or a copy of W.T made beforehand
  x fp8 sums with 13 bits or in fp32                  cuBLASLt only; on Hopper only weights by rows

In int8, cuBLASLt is called directly only, with weights by rows: torch returns unscaled sums.

That makes up to a thousand calls. A first screening keeps KEPT of them (`screened`), and the search
picks the fastest, which the row names. If the process meets an equal product again, which happens
because block sizes and sparsities share it, the search times only the calls that were near the
fastest (search.py). Later processes of a verdict do the same with the calls that the first process
found. Without nvmath-python, cuBLASLt cannot be called directly, and the row says so. In int8, sums
in int32 and a second launch that scales and rounds them took 6 % longer at least (NOTES.md).

An activation is multiplied as it is stored, because a copy would be part of every call.
Sums are in fp32. torch may add the parts of a split k in 16 bits, which is its default; direct
calls may not.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common.gpu_clock import GpuClock, flusher
from sparsebench.kernels._common.search import finalists, near, search
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, Launch, poison
from sparsebench.kernels.dense import _cublaslt
from sparsebench.kernels.dense._cublaslt import Algorithm, Gemm

LIBRARIES = "cublas", "cublaslt"  # names in torch.backends.cuda.preferred_blas_library
Layout = Literal["rows", "columns"]
LAYOUTS: tuple[Layout, ...] = "rows", "columns"

SIZES = 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192  # token counts to query
LONG = 1 << 37  # operations (0.2 ms of an H200 in bf16) above which combinations are not timed
KEPT, SCREENED = 48, 2  # calls that are timed in graphs, and samples of each before that
WRONG = 0.02  # relative error; fast accumulation in fp8 differs by 0.005


@dataclass(frozen=True, eq=False)
class DenseProduct:
    """A product to compute: out = scale * a @ b.

    weight  b is a weight or its transpose, so a copy may be made beforehand
    scale   used in 8 bits only
    tf32    multiply fp32 with 10 bits of mantissa
    relu    out = relu(a @ b); not in 8 bits
    """

    a: Tensor
    b: Tensor
    out: Tensor
    weight: bool = True
    scale: float = 1.0
    tf32: bool = False
    relu: bool = False

    @cached_property
    def gemms(self) -> dict[bool | None, Gemm]:
        """Return the arguments of direct cuBLASLt calls, by Way.use_fast_accum."""
        rest = self.a, self.b, self.out, self.scale, self.tf32
        if self.a.dtype == DTYPES["fp8"]:
            return {fast: Gemm(*rest, fast=fast) for fast in (True, False)}
        return {None: Gemm(*rest, relu=self.relu)}


@dataclass(frozen=True)
class Way:
    """One way to compute a product.

    library         one of LIBRARIES
    weights         their memory layout; None if b is an activation
    use_fast_accum  in fp8; None otherwise
    algorithm       of a direct cuBLASLt call; None for torch's call
    tokens          number of tokens for which the library proposed the algorithm, if it did
    """

    library: str
    weights: Layout | None = None
    use_fast_accum: bool | None = None
    algorithm: Algorithm | None = None
    tokens: int | None = None


FINALISTS_OF: dict[Hashable, list[Way]] = {}  # finalists of this process, by the kind of product


def fastest_way(
    product: DenseProduct,
    pinned: Mapping[str, Any] | None = None,
    space: Tensor | None = None,
    timed: Sequence[Mapping[str, Any]] = (),
) -> Launch:
    """Return the fastest call that computes product.out, or the pinned one.

    space  workspace that a pinned call shares with others (_cublaslt.py); None allocates one
    timed  candidates that an earlier process timed for this product (Operands.timed)

    The launch's choice has the fields of Way. Raises Unsupported if cuBLASLt refuses the pinned
    algorithm, or if no call can compute the product.
    """
    device = product.out.device
    if pinned:
        way = _way_of(pinned)
        return Launch(_call(_laid_out(product, way.weights), way, space), dict(pinned))
    kind = _kind(product)
    earlier = [_way_of(choice) for choice in finalists(timed)] or FINALISTS_OF.get(kind, [])
    layouts = dict.fromkeys(way.weights for way in earlier) or _layouts(product)
    laid = {layout: _laid_out(product, layout) for layout in layouts}
    ways = earlier or [way for layout, each in laid.items() for way in ways_of(each, layout)]
    if not ways:
        missing = _cublaslt.unavailable() or "it proposes no algorithm"
        raise Unsupported(f"cuBLASLt called directly: {missing}")
    ways = sorted(ways, key=lambda way: way.algorithm is not None)  # torch's calls come first
    space = _cublaslt.workspace(device) if ways[-1].algorithm else None
    calls = [_call(laid[way.weights], way, space) for way in ways]
    indices = screened(calls, KEPT, sum(not way.algorithm for way in ways), device)
    indices = _right(indices, calls, ways)
    result = search([calls[i] for i in indices], device)
    if kind not in FINALISTS_OF:
        times = [trial.time_us for trial in result.trials]
        FINALISTS_OF[kind] = earlier or [ways[indices[i]] for i in near(times)]
    way, choices = ways[indices[result.best]], [choice_of(ways[i], product) for i in indices]
    call = _call(laid[way.weights], way)
    return Launch(call, choices[result.best], candidates=result.lines(choices, whole=True))


def _kind(product: DenseProduct) -> Hashable:
    """Return the key of products that the same calls suit: everything except the values."""
    tensors = product.a, product.b, product.out
    laid = [(t.shape, t.stride(), t.dtype, _cublaslt.alignment(t)) for t in tensors]
    rest = product.weight, product.scale, product.tf32, product.relu
    return *laid, *rest, product.out.device


def _right(
    indices: Sequence[int], calls: Sequence[Callable[[], Tensor]], ways: Sequence[Way]
) -> list[int]:
    """Drop combinations that the library did not propose and whose result differs from the first's.

    The first call is torch's, or in int8 the library's own proposal.
    """
    unproposed = {i for i in indices if ways[i].algorithm and ways[i].tokens is None}
    if not unproposed:
        return [*indices]
    right = calls[0]().clone()
    if not right.isfinite().all():  # the operands overflow in every call
        return [*indices]

    def is_right(call: Callable[[], Tensor]) -> bool:
        poison(call())
        return agrees(call(), right)

    return [i for i in indices if i not in unproposed or is_right(calls[i])]


def agrees(out: Tensor, right: Tensor) -> bool:
    """Return whether a product equals the right one, up to rounding. Waits for the device."""
    return bool((out.float() - right.float()).norm() <= WRONG * right.float().norm())


def screened(
    calls: Sequence[Callable[[], object]], limit: int, always: int, device: torch.device
) -> list[int]:
    """Return the indices of the first `always` calls and of the fastest others, `limit` in total.

    On a CPU, return all. Others that raise are dropped, even if fewer than `limit` remain. Each is
    sampled SCREENED times with a cold L2 cache, and without a graph, because capturing one would
    take longer than the call.
    """
    if device.type != "cuda":
        return [*range(len(calls))]
    rest = [i for i in range(always, len(calls)) if runs(calls[i])]
    torch.cuda.synchronize(device)  # an illegal access raises here
    if always + len(rest) <= limit:
        return [*range(always), *rest]
    flush, clock = flusher(device), GpuClock(device)
    pairs = [(calls[i], True) for i in rest]
    rounds = [clock.cold(pairs, flush) for _ in range(SCREENED)]
    least = {
        i: min(sample.time_us for sample in samples)
        for i, samples in zip(rest, zip(*rounds, strict=True), strict=True)
    }
    best = sorted(rest, key=lambda i: least[i])[: limit - always]
    return [*range(always), *sorted(best)]


def runs(call: Callable[[], object]) -> bool:
    """Return whether a call raises no error. Raises OutOfMemoryError, which says nothing of it."""
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False
    return True


def ways_of(product: DenseProduct, layout: Layout | None) -> list[Way]:
    """Return the ways to time for a product whose weights have this layout."""
    ways = [Way(library, layout) for library in LIBRARIES]
    if product.a.dtype == DTYPES["fp8"]:
        ways = [Way("cublaslt", layout, fast) for fast in (True, False)]
    elif product.a.dtype == DTYPES["int8"]:
        ways = []
    if not _on_gpu(product) or _cublaslt.unavailable():
        return ways
    direct: dict[tuple[Algorithm, bool | None], Way] = {}
    for fast, gemm in product.gemms.items():
        for algorithm, tokens in algorithms_of(gemm):
            way = Way("cublaslt", layout, fast, algorithm, tokens)
            direct.setdefault((algorithm, fast), way)
    return [*ways, *direct.values()]


def algorithms_of(gemm: Gemm) -> list[tuple[Algorithm, int | None]]:
    """Return the algorithms to time, each with the token count for which it was proposed."""
    (m, k), n = gemm.a.shape, gemm.b.shape[1]
    proposed = [
        (each, rows) for rows in token_counts(m) for each in _cublaslt.algorithms(gemm, rows)
    ]
    if 2 * m * n * k > LONG:
        return [*proposed]
    more = _cublaslt.combined(gemm, [each for each, _ in proposed])
    return [*proposed, *((each, None) for each in more)]


def token_counts(m: int) -> list[int]:
    """Return the token counts to query algorithms for: m first, then sizes from m / 4 to 8 m."""
    return [m, *(size for size in SIZES if m <= 4 * size and size <= max(8 * m, 128) and size != m)]


def _laid_out(product: DenseProduct, layout: Layout | None) -> DenseProduct:
    """Return the product with its weight W [n, k], which is stored by rows, in this layout.

    b is W or the view W.T; by columns it becomes a copy in the other order.
    """
    if layout != "columns":
        return product
    b = product.b
    return replace(product, b=b.t().contiguous().t() if b.is_contiguous() else b.contiguous())


def _layouts(product: DenseProduct) -> Sequence[Layout | None]:
    if not product.weight:
        return (None,)
    both = _on_gpu(product) and product.a.itemsize > 1
    return LAYOUTS if both else LAYOUTS[:1]


def _on_gpu(product: DenseProduct) -> bool:
    return product.out.is_cuda


def _call(product: DenseProduct, way: Way, space: Tensor | None = None) -> Callable[[], Tensor]:
    """Return a call that computes product.out in this way, in `space` or in its own workspace."""
    a, out, fast = product.a, product.out, way.use_fast_accum
    if way.algorithm:
        return _cublaslt.bind(product.gemms[fast], way.algorithm, space)
    if fast is not None:
        scales = scales_on(a.device, product.scale)
        return partial(scaled_product, product.b.t(), a, fast, out, scales)
    run = partial(_torch_product, a, product.b, out, product.relu)
    return partial(by_library, way.library, run, product.tf32)


def _torch_product(a: Tensor, b: Tensor, out: Tensor, relu: bool) -> Tensor:
    torch.mm(a, b, out=out)
    return out.relu_() if relu else out


def choice_of(way: Way, product: DenseProduct) -> dict[str, Any]:
    """Return what the row records: the way, and the reason if cuBLASLt was not called directly."""
    choice = {name: value for name, value in asdict(way).items() if value is not None}
    if way.algorithm:
        choice["version"] = _cublaslt.version()
    choice |= precision(product.tf32)
    reason = _cublaslt.unavailable() if _on_gpu(product) else None
    return choice | ({"untried": f"cuBLASLt called directly: {reason}"} if reason else {})


def precision(tf32: bool) -> dict[str, str]:
    """Return the part of a choice that records TF32."""
    return {"fp32_precision": "tf32"} if tf32 else {}


def _way_of(choice: Mapping[str, Any]) -> Way:
    values = {each.name: choice[each.name] for each in fields(Way) if each.name in choice}
    if "algorithm" in values:
        values["algorithm"] = Algorithm(**values["algorithm"])
    return Way(**values)


def scaled_product(
    w: Tensor,
    x: Tensor,
    fast: bool,
    out: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return Y [m, n] of fp8 W [n, k] and X [m, k], with or without fast accumulation.

    scales  of X and W, fp32, one element each: they multiply the accumulators; None means 1
    """
    scales = scales or scales_on(x.device)
    dtype = OUTPUTS["fp8"]
    return torch._scaled_mm(x, w.t(), *scales, out_dtype=dtype, use_fast_accum=fast, out=out)


@cache
def scales_on(device: torch.device, of_w: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the scales of X, which is 1, and of W, as tensors on the device."""
    return torch.full((), 1.0, device=device), torch.full((), of_w, device=device)


def by_library(library: str, run: Callable[[], Tensor], tf32: bool = False) -> Tensor:
    """Call `run` with torch's products by one of the LIBRARIES, in TF32 if wanted."""
    with preferred(library), in_tf32() if tf32 else nullcontext():
        return run()


@contextmanager
def in_tf32() -> Iterator[None]:
    """Let torch multiply fp32 in TF32 inside the context."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextmanager
def preferred(library: str) -> Iterator[None]:
    """Let torch call one of the LIBRARIES inside the context. Takes about 5 us of host time."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
