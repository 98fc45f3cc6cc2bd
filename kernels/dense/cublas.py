"""Dense baseline on an NVIDIA GPU: every product of an op by the fastest way there is.

    Y [m, n] = a [m, k] @ b [k, n]          b is a weight, transposed or not, or an activation

A product is timed in every way, captured in graphs and with a cold L2 cache:

    torch's products, by cuBLAS and by cuBLASLt       each library's own choice of an algorithm
  + cuBLASLt called directly (_cublaslt.py)           what it proposes for m tokens and for others
  x weights by rows, by columns                       as stored, or a copy of W.T made beforehand
  x fp8: sums with 13 bits, or in fp32                cuBLASLt alone has it, on Hopper only by rows

That is up to a thousand calls. A first look leaves KEPT of them, and the search one, which the row
names. A process that meets an equal product again, as other blocks and sparsities have it, times
those that were near the fastest (search.py). So does a later process of a verdict, of those that
the first one found. Without nvmath-python cuBLASLt cannot be called
directly, and the row says that, too.
An activation is taken as it arrives: a copy of it would be part of every call.

    fp32    without TF32 (10 bits of mantissa): unsupported in a process that lets torch use it
    tf32    each call of torch switches TF32 on, and back afterwards
    fp8     fast accumulation keeps the 13 bits of the tensor cores, as in inference; otherwise sums
            are added to fp32 every few instructions. Both pass the check (bench/correctness.py).

Sums are in fp32 everywhere else. torch's own calls may add the parts of a split k in 16 bits, which
is torch's default; direct calls may not.

Layers of several products are cublas_ffn.py's and _layers.py's. Any other op is its definition in
torch, by the faster library; so is a layer whose pinned choice names one library, as older rows do.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import relu, silu

from sparsebench.kernels._common.search import Search, finalists, near, search
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, Kernel, Launch, Operands, unit_scale
from sparsebench.kernels.dense import _cublaslt
from sparsebench.kernels.dense._cublaslt import Algorithm, Gemm
from sparsebench.kernels.dense._screen import screened
from sparsebench.results.record import Problem

LIBRARIES = "cublas", "cublaslt"  # names in torch.backends.cuda.preferred_blas_library
Layout = Literal["rows", "columns"]
LAYOUTS: tuple[Layout, ...] = "rows", "columns"

SIZES = 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192  # tokens to ask for
LONG = 1 << 37  # operations, 0.2 ms of an H200 in bf16: from there on no combinations are timed
KEPT = 48  # calls that are timed in graphs
WRONG = 0.02  # relative; fast accumulation of fp8 differs by 0.005

FP8_CAPABILITY = 8, 9
FP8_ALIGNMENT = 16  # of n and k, which cuBLASLt requires in fp8
FP8_OPS = "linear", "ffn"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "relu": relu,
    "relu2": lambda z: relu(z).square(),
}

PRODUCTS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "linear": lambda w, x: (x, w.t()),
    "linear_dgrad": lambda w, dy: (dy, w),
    "linear_wgrad": lambda dy, x: (dy.t(), x),
}
"""The ops that are one product: their operands to a and b."""

LAYERS = "ffn", "mlp", "ffn_step"
"""The ops that are several: of ffn, cublas_ffn.py; of the others, _layers.py."""


@dataclass(frozen=True, eq=False)
class Product:
    """What is to be computed: out = scale * a @ b.

    weight  b is a weight, or its transpose: a copy may be made beforehand
    scale   in fp8 alone
    tf32    fp32 is multiplied with 10 bits of mantissa
    relu    out = relu(a @ b); not in fp8
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
        """Return the product as cuBLASLt is called directly, by the accumulation."""
        fasts = (True, False) if self.a.dtype == DTYPES["fp8"] else (None,)
        rest = self.a, self.b, self.out, self.scale, self.tf32
        return {fast: Gemm(*rest, fast=bool(fast), relu=self.relu) for fast in fasts}


@dataclass(frozen=True)
class Way:
    """One way to compute a product.

    library         one of LIBRARIES
    weights         how they lie; None for an activation
    use_fast_accum  in fp8; None elsewhere
    algorithm       of cuBLASLt called directly; None is torch's call
    tokens          that the library proposed the algorithm for, where it did
    """

    library: str
    weights: Layout | None = None
    use_fast_accum: bool | None = None
    algorithm: Algorithm | None = None
    tokens: int | None = None


