"""Gradient of a linear layer's input: dX[m, k] = dY[m, n] @ W[n, k].

m tokens, n output features, k input features; W is the sparse operand. With Y = X @ W.T and a loss
L, dY is dL/dY and dX is dL/dX.
"""

from collections.abc import Mapping

from torch import Tensor

from sparsebench.harness.ops._op import Op, Operand, longest_row
from sparsebench.harness.ops.linear import GradientFields, counts, flops
from sparsebench.results.record import Problem


def definition(w: Tensor, dy: Tensor) -> Tensor:
    """Return dX [m, k] for W [n, k] and dY [m, n]."""
    return dy @ w


def spread(w: Tensor, dy: Tensor) -> Tensor:
    """Return sqrt(dY² @ W²): one standard deviation of a dot product of random signs."""
    return definition(w.square(), dy.square()).sqrt()


def depth(w: Tensor, dy: Tensor) -> int:
    """Return the most non-zeros in a column of W."""
    return longest_row(w.t())


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of W's non-zeros, of dX, and of the features of dY that meet a non-zero."""
    m, n, k = problem["m"], nnz.get("rows", problem["n"]), problem["k"]
    return int(itemsize * (nnz["w"] + m * n + m * k))


OP = Op(
    fields=GradientFields,
    operands={"w": Operand("weight", ("n", "k")), "dy": Operand("activation", ("m", "n"))},
    definition=definition,
    spread=spread,
    depth=depth,
    flops=flops,
    fewest_bytes=fewest_bytes,
    counts=counts,
)
