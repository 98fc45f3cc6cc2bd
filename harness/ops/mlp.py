"""Feed-forward layer without a gate: Y[m, k] = act(X @ Wu.T) @ Wd.T, X[m, k].

m tokens, k model width, n hidden units; Wu [n, k] and Wd [k, n] are the sparse operands.

    activation  silu  z / (1 + exp(-z))      relu  max(z, 0)      relu2  max(z, 0)²

With `active`, that many units are on for a token; in Wd only those count as work (_active.py).
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal

from torch import Tensor
from torch.nn.functional import linear

from sparsebench.harness.ops._active import adjust, all_active, keeps_first, share, share_of_any
from sparsebench.harness.ops._op import Op, Operand
from sparsebench.harness.ops.ffn import FfnFields, act_of, slope_of
from sparsebench.results.record import Problem


class MlpFields(FfnFields):
    """A problem of this op; without fp8, for which there is no kernel here."""

    dtype: Literal["fp16", "bf16", "fp32"]


def definition(wu: Tensor, wd: Tensor, x: Tensor, *, activation: str) -> Tensor:
    """Return Y [m, k] for Wu [n, k], Wd [k, n] and X [m, k]."""
    return linear(act_of(linear(x, wu), activation), wd)


def spread(wu: Tensor, wd: Tensor, x: Tensor, *, activation: str) -> Tensor:
    """Carry the spread of u through h = act(u), and that of h through Wd (see ffn.py)."""
    u, var_u = linear(x, wu), linear(x.square(), wu.square())
    h2 = act_of(u, activation).square()
    slope = slope_of(u, var_u, activation)
    var_h = slope.square() * (var_u + u.square()) + h2
    return linear(var_h + h2, wd.square()).sqrt()


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add per token and non-zero; in Wd, of active units."""
    return float(2 * problem["m"] * (nnz["wu"] + share(problem) * nnz["wd"]))


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of X, Y and the non-zeros; in Wd, of units that are on for any token."""
    read = nnz["wu"] + share_of_any(problem) * nnz["wd"]
    return int(itemsize * (read + 2 * problem["m"] * problem["k"]))


OP = Op(
    fields=MlpFields,
    operands={
        "wu": Operand("weight", ("n", "k")),
        "wd": Operand("weight", ("k", "n")),
        "x": Operand("activation", ("m", "k")),
    },
    definition=definition,
    spread=spread,
    intermediates=("u", "h"),
    flops=flops,
    fewest_bytes=fewest_bytes,
    dense=all_active,
    adjust=partial(adjust, "wu"),
    keeps_first=partial(keeps_first, "wu"),
)