_finalists: dict[Hashable, list[Way]] = {}  # of this process, by the kind of product


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Say why fp8 cannot run here, or that fp32 would run in TF32; else None."""
    if problem["dtype"] == "fp8":
        return _odd_fp8(problem) or unsupported_fp8(device)
    precision = torch.backends.cuda.matmul.fp32_precision
    if problem["dtype"] == "fp32" and precision == "tf32":
        return "expected fp32 products, found torch.backends.cuda.matmul.fp32_precision = 'tf32'"
    return None


def unsupported_fp8(device: torch.device) -> str | None:
    """Say why the device cannot multiply fp8, or None."""
    if device.type != "cuda":
        return f"products of fp8 need an NVIDIA GPU, found {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found < FP8_CAPABILITY:
        return f"products of fp8 need compute capability 8.9 or newer, found {found[0]}.{found[1]}"
    return None


def prepare(operands: Operands) -> Launch:
    """Keep the fastest way of each product; elsewhere the faster library. Raises Unsupported."""
    problem = operands.problem
    if problem.op in PRODUCTS:
        return _one_product(operands)
    if _known_layer(operands):
        from sparsebench.kernels.dense import (
            _layers,
            cublas_ffn,
        )  # these import this file, and Triton

        return {"ffn": cublas_ffn.prepare, **_layers.LAYERS}[problem.op](operands)
    return _definition(operands)


def _known_layer(operands: Operands) -> bool:
    """Say whether a layer is computed product by product, and not as its definition in torch.

    A choice that names one library for all of it is one of a definition.
    """
    cuda, pinned = operands.device.type == "cuda", operands.pinned or {}
    return operands.problem.op in LAYERS and cuda and "library" not in pinned


def _one_product(operands: Operands) -> Launch:
    problem = operands.problem
    weights = {name: weight.to_dense() for name, weight in operands.weights.items()}
    a, b = PRODUCTS[problem.op](**weights, **operands.activations)
    out = a.new_empty(len(a), b.shape[1], dtype=OUTPUTS[problem["dtype"]])
    tf32 = problem["dtype"] == "tf32"
    product = Product(a, b, out, bool(weights), tf32=tf32)
    return fastest_way(product, operands.pinned, timed=operands.timed)


def _definition(operands: Operands) -> Launch:
    """Keep the faster library for the op's definition in torch, or in fp8 the accumulation."""
    weights = {name: weight.to_dense() for name, weight in operands.weights.items()}
    arguments = {**weights, **operands.activations}
    if operands.problem["dtype"] == "fp8":
        launches = [
            Launch(
                partial(in_fp8(operands, fast), **arguments),
                {"library": "cublaslt", "use_fast_accum": fast},
            )
            for fast in (True, False)
        ]
    else:
        run, tf32 = partial(operands.definition, **arguments), operands.problem["dtype"] == "tf32"
        more = _precision(tf32)
        launches = [
            Launch(partial(_by, library, run, tf32), {"library": library, **more})
            for library in LIBRARIES
        ]
    pinned = operands.pinned
    launches = [each for each in launches if not pinned or each.choice == pinned]
    return launches[fastest_product(launches, operands.device)]


def fastest_way(
    product: Product,
    pinned: Mapping[str, Any] | None = None,
    space: Tensor | None = None,
    timed: Sequence[Mapping[str, Any]] = (),
) -> Launch:
    """Return the call that writes product.out the fastest way, or the pinned one.

    space  that a pinned call shares with others (_cublaslt.py); None gives it its own
    timed  what an earlier process timed for this product (Operands.timed)

    Its choice is the Way's fields. Raises Unsupported if cuBLASLt refuses the pinned algorithm.
    """
    device = product.out.device
    if pinned:
        way = _way_of(pinned)
        return Launch(_call(_laid_out(product, way.weights), way, space), dict(pinned))
    kind = _kind(product)
    known = [_way_of(choice) for choice in finalists(timed)] or _finalists.get(kind, [])
    layouts = dict.fromkeys(way.weights for way in known) or _layouts(product)
    laid = {layout: _laid_out(product, layout) for layout in layouts}
    ways = known or [way for layout, each in laid.items() for way in ways_of(each, layout)]
    ways = sorted(ways, key=lambda way: way.algorithm is not None)  # torch's own come first
    space = _cublaslt.workspace(device) if ways[-1].algorithm else None
    calls = [_call(laid[way.weights], way, space) for way in ways]
    kept = screened(calls, KEPT, sum(not way.algorithm for way in ways), device)
    kept = _right(kept, calls, ways)
    found = searched([calls[i] for i in kept], device)
    if kind not in _finalists:
        _finalists[kind] = known or [ways[kept[i]] for i in _near(found)]
    way, choices = ways[kept[found.best]], [_choice(ways[i], product) for i in kept]
    call = _call(laid[way.weights], way)
    return Launch(call, choices[found.best], candidates=found.told(choices, whole=True))


