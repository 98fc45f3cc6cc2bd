"""Gated feed-forward layer: Y[m, k] = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T, X[m, k].

m tokens, k model width, n hidden units; Wg and Wu [n, k] and Wd [k, n] are the sparse operands.

    activation  silu  z / (1 + exp(-z))      relu  max(z, 0)      relu2  max(z, 0)²

    fp8   Wg, Wu and Wd in float8_e4m3fn, each unit_scale(its columns) times the stored values, so
          that g, u and Y are about 1; X and Y in bf16. A kernel rounds X, and h = act(g) u, to e4m3
          at a scale of 1, clamped at 448, and its launch holds both. This file does not round them.

With `active`, that many units are on for a token, and only those count as work. The sparse operand
is then h = act(X @ Wg.T) (_active.py).
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal, Self

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor
from torch.nn.functional import linear, relu, silu

from sparsebench.harness.ops._active import (
    ActiveFields,
    adjust,
    all_active,
    count_active,
    keeps_first,
    share,
    share_of_any,
)
from sparsebench.harness.ops._op import Op, Operand, require_field
from sparsebench.kernels._kernel import OUTPUTS, unit_scale
from sparsebench.results.record import Problem

SPARSEST_FP8 = 0.9


class FfnFields(ActiveFields):
    """A problem of this op; n is the hidden width.

    tf32 is excluded: operands truncated to 10 bits, in two consecutive products, shift Y by up to
    2.8e-3. Rounding them to bf16 scatters Y as much, and the check could not tell these apart.
    """

    dtype: Literal["fp16", "bf16", "fp32", "fp8"]
    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    activation: Literal["silu", "relu", "relu2"] = "silu"

    @model_validator(mode="after")
    def _keeps_to_e4m3(self) -> Self:
        require_values_of_e4m3(self.dtype, self.sparsity)
        return self


def require_values_of_e4m3(dtype: str, sparsity: float) -> None:
    """Raise ValueError if h is too small for e4m3 at a scale of 1 (smallest number 2^-9).

    With 95 % of the weights zero, its rounding takes up to 1.1 of the bound, with 90 % 0.82.
    """
    dense = dtype != "fp8" or sparsity <= SPARSEST_FP8
    require_field(dense, f"sparsity up to {SPARSEST_FP8} in fp8", sparsity)


def definition(
    wg: Tensor, wu: Tensor, wd: Tensor, x: Tensor, *, activation: str, dtype: str = "bf16"
) -> Tensor:
    """Return Y [m, k] for Wg and Wu [n, k], Wd [k, n], X [m, k]; fp8 computes in fp32."""
    stored = wg.dtype
    wg, wu, wd = (_with_scale(w, dtype) for w in (wg, wu, wd))
    x = x.to(wg.dtype)
    y = linear(act_of(linear(x, wg), activation) * linear(x, wu), wd)
    return y.bfloat16() if stored == torch.float8_e4m3fn else y


def spread(
    wg: Tensor, wu: Tensor, wd: Tensor, x: Tensor, *, activation: str, dtype: str = "bf16"
) -> Tensor:
    """Carry the spreads of gate g and up u through h = act(g) u, and that of h through Wd.

        S(h)² = (act'(g) u)² (S(g)² + g²) + act(g)² (S(u)² + u²) + 2 h²
        S(y)² = (S(h)² + h²) @ (Wd²).T

    g, u, act(g) and h may be rounded to the dtype; in fp8, only x and h to e4m3, and S(h) has
    neither g² nor u², and h² once. The last term of S(y) is that of the last product.
    """
    wg, wu, wd = (_with_scale(w, dtype) for w in (wg, wu, wd))
    g, u = linear(x, wg), linear(x, wu)
    var_g, var_u = linear(x.square(), wg.square()), linear(x.square(), wu.square())
    act, slope = act_of(g, activation), slope_of(g, var_g, activation)
    h2 = (act * u).square()
    if dtype != "fp8":
        var_g, var_u = var_g + g.square(), var_u + 2 * u.square()
    var_h = (slope * u).square() * var_g + act.square() * var_u + h2
    return linear(var_h + h2, wd.square()).sqrt()


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add per token and non-zero, without the n activations.

    In Wu and Wd, only active units count.
    """
    multiplied = nnz["wg"] + share(problem) * (nnz["wu"] + nnz["wd"])
    return float(2 * problem["m"] * multiplied)


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of X, Y and the non-zeros; hidden units may stay on the chip.

    In Wu and Wd, only units that are on for any token count.
    """
    m, k = problem["m"], problem["k"]
    read = nnz["wg"] + share_of_any(problem) * (nnz["wu"] + nnz["wd"])
    return int(itemsize * read + OUTPUTS[problem["dtype"]].itemsize * 2 * m * k)


def _with_scale(w: Tensor, dtype: str) -> Tensor:
    if dtype != "fp8":
        return w
    return (w.float() if w.dtype == torch.float8_e4m3fn else w) * unit_scale(w.shape[1])


def act_of(z: Tensor, activation: str) -> Tensor:
    match activation:
        case "silu":
            return silu(z)
        case "relu":
            return relu(z)
        case _:
            return relu(z).square()


def slope_of(z: Tensor, variance: Tensor, activation: str) -> Tensor:
    """Return act'(z); relu's is 1 also slightly below zero, where rounding may change z's sign.

    `variance` is that of z: a correct z is within 8 eps of its root (bench/correctness.py), in bf16
    a 16th; an X rounded to e4m3 moves it by a 40th (standard deviation).
    """
    match activation:
        case "silu":
            s = z.sigmoid()
            return s * (1 + z * (1 - s))
        case "relu":
            return (z > -variance.sqrt() / 16).to(z.dtype)
        case _:
            return 2 * relu(z)


OP = Op(
    fields=FfnFields,
    operands={
        "wg": Operand("weight", ("n", "k")),
        "wu": Operand("weight", ("n", "k")),
        "wd": Operand("weight", ("k", "n")),
        "x": Operand("activation", ("m", "k"), OUTPUTS),
    },
    definition=definition,
    spread=spread,
    intermediates=("g", "u", "act(g)", "h"),
    flops=flops,
    fewest_bytes=fewest_bytes,
    dense=all_active,
    recorded=partial(count_active, "wg"),
    adjust=partial(adjust, "wg"),
    keeps_first=partial(keeps_first, "wg"),
)
