"""Dense baseline on an NVIDIA GPU: cuBLAS and cuBLASLt, every product by its fastest call.

linear and its gradients    one product; _gemm.py searches the calls (PRODUCTS)
ffn, mlp, ffn_step          several products, each searched (_layers.py)
any other op                the op's definition in torch, by the faster of the two libraries

fp32    without TF32 (10 bits of mantissa): unsupported in a process that lets torch use it
tf32    each call of torch switches TF32 on, and back afterwards
int8    products in int32, scaled and rounded to int8 by cuBLASLt, which torch does not call so
fp8     fast accumulation keeps the 13 bits of the tensor cores, as in inference; otherwise sums
        are added to fp32 every few instructions. Both pass the check (bench/correctness.py).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import relu, silu

from sparsebench.kernels._common.search import search
from sparsebench.kernels._kernel import (
    DTYPES,
    OUTPUTS,
    Kernel,
    Launch,
    Operands,
    sum_scale,
    unit_scale,
)
from sparsebench.kernels.dense._gemm import (
    LIBRARIES,
    DenseProduct,
    by_library,
    fastest_way,
    precision,
    scaled_product,
    scales_on,
)
from sparsebench.results.record import Problem

CAPABILITIES = {"fp8": (8, 9), "int8": (8, 0)}
ALIGNMENT = 16  # n and k must be multiples, as cuBLASLt requires in 8 bits
OPS = {"fp8": ("linear", "ffn"), "int8": ("linear",)}  # ops by the dtypes that not all ops have
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "relu": relu,
    "relu2": lambda z: relu(z).square(),
}

PRODUCTS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "linear": lambda w, x: (x, w.t()),
    "linear_active": lambda w, x: (x, w.t()),
    "linear_dgrad": lambda w, dy: (dy, w),
    "linear_wgrad": lambda dy, x: (dy.t(), x),
}
"""The ops that are one product: a and b from their operands."""

LAYERS = "ffn", "mlp", "ffn_step"
"""The ops that are several products (_layers.py)."""


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if (dtype := problem["dtype"]) in OPS:
        return _odd_8_bits(problem) or unsupported_8_bits(dtype, device)
    setting = torch.backends.cuda.matmul.fp32_precision
    if problem["dtype"] == "fp32" and setting == "tf32":
        return "expected fp32 products, found torch.backends.cuda.matmul.fp32_precision = 'tf32'"
    return None


def unsupported_8_bits(dtype: str, device: torch.device) -> str | None:
    """Return why a device has no products of fp8 or int8, or None."""
    if device.type != "cuda":
        return f"products of {dtype} need an NVIDIA GPU, found {device.type}"
    actual = torch.cuda.get_device_capability(device)
    if actual < CAPABILITIES[dtype]:
        least, present = (f"{major}.{minor}" for major, minor in (CAPABILITIES[dtype], actual))
        return f"products of {dtype} need compute capability {least} or newer, found {present}"
    return None


def _odd_8_bits(problem: Problem) -> str | None:
    dtype, n, k = problem["dtype"], problem["n"], problem["k"]
    if problem.op not in OPS[dtype]:
        return f"expected op {' or '.join(OPS[dtype])} in {dtype}, found {problem.op}"
    if n % ALIGNMENT or k % ALIGNMENT:
        return f"cuBLASLt expected n and k to be multiples of 16 in {dtype}, found n {n} and k {k}"
    return None


def prepare(operands: Operands) -> Launch:
    problem = operands.problem
    if problem.op in PRODUCTS:
        return _one_product(operands)
    if problem.op in LAYERS and operands.device.type == "cuda":
        from sparsebench.kernels.dense import _layers  # needs Triton, which only Linux has

        return _layers.PREPARE[problem.op](operands)
    return _definition(operands)


def _one_product(operands: Operands) -> Launch:
    problem = operands.problem
    weights = {name: weight.to_dense() for name, weight in operands.weights.items()}
    a, b = PRODUCTS[problem.op](**weights, **operands.activations)
    out = a.new_empty(len(a), b.shape[1], dtype=OUTPUTS[problem["dtype"]])
    dtype = problem["dtype"]
    product = DenseProduct(a, b, out, bool(weights), sum_scale(dtype, a.shape[1]), dtype == "tf32")
    return fastest_way(product, operands.pinned, timed=operands.timed)


def _definition(operands: Operands) -> Launch:
    """Return the op's definition by the faster library."""
    weights = {name: weight.to_dense() for name, weight in operands.weights.items()}
    tf32 = operands.problem["dtype"] == "tf32"
    definition = partial(operands.definition, **weights, **operands.activations)
    launches = [
        Launch(
            partial(by_library, library, definition, tf32), {"library": library, **precision(tf32)}
        )
        for library in LIBRARIES
    ]
    pinned = operands.pinned
    launches = [each for each in launches if not pinned or each.choice == pinned]
    return launches[search(launches, operands.device).best]


def in_fp8(operands: Operands, fast: bool) -> Callable[..., Tensor]:
    """Return one of OPS in fp8 as torch computes it: a function of the op's operands."""
    problem, device = operands.problem, operands.device
    if problem.op == "linear":
        return partial(scaled_product, fast=fast, scales=scales_on(device))
    act, limit = ACTIVATIONS[problem["activation"]], torch.finfo(DTYPES["fp8"]).max
    inner, outer = (scales_on(device, unit_scale(problem[size])) for size in ("k", "n"))

    def quantised(z: Tensor) -> Tensor:
        return z.clamp(-limit, limit).to(DTYPES["fp8"])  # a bare cast gives NaN beyond the limit

    def gated(wg: Tensor, wu: Tensor, wd: Tensor, x: Tensor) -> Tensor:
        x = quantised(x)
        gate, up = (scaled_product(w, x, fast, scales=inner) for w in (wg, wu))
        return scaled_product(wd, quantised(act(gate) * up), fast, scales=outer)

    return gated


KERNEL = Kernel(op="any", consumes="dense", device="cuda", prepare=prepare, unsupported=unsupported)