def _near(found: Search) -> list[int]:
    return near([trial.time_us for trial in found.trials])


def _kind(product: Product) -> Hashable:
    """Return what products have in common that the same calls suit: all but the numbers."""
    tensors = product.a, product.b, product.out
    laid = [(t.shape, t.stride(), t.dtype, _cublaslt.alignment(t)) for t in tensors]
    rest = product.weight, product.scale, product.tf32, product.relu
    return *laid, *rest, product.out.device


def _right(
    kept: Sequence[int], calls: Sequence[Callable[[], Tensor]], ways: Sequence[Way]
) -> list[int]:
    """Return the calls without combinations of our own that differ from torch's product."""
    unproposed = {i for i in kept if ways[i].algorithm and ways[i].tokens is None}
    if not unproposed:
        return [*kept]
    right = calls[0]().clone()
    if not right.isfinite().all():  # of operands that overflow; any way does
        return [*kept]

    def differs(call: Callable[[], Tensor]) -> bool:
        call().fill_(torch.nan)
        return not (call() - right).float().norm() <= WRONG * right.float().norm()

    return [i for i in kept if i not in unproposed or not differs(calls[i])]


def ways_of(product: Product, layout: Layout | None) -> list[Way]:
    """Return the ways to time of a product whose weights lie as they shall."""
    fp8 = product.a.dtype == DTYPES["fp8"]
    kinds: list[tuple[str, bool | None]] = [(library, None) for library in LIBRARIES]
    kinds = [("cublaslt", fast) for fast in (True, False)] if fp8 else kinds
    ways = [Way(library, layout, fast) for library, fast in kinds]
    if not _on_gpu(product) or _cublaslt.unavailable():
        return ways
    direct: dict[tuple[Algorithm, bool | None], Way] = {}
    for fast, gemm in product.gemms.items():
        for algorithm, tokens in _algorithms(gemm):
            way = Way("cublaslt", layout, fast, algorithm, tokens)
            direct.setdefault((algorithm, fast), way)
    return [*ways, *direct.values()]


def _algorithms(gemm: Gemm) -> list[tuple[Algorithm, int | None]]:
    """Return the algorithms to time, and for how many tokens the library proposed each."""
    (m, k), n = gemm.a.shape, gemm.b.shape[1]
    proposed = [(each, rows) for rows in asked(m) for each in _cublaslt.algorithms(gemm, rows)]
    if 2 * m * n * k > LONG:
        return [*proposed]
    more = _cublaslt.combined(gemm, [each for each, _ in proposed])
    return [*proposed, *((each, None) for each in more)]


def asked(m: int) -> list[int]:
    """Return the numbers of tokens that algorithms are asked for: m first, then m / 4 to 8 m."""
    return [m, *(size for size in SIZES if m <= 4 * size and size <= max(8 * m, 128) and size != m)]


def _laid_out(product: Product, layout: Layout | None) -> Product:
    """Return the product with its weight W [n, k], which arrives by rows, laid out so.

    b is W or the view W.T; by columns it is a copy in the other order.
    """
    if layout != "columns":
        return product
    b = product.b
    return replace(product, b=b.t().contiguous().t() if b.is_contiguous() else b.contiguous())


def _layouts(product: Product) -> Sequence[Layout | None]:
    if not product.weight:
        return (None,)
    other = _on_gpu(product) and product.a.dtype != DTYPES["fp8"]
    return LAYOUTS if other else LAYOUTS[:1]


def _on_gpu(product: Product) -> bool:
    """Say whether the product runs where tests do not: on a CPU there is nothing to choose."""
    return product.out.is_cuda


def _call(product: Product, way: Way, space: Tensor | None = None) -> Callable[[], Tensor]:
    """Return a call that computes product.out in this way, in this space or in its own."""
    if way.algorithm:
        return _cublaslt.bind(product.gemms[way.use_fast_accum], way.algorithm, space)
    a, out, fast = product.a, product.out, way.use_fast_accum
    if fast is not None:
        scales = scales_on(a.device, product.scale)
        return partial(scaled_product, product.b.t(), a, fast, out, scales)
    run = partial(_torch_product, a, product.b, out, product.relu)
    return partial(_by, way.library, run, product.tf32)


