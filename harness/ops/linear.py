"""Linear layer without bias: Y[m, n] = X[m, k] @ W[n, k].T, as torch.nn.functional.linear.

m tokens, n output features, k input features; W is the sparse operand.

    fp8   Y = bf16(X @ W.T), X and W in float8_e4m3fn, sums in fp32

A model in fp8 has one scale per token and one per output channel, and multiplies the finished sums
by both. Here the scales are 1 and left out, because they do not depend on the format. cuSPARSELt
0.8 takes no scale per channel on Hopper, so with scales its time would include a second kernel.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from sparsebench.harness.ops._op import Fields, Op, Operand, longest_row
from sparsebench.kernels._kernel import OUTPUTS
from sparsebench.results.record import Problem


class LinearFields(Fields):
    """A problem of this op."""

    m: PositiveInt
    n: PositiveInt
    k: PositiveInt


class GradientFields(LinearFields):
    """A problem of one of its gradients; without fp8, because fp8 training stores dY in e5m2."""

    dtype: Literal["fp16", "bf16", "fp32", "tf32"]


def definition(w: Tensor, x: Tensor) -> Tensor:
    """Return Y [m, n] for W [n, k] and X [m, k]."""
    if w.dtype == torch.float8_e4m3fn:
        return torch.nn.functional.linear(x.float(), w.float()).bfloat16()
    return torch.nn.functional.linear(x, w)


def spread(w: Tensor, x: Tensor) -> Tensor:
    """Return sqrt(X² @ (W²).T): one standard deviation of a dot product of random signs."""
    return definition(w.square(), x.square()).sqrt()


def depth(w: Tensor, x: Tensor) -> int:
    """Return the most non-zeros in a row of W."""
    return longest_row(w)


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add per token and non-zero."""
    return float(2 * problem["m"] * nnz["w"])


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of W's non-zeros, X and Y."""
    m, n, k = problem["m"], problem["n"], problem["k"]
    return int(itemsize * (nnz["w"] + m * k) + OUTPUTS[problem["dtype"]].itemsize * m * n)


OP = Op(
    fields=LinearFields,
    operands={"w": Operand("weight", ("n", "k")), "x": Operand("activation", ("m", "k"))},
    definition=definition,
    spread=spread,
    depth=depth,
    flops=flops,
    fewest_bytes=fewest_bytes,
)
