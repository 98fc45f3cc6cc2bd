"""The element-wise kernels between the products of a feed-forward layer, in Triton.

    before    X [m, k] in 16 bits ──> X in e4m3                        `quantised`, in fp8 alone
                                      and a scale for each token       `scaled`, for layers
    between   G | U [m, 2 n] ───────> H [m, n] = act(s G) * (s U)      `hidden`; H in e4m3 in fp8

Values are rounded to the nearest e4m3; NaN stays NaN, and values beyond 448 become 448, because
Triton casts with cvt.rn.satfinite. s scales sums of fp8 products. act(s G) is not rounded. Each
element is read once and written once.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.triton import BoundKernel, Template
from sparsebench.kernels._kernel import DTYPES, unit_scale
from sparsebench.results.record import Problem

TOKENS, FEATURES = 16, 128  # tokens and features of a program
SWIGLU_ALPHA = tl.constexpr(1.702)
ROOT = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
BOUND = 256  # launches of `gated` and of `scaled` in a cache, one for each shape and stride


def hidden(
    products: Tensor, activation: str, dtype: torch.dtype | None = None, scale: float = 1.0
) -> BoundKernel:
    """Return the kernel that computes H [m, n] from contiguous products [m, 2 n].

    activation  silu, relu, relu2 or gelu_tanh (GELU in its tanh approximation)
    dtype       dtype of H; by default that of the products
    scale       factor of the products, applied first
    """
    m, n = len(products), products.shape[1] // 2
    h = products.new_empty(m, n, dtype=dtype)
    tokens, grid = _tiles(m, n)
    constants = {"TOKENS": tokens, "FEATURES": FEATURES, "ACTIVATION": activation, "SCALE": scale}
    return BoundKernel(_activate, grid, (products, h, m, n), constants, h)


def quantised(x: Tensor) -> BoundKernel:
    """Return the kernel that rounds X [m, k] to e4m3; rows of X may have any stride."""
    (m, k), out = x.shape, x.new_empty(x.shape, dtype=DTYPES["fp8"])
    tokens, grid = _tiles(m, k)
    constants = {"TOKENS": tokens, "FEATURES": FEATURES}
    return BoundKernel(_quantise, grid, (x, out, m, k, x.stride(0)), constants, out)


def scaled(x: Tensor, out: Tensor) -> Tensor:
    """Write X [m, k] in e4m3 into `out`, and return the scale of each token, fp32 [m].

    X = out * scale; the largest element of a token becomes 448. Rows of X may have any stride, and
    `out` is contiguous. Both start at multiples of 16 bytes. Enqueues on the current stream.
    """
    (scales,) = _scaling(x.shape, x.stride(0), x.dtype, x.device)(x, out)
    return scales


@lru_cache(BOUND)
def _scaling(
    shape: tuple[int, int], stride: int, dtype: torch.dtype, device: torch.device
) -> Template:
    """Return the launch of `scaled`, which is bound once on each device."""
    (m, k), columns = shape, triton.next_power_of_2(shape[1])
    x = torch.empty_strided(shape, (stride, 1), dtype=dtype, device="meta")
    out = torch.empty(shape, dtype=DTYPES["fp8"], device="meta")
    scales = torch.empty(m, dtype=torch.float32, device="meta")
    constants = {"COLUMNS": columns, "num_warps": min(max(columns // 512, 1), 16)}
    program = BoundKernel(_scale, (m,), (x, out, scales, k, stride), constants, scales)
    return Template([program], (x, out), [scales])


def gated(products: Tensor, activation: str) -> Tensor:
    """Return H [m, n] of contiguous products [m, 2 n], for layers; activations as for `hidden`.

    The products start at a multiple of 16 bytes. Enqueues on the current stream.
    """
    (h,) = _gating(products.shape, activation, products.dtype, products.device)(products)
    return h


@lru_cache(BOUND)
def _gating(
    shape: tuple[int, int], activation: str, dtype: torch.dtype, device: torch.device
) -> Template:
    """Return the launch of `gated`, which is bound once on each device."""
    program = hidden(torch.empty(shape, dtype=dtype, device="meta"), activation)
    return Template([program], (program.args[0],), [program.out])


def scale_of(problem: Problem, columns: int) -> float:
    """Return the factor of products with weights [n, columns]: unit_scale in fp8, otherwise 1."""
    return unit_scale(columns) if problem["dtype"] == "fp8" else 1.0


def _tiles(m: int, n: int) -> tuple[int, tuple[int]]:
    tokens = min(TOKENS, triton.next_power_of_2(m))
    return tokens, (triton.cdiv(m, tokens) * triton.cdiv(n, FEATURES),)


@triton.jit  # type: ignore[untyped-decorator]
def activated(gate, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return act(gate) of fp32, for kernels that hold it in registers."""
    act, _ = activated_with_slope(gate, ACTIVATION)
    return act


