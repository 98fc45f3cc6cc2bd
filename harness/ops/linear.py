"""Linear layer without bias: Y[m, n] = X[m, k] @ W[n, k].T, as torch.nn.functional.linear.

m tokens, n output features, k input features; W is the sparse operand. With a loss L, dY is dL/dY:

    linear_dgrad   dX[m, k] = dY[m, n] @ W[n, k]        gradient of the input
    linear_wgrad   dW[n, k] = dY[m, n].T @ X[m, k]      gradient of the weight at its pattern

W gives wgrad's pattern; its values are not read. The gradient is computed where the format stores
W: whole blocks in BSR, the full product in dense.

    fp8   Y = bf16(X @ W.T), X and W in float8_e4m3fn, sums in fp32

A model in fp8 has one scale per token and one per output channel, and multiplies the finished sums
by both. Here the scales are 1 and left out, because they do not depend on the format. cuSPARSELt
0.8 takes no scale per channel on Hopper, so with scales its time would include a second kernel.

    int8  Y = int8(s X @ W.T), X and W in int8, sums in int32, s a power of two (sum_scale)

Y is rounded to the nearest step and saturates. Both libraries multiply so in one call, and write a
quarter of the bytes of int32, in which SlideSparse's dense product writes Y. With s for each token
and channel, as models have, cuBLASLt would again need a second kernel.

    weight_bits: 4   W has values of 4 bits, so that kernels of quantised weights can take part

Each group of 128 weights of a row is rounded to multiples, -8 to 7 times, of one scale of 4 bits of
mantissa. All products of a multiple and a scale are exact in 16 bits. Every contender multiplies
these weights, whatever bits it stores them in, and is checked against them. No weight that is
kept becomes zero.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import is_stored
from sparsebench.harness.ops._op import Fields, Op, Operand, longest_row, require_field
from sparsebench.kernels._kernel import OUTPUTS, sum_scale
from sparsebench.results.record import Problem

GROUP = 128  # weights per scale
STEPS, MOST = 7, 8  # multiples of the scale: of the largest weight, and of any
CUT = 2**20 - 1  # bits of a mantissa of fp32 that a scale does not have


class LinearFields(Fields):
    """A problem of this op or of a related one."""

    m: PositiveInt
    n: PositiveInt
    k: PositiveInt


class WeightFields(LinearFields):
    """A problem of this op; `weight_bits` is the bits of the weights' values, None the dtype's."""

    weight_bits: Literal[4] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        wide = not self.weight_bits or self.dtype not in ("fp8", "int8")
        require_field(wide, "weight_bits: expected a dtype of 16 or 32 bits", self.dtype)
        return self


class GradientFields(LinearFields):
    """A problem of one of its gradients; without fp8 and int8: training stores dY in e5m2."""

    dtype: Literal["fp16", "bf16", "fp32", "tf32"]


def definition(w: Tensor, x: Tensor, *, dtype: str = "bf16") -> Tensor:
    """Return Y [m, n] for W [n, k] and X [m, k]; int8 operands are multiplied in fp64: exactly."""
    if dtype == "int8":
        limits, sums = torch.iinfo(torch.int8), torch.nn.functional.linear(x.double(), w.double())
        y = sums.mul_(sum_scale(dtype, x.shape[1])).clamp_(limits.min, limits.max)
        return y.to(w.dtype) if w.is_floating_point() else y.round_().to(torch.int8)
    if w.dtype == torch.float8_e4m3fn:
        return torch.nn.functional.linear(x.float(), w.float()).bfloat16()
    return torch.nn.functional.linear(x, w)


def spread(w: Tensor, x: Tensor, *, dtype: str = "bf16") -> Tensor:
    """Return sqrt(X² @ (W²).T): one standard deviation of a dot product of random signs."""
    return definition(w.square(), x.square()).sqrt().mul_(sum_scale(dtype, x.shape[1]))


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add per token and non-zero."""
    return float(2 * problem["m"] * nnz["w"])


