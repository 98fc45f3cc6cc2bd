"""Linear layer of sparse inputs, without bias: Y[m, n] = X[m, k] @ W[n, k].T, W dense.

    W [n, k]                 x of one token
    +---+---+---+---+        +---+
    | # | . | # | . |        | a |
    | # | . | # | . |   x    | 0 |       only columns of W with a nonzero input count
    | # | . | # | . |        | b |
    +---+---+---+---+        | 0 |
                             +---+

m tokens, n output features, k input features. On average, `active` inputs of a token are not
zero. A hash selects them anew in every draw, independently for each token. Pruning activations by
magnitude produces such inputs (TEAL, La RoSA) and keeps the largest ones. Here all inputs have the
same distribution, because their values do not change the time.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from sparsebench.harness.inputs.bits import scores
from sparsebench.harness.ops._active import all_active, share
from sparsebench.harness.ops._op import require_field
from sparsebench.harness.ops.linear import OP as LINEAR
from sparsebench.harness.ops.linear import LinearFields
from sparsebench.results.record import Problem

SCORES = 2**31  # scores are integers below this


class ActiveInputFields(LinearFields):
    """A problem of this op; `active` is the mean number of inputs that are not zero, None is k."""

    dtype: Literal["fp16", "bf16", "fp32"]
    pattern: Literal["dense"] = "dense"
    active: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        few = self.active is None or self.active <= self.k
        require_field(few, f"active of at most k, {self.k}", self.active)
        return self


def depth(w: Tensor, x: Tensor) -> int:
    """Return the most inputs of a token that are not zero."""
    return max(int((x != 0).sum(1).max()), 1)


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add per token and weight whose input is not zero."""
    return float(2 * problem["m"] * nnz["w"] * share(problem, "k"))


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of X, Y and the columns of W that any token needs."""
    m, n, k = problem["m"], problem["n"], problem["k"]
    read = nnz["w"] * (1 - (1 - share(problem, "k")) ** m)
    return int(itemsize * (read + m * (k + n)))


def adjust(problem: Problem, name: str, operand: Tensor, draw: int) -> None:
    """Write zeros to the inputs of X that a draw leaves out."""
    if name == "x" and problem["active"] is not None:
        score = scores(problem.seed, f"inputs {draw}", operand.numel(), operand.device)
        operand.masked_fill_(score.view(operand.shape) >= int(share(problem, "k") * SCORES), 0)


OP = replace(
    LINEAR,
    fields=ActiveInputFields,
    depth=depth,
    flops=flops,
    fewest_bytes=fewest_bytes,
    dense=all_active,
    adjust=adjust,
    values={"x": "normal, with zeros"},
)
