"""Gradient of a linear layer's weight at its pattern: dW[n, k] = dY[m, n].T @ X[m, k].

m tokens, n output features, k input features. With Y = X @ W.T and a loss L, dY is dL/dY and dW is
dL/dW. W gives the pattern; its values are not read. The gradient is computed where the format
stores W: whole blocks in BSR, the full product in dense.
"""

from collections.abc import Mapping

from torch import Tensor

from sparsebench.harness.ops._op import Op, Operand
from sparsebench.harness.ops.linear import GradientFields, counts, flops
from sparsebench.results.record import Problem


def definition(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of every element of W [n, k], for dY [m, n] and X [m, k]."""
    return dy.t() @ x


def spread(dy: Tensor, x: Tensor) -> Tensor:
    """Return sqrt((dY²).T @ X²): one standard deviation of a dot product of random signs."""
    return definition(dy.square(), x.square()).sqrt()


def depth(dy: Tensor, x: Tensor) -> int:
    """Return the number of tokens, over which every sum runs."""
    return len(dy)


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of dW's elements, and of the features of dY and X that they need."""
    m, n, k = problem["m"], nnz.get("rows", problem["n"]), nnz.get("columns", problem["k"])
    return int(itemsize * (nnz["w"] + m * n + m * k))


OP = Op(
    fields=GradientFields,
    operands={
        "w": Operand("pattern", ("n", "k")),
        "dy": Operand("activation", ("m", "n")),
        "x": Operand("activation", ("m", "k")),
    },
    definition=definition,
    spread=spread,
    depth=depth,
    flops=flops,
    fewest_bytes=fewest_bytes,
    counts=counts,
)
