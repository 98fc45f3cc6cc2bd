"""Gated feed-forward layer: Y[m, k] = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T, X[m, k].

m tokens, k model width, n hidden units; Wg and Wu [n, k] and Wd [k, n] are the sparse operands.

    activation  silu  z / (1 + exp(-z))      relu  max(z, 0)      relu2  max(z, 0)²

With `active`, so many units a token are on, and only those count as work: the sparse operand is
then h = act(X @ Wg.T), which no format stores (_active.py).
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import PositiveInt
from torch import Tensor
from torch.nn.functional import linear, relu, silu

from sparsebench.harness.ops._active import ActiveFields, adjust, all_active, share, share_of_any
from sparsebench.harness.ops._op import Op, Operand, longest_row
from sparsebench.results.record import Problem


class FfnFields(ActiveFields):
    """A problem of this op; n is the hidden width.

    No tf32: operands cut off at 10 bits, in two products after one another, shift Y by up to
    2.8e-3. Rounded to bf16 they scatter it as much, and the check could not tell these apart.
    """

    dtype: Literal["fp16", "bf16", "fp32"]
    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    activation: Literal["silu", "relu", "relu2"] = "silu"


def definition(wg: Tensor, wu: Tensor, wd: Tensor, x: Tensor, *, activation: str) -> Tensor:
    """Wg and Wu [n, k], Wd [k, n], X [m, k] to Y [m, k]."""
    return linear(act_of(linear(x, wg), activation) * linear(x, wu), wd)


def spread(wg: Tensor, wu: Tensor, wd: Tensor, x: Tensor, *, activation: str) -> Tensor:
    """Carry the spreads of gate g and up u through h = act(g) u, and that of h through Wd.

        S(h)² = (act'(g) u S(g))² + (act(g) S(u))² + h²      S(y)² = (S(h)² + h²) @ (Wd²).T

    In S(h) the last term is the rounding of h itself; in S(y), the terms of the last product.
    """
    g, u = linear(x, wg), linear(x, wu)
    var_g, var_u = linear(x.square(), wg.square()), linear(x.square(), wu.square())
    act, slope = act_of(g, activation), slope_of(g, var_g, activation)
    h2 = (act * u).square()
    var_h = (slope * u).square() * var_g + act.square() * var_u + h2
    return linear(var_h + h2, wd.square()).sqrt()


def depth(wg: Tensor, wu: Tensor, wd: Tensor, x: Tensor) -> int:
    """Return the most non-zeros in a row of a weight."""
    return longest_row(wg, wu, wd)


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add a token and non-zero; the n activations count for nothing.

    Of Wu and Wd, what units that are on multiply.
    """
    multiplied = nnz["wg"] + share(problem) * (nnz["wu"] + nnz["wd"])
    return float(2 * problem["m"] * multiplied)


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of X, Y and the non-zeros; the hidden units need never leave the chip.

    Of Wu and Wd, what belongs to units that are on for any token.
    """
    m, k = problem["m"], problem["k"]
    read = nnz["wg"] + share_of_any(problem) * (nnz["wu"] + nnz["wd"])
    return int(itemsize * (read + 2 * m * k))


def act_of(z: Tensor, activation: str) -> Tensor:
    """Return act(z)."""
    match activation:
        case "silu":
            return silu(z)
        case "relu":
            return relu(z)
        case _:
            return relu(z).square()


def slope_of(z: Tensor, variance: Tensor, activation: str) -> Tensor:
    """Return act'(z); relu's is 1 somewhat below zero, too, since a rounding may take z across.

    `variance` is that of z: a right z is within 8 eps of its root (check.py), in bf16 a 16th.
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
        "x": Operand("activation", ("m", "k")),
    },
    definition=definition,
    spread=spread,
    depth=depth,
    flops=flops,
    fewest_bytes=fewest_bytes,
    dense=all_active,
    adjust=lambda problem, name, operand, draw: adjust(problem, "wg", name, operand, draw),
)
