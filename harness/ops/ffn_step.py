"""A training step of a gated feed-forward layer: its output, and the gradients of all operands.

    forward     G = X @ Wg.T     U = X @ Wu.T     H = act(G) * U     Y = H @ Wd.T
    backward    dH = dY @ Wd     dG = dH * U * act'(G)     dU = dH * act(G)

                  k
             +---------+
    Y        |         | m     H @ Wd.T
    dX       |         | m     dG @ Wg + dU @ Wu
    dWg      |         | n     dG.T @ X
    dWu      |         | n     dU.T @ X
    dWd.T    |         | n     H.T @ dY
             +---------+

The output is one tensor with these five, one below the other. A kernel that cannot write there
copies all five: (2m + 3n) k elements read and written, 2 % of a dense step of 16,384 tokens. Each
of the five is judged by its own size (`parts`), because gradients of weights are sums over tokens
and by far the largest. Weights are dense. With `active`, that many units are active for a
token. FLOPs and bytes count all units for G and only these for the other products (_active.py).
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from sparsebench.harness.ops._active import adjust, all_active, share, share_of_any
from sparsebench.harness.ops._op import INTERMEDIATE, Op, Operand, longest_row
from sparsebench.harness.ops.ffn import FfnFields, act_of, slope_of
from sparsebench.kernels._kernel import DTYPES
from sparsebench.results.record import Problem

ZERO = 128 * torch.finfo(torch.float32).eps
"""A gate below this fraction of its spread may have either sign when it is summed in fp32."""


class StepFields(FfnFields):
    """A problem of this op: dense weights, and an activation that is zero where its gradient is.

    fp32 is excluded: a gate within its rounding of zero adds a term to dX and dWg or does not, and
    that is a million times the rounding of fp32.
    """

    dtype: Literal["fp16", "bf16"]
    pattern: Literal["dense"] = "dense"
    activation: Literal["relu", "relu2"] = "relu"


def definition(
    wg: Tensor, wu: Tensor, wd: Tensor, x: Tensor, dy: Tensor, *, activation: str
) -> Tensor:
    """Return the five parts, [2m + 3n, k], for Wg and Wu [n, k], Wd [k, n], X and dY [m, k]."""
    g, u = linear(x, wg), linear(x, wu)
    act = act_of(g, activation)
    h, dh = act * u, dy @ wd
    du, dact = dh * act, dh * u
    if activation == "relu":
        dg = torch.ops.aten.threshold_backward(dact, g, 0)  # as autograd has it
    else:
        dg = dact * (2 * relu(g))
    dx = torch.addmm(dg @ wg, du, wu)
    return torch.cat((linear(h, wd), dx, dg.t() @ x, du.t() @ x, h.t() @ dy))


def spread(
    wg: Tensor, wu: Tensor, wd: Tensor, x: Tensor, dy: Tensor, *, activation: str, dtype: str
) -> Tensor:
    """Carry the spreads of G, U and dH through H, dG and dU, and of these through the products.

    As in ffn.py, each square has the rounding of the values between two products, and each
    product's own terms. relu's gradient jumps at zero, where sums in fp32 may have either sign:
    there all of dG is within the bound. In bf16, with 29 of 5632 units on and 16,384 tokens, this
    affects one of 150 rows of dX and one of 50 of dWg, and raises their bounds by factors of 1.2
    and 1.3.
    """
    g, u, dh = linear(x, wg), linear(x, wu), dy @ wd
    var_g, var_u = (linear(x.square(), w.square()) for w in (wg, wu))
    act, on, var_u = act_of(g, activation), (g > 0).to(g.dtype), var_u + u.square()
    around = slope_of(g, var_g, activation).square() * (var_g + g.square())  # of act(g)
    slope, of_slope = (on, 0) if activation == "relu" else (2 * relu(g), 4 * on * var_g)
    h, dg, du = act * u, dh * u * slope, dh * act
    var_dh = dy.square() @ wd.square() + dh.square()
    h2 = u.square() * around + act.square() * var_u + 2 * h.square()
    du2 = dh.square() * around + act.square() * var_dh + 2 * du.square()
    dg2 = slope.square() * (u.square() * var_dh + dh.square() * var_u) + 2 * dg.square()
    dg2 += (dh * u).square() * of_slope
    if activation == "relu":
        part = INTERMEDIATE * torch.finfo(DTYPES[dtype]).eps
        dg2 += (dh * u / part).square().where(g.abs() <= ZERO * var_g.sqrt(), 0)
    x2, dy2, wg2, wu2, wd2 = (t.square() for t in (x, dy, wg, wu, wd))
    parts = linear(h2, wd2), dg2 @ wg2 + du2 @ wu2, dg2.t() @ x2, du2.t() @ x2, h2.t() @ dy2
    return torch.cat(parts).sqrt()


def depth(wg: Tensor, wu: Tensor, wd: Tensor, x: Tensor, dy: Tensor) -> int:
    """Return the tokens, or the most non-zeros in a row or column of a weight."""
    return max(len(x), longest_row(wg, wu, wd, wg.t(), wu.t(), wd.t()))


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return a multiply and an add for each term of nine products; only G counts all units."""
    sparse = 2 * nnz["wg"] + 3 * nnz["wu"] + 3 * nnz["wd"]
    return float(2 * problem["m"] * (nnz["wg"] + share(problem) * sparse))


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of X, dY, Y, dX, the weights and their gradients.

    In Wu and Wd, only units that are on for any token count; gradients are written with zeros.
    """
    m, n, k = problem["m"], problem["n"], problem["k"]
    read = nnz["wg"] + share_of_any(problem) * (nnz["wu"] + nnz["wd"])
    return int(itemsize * (read + 4 * m * k + 3 * n * k))


def parts(problem: Problem) -> tuple[int, ...]:
    """Return the number of rows of each of the five parts."""
    m, n = problem["m"], problem["n"]
    return m, m, n, n, n


OP = Op(
    fields=StepFields,
    operands={
        "wg": Operand("weight", ("n", "k")),
        "wu": Operand("weight", ("n", "k")),
        "wd": Operand("weight", ("k", "n")),
        "x": Operand("activation", ("m", "k")),
        "dy": Operand("activation", ("m", "k")),
    },
    definition=definition,
    spread=spread,
    intermediates=("g", "u", "act(g)", "h", "dh", "dg", "du"),
    depth=depth,
    flops=flops,
    fewest_bytes=fewest_bytes,
    dense=all_active,
    adjust=partial(adjust, "wg"),
    parts=parts,
)