def _torch_product(a: Tensor, b: Tensor, out: Tensor, relu: bool) -> Tensor:
    torch.mm(a, b, out=out)
    return out.relu_() if relu else out


def _by(library: str, run: Callable[[], Tensor], tf32: bool = False) -> Tensor:
    with preferred(library), tf32_products(tf32):
        return run()


def _choice(way: Way, product: Product) -> dict[str, Any]:
    """Return what the row says: the way, and what was not tried."""
    choice = {name: value for name, value in asdict(way).items() if value is not None}
    if way.algorithm:
        choice["version"] = _cublaslt.version()
    choice |= _precision(product.tf32)
    reason = _cublaslt.unavailable() if _on_gpu(product) else None
    return choice | ({"untried": f"cuBLASLt called directly: {reason}"} if reason else {})


def _precision(tf32: bool) -> dict[str, str]:
    return {"fp32_precision": "tf32"} if tf32 else {}


def _way_of(choice: Mapping[str, Any]) -> Way:
    """Return the way that a row names."""
    known = {each.name: choice[each.name] for each in fields(Way) if each.name in choice}
    if "algorithm" in known:
        known["algorithm"] = Algorithm(**known["algorithm"])
    return Way(**known)


def fastest_product(calls: Sequence[Callable[[], object]], device: torch.device) -> int:
    """Return the index of the fastest call; calls may choose a library (`preferred`)."""
    return searched(calls, device).best


def searched(calls: Sequence[Callable[[], object]], device: torch.device) -> Search:
    """Time the calls; they may choose a library (`preferred`)."""
    with warnings.catch_warnings():
        # torch warns once in a process that the choice of a library is experimental.
        warnings.filterwarnings("ignore", message=".*preferred_blas_library is an experimental")
        return search(calls, device)


def in_fp8(operands: Operands, fast: bool) -> Callable[..., Tensor]:
    """Return the op, one of FP8_OPS, in fp8 as torch computes it: a function of its operands."""
    problem, device = operands.problem, operands.device
    if problem.op == "linear":
        return partial(scaled_product, fast=fast, scales=scales_on(device))
    act, limit = ACTIVATIONS[problem["activation"]], torch.finfo(DTYPES["fp8"]).max
    inner, outer = (scales_on(device, unit_scale(problem[size])) for size in ("k", "n"))

    def quantised(z: Tensor) -> Tensor:
        return z.clamp(-limit, limit).to(DTYPES["fp8"])  # the cast alone gives NaN beyond the limit

    def gated(wg: Tensor, wu: Tensor, wd: Tensor, x: Tensor) -> Tensor:
        x = quantised(x)
        gate, up = (scaled_product(w, x, fast, scales=inner) for w in (wg, wu))
        return scaled_product(wd, quantised(act(gate) * up), fast, scales=outer)

    return gated


def scaled_product(
    w: Tensor,
    x: Tensor,
    fast: bool,
    out: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return Y [m, n] of fp8 W [n, k] and X [m, k], with fast accumulation or without.

    scales  of X and W, fp32, one element each: they multiply the accumulators; None is 1
    """
    scales = scales or scales_on(x.device)
    dtype = OUTPUTS["fp8"]
    return torch._scaled_mm(x, w.t(), *scales, out_dtype=dtype, use_fast_accum=fast, out=out)


@cache
def scales_on(device: torch.device, of_w: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the scales of X, which is 1, and of W, as tensors on the device."""
    return torch.full((), 1.0, device=device), torch.full((), of_w, device=device)


def _odd_fp8(problem: Problem) -> str | None:
    """Say why cuBLASLt cannot run an fp8 problem on any device, or None."""
    if problem.op not in FP8_OPS:
        return f"expected op {' or '.join(FP8_OPS)} in fp8, found {problem.op}"
    n, k = problem["n"], problem["k"]
    if n % FP8_ALIGNMENT or k % FP8_ALIGNMENT:
        return f"cuBLASLt expected n and k to be multiples of 16 in fp8, found n {n} and k {k}"
    return None


def tf32_products(wanted: bool) -> AbstractContextManager[None]:
    """Let torch multiply fp32 in TF32 inside the context, if wanted."""
    return _in_tf32() if wanted else nullcontext()


@contextmanager
def _in_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextmanager
def preferred(library: str) -> Iterator[None]:
    """Let torch call one of the LIBRARIES inside the context. Takes the host about 5 us."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


KERNEL = Kernel(op="any", consumes="dense", device="cuda", prepare=prepare, unsupported=unsupported)
