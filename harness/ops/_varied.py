"""Values of a decoding step with the variance of each, in units of eps² (decoder.py)."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsebench.harness.ops._op import Values
from sparsebench.harness.ops.ffn import act_of, slope_of

FINE_FP8 = 2.0**-4  # variance of a rounding to bf16 if eps is e4m3's (bench/correctness.py)
ROWS = 4096  # rows of a weight that are squared at a time

Varied = tuple[Tensor, Tensor]


def fine_of(fields: Values) -> float:
    """Return the variance of a rounding of values that are not in 8 bits."""
    return FINE_FP8 if fields["dtype"] == "fp8" else 1.0


def product(z: Tensor, var: Tensor, w: Tensor, fine: float) -> Varied:
    """Return Z @ W.T, whose operands were rounded, and so is the result."""
    y = linear(z, w)
    return y, by_squares(var + z.square(), w) + fine * y.square()


def gated(
    z: Tensor, var: Tensor, weights: tuple[Tensor, Tensor, Tensor], activation: str, fine: float
) -> Varied:
    """Return what a gated MLP computes of a varied input."""
    wg, wu, wd = weights
    (g, var_g), (u, var_u) = product(z, var, wg, fine), product(z, var, wu, fine)
    act, slope = act_of(g, activation), slope_of(g, var_g, activation)
    var = (slope * u).square() * var_g + act.square() * var_u
    return product(act * u, var, wd, fine)


def by_squares(x: Tensor, w: Tensor) -> Tensor:
    """Return x times the squares of w, ROWS at a time: a head's in fp64 would take 6.2 GB."""
    return torch.cat([linear(x, rows.square()) for rows in w.split(ROWS)], 1)
