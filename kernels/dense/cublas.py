"""Dense baseline on an NVIDIA GPU: the op's definition in torch, in the problem's dtype.

For `linear` that is one GEMM. torch calls two libraries, cuBLAS and cuBLASLt. Their heuristics pick
different kernels for one shape. `prepare` times both and keeps the faster, so that the baseline is
at its best. Accumulation is in fp32 (the default of torch and of cuBLAS).

    fp32    without TF32 (10 bits of mantissa): unsupported in a process that lets torch use it
    tf32    each call switches TF32 on, and back afterwards
    fp8     torch._scaled_mm, which is cuBLASLt. Accumulators keep the 13 bits of the tensor cores
            (fast accumulation, as in inference), or are added to fp32 every few instructions. Both
            are timed; both pass the check (harness/bench/check.py); the choice names the one that
            was kept. In ffn, torch clamps and casts X and h by kernels of their own, and cuBLASLt
            scales.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import relu, silu

from sparsebench.kernels._common.search import fastest
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, Kernel, Launch, Operands, unit_scale
from sparsebench.results.record import Problem

LIBRARIES = "cublas", "cublaslt"  # names in torch.backends.cuda.preferred_blas_library
FP8_CAPABILITY = 8, 9
FP8_ALIGNMENT = 16  # of n and k, which cuBLASLt requires in fp8
FP8_OPS = "linear", "ffn"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "relu": relu,
    "relu2": lambda z: relu(z).square(),
}


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
    """Keep the fastest library, or in fp8 the fastest accumulation."""
    weights = {name: weight.to_dense() for name, weight in operands.weights.items()}
    arguments = {**weights, **operands.activations}
    if operands.problem["dtype"] == "fp8":
        ways = [
            Launch(
                partial(in_fp8(operands, fast), **arguments),
                {"library": "cublaslt", "use_fast_accum": fast},
            )
            for fast in (True, False)
        ]
    else:
        tf32 = operands.problem["dtype"] == "tf32"
        run = partial(operands.definition, **arguments)
        ways = [_product(run, library, tf32) for library in LIBRARIES]
    pinned = operands.pinned
    ways = [way for way in ways if not pinned or way.choice == pinned]
    return ways[fastest_product(ways, operands.device)]


def fastest_product(calls: Sequence[Callable[[], object]], device: torch.device) -> int:
    """Return the index of the fastest call; calls may choose a library (`preferred`)."""
    with warnings.catch_warnings():
        # torch warns once in a process that the choice of a library is experimental.
        warnings.filterwarnings("ignore", message=".*preferred_blas_library is an experimental")
        return fastest(calls, device)


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


def _product(definition: Callable[[], Tensor], library: str, tf32: bool) -> Launch:
    def run() -> Tensor:
        with preferred(library), tf32_products(tf32):
            return definition()

    return Launch(run, {"library": library} | ({"fp32_precision": "tf32"} if tf32 else {}))


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
