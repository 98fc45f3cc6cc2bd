"""Products of routed tokens with the weights of their experts: Y[s, n] = X[s, k] @ W_e[n, k].T.

    W [experts n, k]         X [m top_k, k]            ends [1, experts]
    +---------------+        +--------------------+
    | W_0   [n, k]  |        | rows of expert 0   |
    +---------------+        +--------------------+    ends[0]
    | W_1           |        | rows of expert 1   |
    +---------------+        +--------------------+    ends[1]
    | ...           |        | ...                |

m tokens go to top_k of the experts each. The m top_k rows are sorted by expert, and `ends` says on
the device where the rows of each expert end. W, all experts one below the other, is the sparse
operand. An end below the one before it counts as that one, and an end beyond X as the number of
its rows. Rows after the last end are zero in Y.

    routing   drawn from the seed. Each draw of the operands shuffles the tokens and relabels the
              experts, so that all draws hit as many experts, with as many rows
      uniform   all experts are equally likely
      measured  likelihoods as in a served layer of DeepSeek-V3: the busiest of 16 experts had 3.2
                times their mean, with a coefficient of variation of 0.72 (sglang issue 5524).
                Their squared variation is 1 / alpha in a Dirichlet distribution, so alpha is 2
      skewed    alpha is 0.5: the tokens of one domain
      one       all tokens go to the same top_k experts
      holes     half of the experts get no token, the others as `measured`

A token draws its experts without replacement: those with the largest sum of log(likelihood) and
Gumbel noise. Tokens are drawn independently. In a prompt they are correlated, and hit fewer
experts.

    fp8   as op linear: Y in bf16, without scales

With a loss L, dY is dL/dY:

    experts_dgrad   dX_e = dY_e @ W_e       gradient of the rows
    experts_wgrad   dW_e = dY_e.T @ X_e     gradient of the weights at their pattern; zero for an
                                            expert without rows
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal, Self

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor

from sparsebench.harness.inputs.bits import scores
from sparsebench.harness.ops import linear
from sparsebench.harness.ops._op import Fields, Op, Operand, require_field
from sparsebench.kernels._kernel import DTYPES, OUTPUTS
from sparsebench.results.record import Problem

Routing = Literal["uniform", "measured", "skewed", "one", "holes"]
CPU = torch.device("cpu")


class ExpertsFields(Fields):
    """A problem of this op: m tokens, and n x k weights of each expert."""

    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    experts: PositiveInt
    top_k: PositiveInt
    routing: Routing = "measured"
    dtype: Literal["fp16", "bf16", "fp32", "fp8"]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        fits = self.top_k <= self.experts
        require_field(fits, f"top_k of at most experts, {self.experts}", self.top_k)
        return self


def sizes(fields: Mapping[str, int]) -> dict[str, int]:
    """Return the fields, the rows of W and of X, and the one row of `ends`."""
    rows = fields["experts"] * fields["n"]
    return {**fields, "rows": rows, "routed": fields["m"] * fields["top_k"], "one": 1}


def likelihoods(problem: Problem) -> Tensor:
    """Return the likelihood of each expert, fp64 [experts], as the routing of a problem says."""
    experts, routing = problem["experts"], problem["routing"]
    if routing == "uniform":
        return torch.full((experts,), 1 / experts, dtype=torch.float64)
    if routing == "one":
        chosen: Tensor = torch.arange(experts) < problem["top_k"]
        return chosen.double()
    first, second = (_uniform(problem, f"experts {i}", experts) for i in range(2))
    weights = -torch.log(first * second)  # gamma distributed with alpha = 2
    if routing == "skewed":  # alpha = 1/2: half of the square of a normal number (Box and Muller)
        weights = -torch.log(first) * torch.cos(2 * torch.pi * second).square()
    if routing == "holes":
        weights[torch.arange(experts) >= max(problem["top_k"], experts // 2)] = 0
    return weights / weights.sum()


def _uniform(problem: Problem, name: str, count: int) -> Tensor:
    """Return random numbers between 0 and 1, on the CPU: the same bits whatever the device."""
    return (scores(problem.seed, name, count, CPU).double() + 0.5) / 2**31


def routes(problem: Problem, draw: int) -> Tensor:
    """Return the experts of each token, int64 [m, top_k]."""
    m, experts = problem["m"], problem["experts"]
    noise = _uniform(problem, "routes", m * experts).view(m, experts)
    gumbel = -torch.log(-torch.log(noise))
    likely = likelihoods(problem).log() + gumbel
    order, labels = (
        _uniform(problem, f"{name} {draw}", count).argsort()
        for name, count in (("tokens", m), ("experts", experts))
    )
    return labels[likely.topk(problem["top_k"]).indices[order]]


def rows_of_experts(problem: Problem, draw: int) -> Tensor:
    """Return how many rows of X each expert has, int64 [experts]."""
    return torch.bincount(routes(problem, draw).flatten(), minlength=problem["experts"])


@lru_cache(256)
def _experts_hit(fields: tuple[tuple[str, int], ...], seed: int) -> int:
    return int((rows_of_experts(Problem("experts", dict(fields), seed), 0) > 0).sum())


def experts_hit(problem: Problem) -> int:
    """Return how many experts have a row, which is the same in every draw."""
    names = "m", "experts", "top_k", "routing"
    return _experts_hit(tuple((name, problem[name]) for name in names), problem.seed)


def adjust(problem: Problem, name: str, operand: Tensor, draw: int) -> None:
    """Write where the rows of each expert end."""
    if name == "ends":
        operand.copy_(rows_of_experts(problem, draw).cumsum(0)[None])


def spans(ends: Tensor, rows: int) -> list[tuple[int, int]]:
    """Return the first and the last row + 1 of each expert."""
    stops = ends.long().flatten().clamp(0, rows).cummax(0).values.tolist()
    return list(zip([0, *stops], stops, strict=False))


def definition(w: Tensor, x: Tensor, ends: Tensor, *, experts: int) -> Tensor:
    """Return Y [rows, n] for W [experts n, k], X [rows, k] and the ends of the experts' rows."""
    of_experts = w.view(experts, -1, w.shape[1])
    parts = [
        linear.definition(of_expert, x[first:stop])
        for of_expert, (first, stop) in zip(of_experts, spans(ends, len(x)), strict=True)
    ]
    y = torch.cat(parts)
    return torch.cat([y, y.new_zeros(len(x) - len(y), y.shape[1])])