@triton.jit  # type: ignore[untyped-decorator]
def activated_with_slope(gate, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return act(gate) of fp32, and its derivative; clamped_swiglu takes a gate that is clamped."""
    if ACTIVATION == "relu" or ACTIVATION == "relu2":
        act = tl.where(gate <= 0, 0.0, gate)  # NaN stays
        slope = tl.where(gate <= 0, 0.0, 1.0)
        if ACTIVATION == "relu2":
            slope = 2 * act
            act = act * act
    else:  # gate * sigmoid(z)
        z, dz = gate, 1.0
        if ACTIVATION == "gelu_tanh":  # (1 + tanh(z / 2)) / 2 is sigmoid(z)
            z = (gate + 0.044715 * gate * gate * gate) * ROOT
            dz = (1 + 0.134145 * gate * gate) * ROOT
        if ACTIVATION == "clamped_swiglu":
            z, dz = gate * SWIGLU_ALPHA, SWIGLU_ALPHA
        act = gate / (1 + tl.exp(-z))
        sigmoid = 1 / (1 + tl.exp(-z))
        slope = sigmoid + act * (1 - sigmoid) * dz
    return act, slope


@triton.jit  # type: ignore[untyped-decorator]
def _activate(  # type: ignore[no-untyped-def]
    products,
    h,
    m,
    n,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr,
):
    tiles = tl.cdiv(n, FEATURES)
    token = tl.program_id(0) // tiles * TOKENS + tl.arange(0, TOKENS)
    feature = tl.program_id(0) % tiles * FEATURES + tl.arange(0, FEATURES)
    inside = (token < m)[:, None] & (feature < n)[None, :]
    row = token.to(tl.int64)[:, None]

    at = products + row * (2 * n) + feature[None, :]
    gate = tl.load(at, inside, 0.0).to(tl.float32) * SCALE
    up = tl.load(at + n, inside, 0.0).to(tl.float32) * SCALE
    gate = activated(gate, ACTIVATION)
    tl.store(h + row * n + feature[None, :], (gate * up).to(h.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]
    x, out, m, k, x_stride, TOKENS: tl.constexpr, FEATURES: tl.constexpr
):
    tiles = tl.cdiv(k, FEATURES)
    token = tl.program_id(0) // tiles * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(0) % tiles * FEATURES + tl.arange(0, FEATURES)
    inside = (token < m)[:, None] & (column < k)[None, :]
    row, column = token.to(tl.int64)[:, None], column[None, :]
    values = tl.load(x + row * x_stride + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * k + column, values.to(out.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _scale(x, out, scales, k, x_stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    values = tl.load(x + row * x_stride + column, column < k, 0.0).to(tl.float32)
    # div_rn: one element in a thousand lies halfway between two e4m3, and must round to even.
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values)), 448.0), 1e-30)  # not 0 for a row of zeros
    tl.store(scales + row, scale)
    rounded = tl.div_rn(values, scale).to(out.dtype.element_ty)
    tl.store(out + row * k + column, rounded, column < k)