def counts(problem: Problem, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the non-zeros of W, and how many of its rows and columns have any."""
    stored = is_stored(weights["w"])
    rows, columns = (int(stored.any(axis).sum()) for axis in (1, 0))
    return {"w": int(stored.sum()), "rows": rows, "columns": columns}


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of W's non-zeros, Y, and the features of X that meet a non-zero."""
    m, n, k = problem["m"], problem["n"], nnz.get("columns", problem["k"])
    weights = nnz["w"] * (_bits(problem) or 8 * itemsize) // 8
    return int(weights + itemsize * m * k + OUTPUTS[problem["dtype"]].itemsize * m * n)


def adjust(problem: Problem, name: str, operand: Tensor, draw: int) -> None:
    """Round the weights to 4 bits if the problem has `weight_bits`."""
    if name == "w" and _bits(problem):
        n, k = operand.shape
        groups = pad(operand.float(), (0, -k % GROUP)).view(n, -1, GROUP)
        bits = (groups.abs().amax(2, keepdim=True) / STEPS).view(torch.int32)
        scales = (bits + CUT & ~CUT).view(torch.float32)  # rounded up
        multiples = (groups / scales).nan_to_num(0).round().clamp(-MOST, MOST - 1)
        multiples = torch.where(multiples == 0, groups.sign(), multiples)
        operand.copy_((multiples * scales).view(n, -1)[:, :k])


def _bits(problem: Problem) -> int | None:
    bits = problem.fields.get("weight_bits")
    return bits if isinstance(bits, int) else None


OP = Op(
    fields=WeightFields,
    operands={"w": Operand("weight", ("n", "k")), "x": Operand("activation", ("m", "k"))},
    definition=definition,
    spread=spread,
    flops=flops,
    fewest_bytes=fewest_bytes,
    counts=counts,
    adjust=adjust,
    exact="x",
)


def input_gradient(w: Tensor, dy: Tensor) -> Tensor:
    """Return dX [m, k] for W [n, k] and dY [m, n]."""
    return dy @ w


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of every element of W [n, k], for dY [m, n] and X [m, k]."""
    return dy.t() @ x


def bytes_of_input_gradient(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of W's non-zeros, of dX, and of the features of dY that meet a non-zero."""
    m, n, k = problem["m"], nnz.get("rows", problem["n"]), problem["k"]
    return int(itemsize * (nnz["w"] + m * n + m * k))


def bytes_of_weight_gradient(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of dW's elements, and of the features of dY and X that they need."""
    m, n, k = problem["m"], nnz.get("rows", problem["n"]), nnz.get("columns", problem["k"])
    return int(itemsize * (nnz["w"] + m * n + m * k))


DGRAD = Op(
    fields=GradientFields,
    operands={"w": Operand("weight", ("n", "k")), "dy": Operand("activation", ("m", "n"))},
    definition=input_gradient,
    spread=lambda w, dy: input_gradient(w.square(), dy.square()).sqrt(),
    depth=lambda w, dy: longest_row(w.t()),
    flops=flops,
    fewest_bytes=bytes_of_input_gradient,
    counts=counts,
    exact="dy",
)
"""Gradient of a linear layer's input: dX[m, k] = dY[m, n] @ W[n, k]."""

WGRAD = replace(
    DGRAD,
    operands={
        "w": Operand("pattern", ("n", "k")),
        "dy": Operand("activation", ("m", "n")),
        "x": Operand("activation", ("m", "k")),
    },
    definition=weight_gradient,
    fewest_bytes=bytes_of_weight_gradient,
    spread=lambda dy, x: weight_gradient(dy.square(), x.square()).sqrt(),
    depth=lambda dy, x: len(dy),  # every sum runs over the tokens
    exact="x",
)
"""Gradient of a linear layer's weight at its pattern: dW[n, k] = dY[m, n].T @ X[m, k]."""