def spread(w: Tensor, x: Tensor, ends: Tensor, *, experts: int) -> Tensor:
    """Return sqrt(X² @ (W_e²).T): one standard deviation of a dot product of random signs."""
    return definition(w.square(), x.square(), ends, experts=experts).sqrt()


def depth(w: Tensor, x: Tensor, ends: Tensor) -> int:
    """Return the most non-zeros in a row of W."""
    return max(int((w != 0).sum(1).max()), 1)


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add per row and non-zero of its expert, of equal density."""
    return float(2 * problem["m"] * problem["top_k"] * nnz["w"] / problem["experts"])


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of the non-zeros of experts that have rows, of X, of Y and of `ends`."""
    rows = problem["m"] * problem["top_k"]
    weights = nnz["w"] * experts_hit(problem) // problem["experts"]
    written = OUTPUTS[problem["dtype"]].itemsize * rows * problem["n"]
    return int(itemsize * (weights + rows * problem["k"]) + written + 4 * problem["experts"])


OP = Op(
    fields=ExpertsFields,
    operands={
        "w": Operand("weight", ("rows", "k")),
        "x": Operand("activation", ("routed", "k")),
        "ends": Operand("routing", ("one", "experts"), dict.fromkeys(DTYPES, torch.int32)),
    },
    definition=definition,
    spread=spread,
    depth=depth,
    flops=flops,
    fewest_bytes=fewest_bytes,
    adjust=adjust,
    sizes=sizes,
    parts=lambda problem: (problem["m"] * problem["top_k"],),
    example={"m": 3, "n": 6, "k": 5, "experts": 2, "top_k": 2, "routing": "uniform"},
    exact="x",
)


class ExpertsGradientFields(ExpertsFields):
    """A problem of one of the gradients, without fp8."""

    dtype: Literal["fp16", "bf16", "fp32"]


def input_gradient(w: Tensor, dy: Tensor, ends: Tensor, *, experts: int) -> Tensor:
    """Return dX [rows, k] for W [experts n, k] and dY [rows, n]."""
    transposed = w.view(experts, -1, w.shape[1]).transpose(1, 2).flatten(0, 1)
    return definition(transposed, dy, ends, experts=experts)


def weight_gradient(dy: Tensor, x: Tensor, ends: Tensor, *, experts: int) -> Tensor:
    """Return the gradients of all elements of W [experts n, k], for dY [rows, n], X [rows, k]."""
    of_experts = spans(ends, len(x))
    return torch.cat([linear.weight_gradient(dy[a:b], x[a:b]) for a, b in of_experts])


DGRAD = replace(
    OP,
    fields=ExpertsGradientFields,
    operands={
        "w": Operand("weight", ("rows", "k")),
        "dy": Operand("activation", ("routed", "n")),
        "ends": OP.operands["ends"],
    },
    definition=input_gradient,
    spread=lambda w, dy, ends, *, experts: input_gradient(
        w.square(), dy.square(), ends, experts=experts
    ).sqrt(),
    depth=lambda w, dy, ends: dy.shape[1],
    exact="dy",
)
"""Gradient of the routed rows: dX_e = dY_e @ W_e."""

WGRAD = replace(
    DGRAD,
    operands={
        "w": Operand("pattern", ("rows", "k")),
        "dy": DGRAD.operands["dy"],
        "x": OP.operands["x"],
        "ends": OP.operands["ends"],
    },
    definition=weight_gradient,
    spread=lambda dy, x, ends, *, experts: weight_gradient(
        dy.square(), x.square(), ends, experts=experts
    ).sqrt(),
    depth=lambda dy, x, ends: len(dy),
    fewest_bytes=lambda problem, nnz, itemsize: int(
        itemsize * (nnz["w"] + problem["m"] * problem["top_k"] * (problem["n"] + problem["k"]))
        + 4 * problem["experts"]
    ),
    parts=lambda problem: (),
    exact="x",
)
"""Gradient of the weights at their pattern: dW_e = dY_e.T @ X_e."""
